"""What the benchmarks print and write: rows of named values, as a table and as JSON."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

Value = str | int | float | None
Row = Mapping[str, Value]


def parser(module_doc: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has; the module's docstring is the help."""
    made = argparse.ArgumentParser(description=module_doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, too")
    return made


def table(rows: Sequence[Row]) -> str:
    """Rows of equal keys as a Markdown table, aligned to be read as it is."""
    cells = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |"
             for line in cells]
    lines.insert(1, "| " + " | ".join("-" * (width - 1) + ":" for width in widths) + " |")
    return "\n".join(lines)


def write(rows: Sequence[Row], file: Path | None) -> None:
    """Write rows as a JSON list, where a file was asked for."""
    if file is not None:
        file.write_text(json.dumps(list(map(dict, rows)), indent=1) + "\n")


def mib(size: float) -> float:
    return size / 2**20


def _text(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)
