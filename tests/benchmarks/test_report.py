"""Rows as tables and files."""

import json
from pathlib import Path

from benchmarks import report


def test_a_table_is_markdown_with_equal_widths() -> None:
    rows: list[report.Row] = [{"stage": 0, "held / theory": 1.234}, {"stage": 3, "held / theory": None}]
    assert report.table(rows) == ("| stage | held / theory |\n"
                                  "| ----: | ------------: |\n"
                                  "|     0 |          1.23 |\n"
                                  "|     3 |               |")


def test_large_numbers_have_no_decimals() -> None:
    assert report.table([{"a": 99.996, "b": 1234.6}]).splitlines()[2] == "| 100.00 | 1235 |"


def test_rows_are_written_in_full_where_asked_for(tmp_path: Path) -> None:
    rows: list[report.Row] = [{"stage": 0, "ratio": 1.23456}]
    report.write(rows, tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == rows
    report.write(rows, None)
