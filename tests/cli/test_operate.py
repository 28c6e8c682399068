"""token, db upgrade, doctor, help; and what starting the command line may load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.service.auth import Auth
from autotune.settings import Settings
from autotune.store import Database
from tests.cli.conftest import Run


def test_a_new_token_replaces_the_old_one(run: Run, tmp_path: Path) -> None:
    first = run("token", "--data-dir", str(tmp_path)).out.strip()
    second = json.loads(run("token", "--data-dir", str(tmp_path), "--json").out)["token"]
    database = Database(f"sqlite:///{tmp_path}/autotune.sqlite3")
    auth = Auth(database, Settings(data_dir=tmp_path))
    assert len(first) >= 43
    assert not auth.check_token(first)
    assert auth.check_token(second)
    database.close()


def test_a_token_set_by_the_operator_cannot_be_replaced(
        run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_TOKEN", "my-own-token-of-some-length")
    result = run("token", "--data-dir", str(tmp_path))
    assert result.code == 2
    assert "AUTOTUNE_TOKEN" in result.err


def test_upgrade_may_run_twice(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("db", "upgrade", "--data-dir", str(tmp_path)).out == "the database is up to date\n"


def test_doctor_finds_this_machine_well_and_changes_nothing(run: Run, tmp_path: Path) -> None:
    result = run("doctor", "--json", "--data-dir", str(tmp_path / "data"), "--device", "cpu")
    findings = {finding["name"]: finding for finding in json.loads(result.out)}
    assert result.code == 0
    assert set(findings) == {"python", "torch", "devices", "data", "database"}
    assert "cpu" in findings["devices"]["detail"]
    assert not (tmp_path / "data").exists()


def test_doctor_says_what_is_wrong(run: Run, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = run("doctor", "--data-dir", str(blocked / "data"), "--database", "postgresql://me:hidden@127.0.0.1:1/x")
    assert result.code == 1
    assert "FAIL data" in result.out
    assert "FAIL database" in result.out
    assert "hidden" not in result.out


def test_settings_come_from_variables_and_options_win(
        run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_DATA_DIR", str(tmp_path / "by-variable"))
    run("db", "upgrade")
    run("db", "upgrade", "--data-dir", str(tmp_path / "by-option"))
    assert (tmp_path / "by-variable" / "autotune.sqlite3").exists()
    assert (tmp_path / "by-option" / "autotune.sqlite3").exists()


@pytest.mark.parametrize(("variable", "meant"), [
    ("AUTOTUNE_PROT", "AUTOTUNE_PORT"), ("AUTOTUNE_DATABASE_URL", "AUTOTUNE_DATABASE"),
    ("AUTOTUNE_ALLOWED_TASK", "AUTOTUNE_ALLOWED_TASKS")])
def test_a_misspelt_variable_is_told(
        run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, meant: str) -> None:
    monkeypatch.setenv(variable, "1")
    result = run("db", "upgrade", "--data-dir", str(tmp_path))
    assert result.code == 2
    assert f"{variable}: no such setting; did you mean {meant}?" in result.err


@pytest.mark.parametrize("variable", ["AUTOTUNE_TOKEN_FILE", "AUTOTUNE_PUBLISHED_PORT", "AUTOTUNE_SERVICE_HOST"])
def test_other_programs_variables_do_not_matter(
        run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert run("db", "upgrade", "--data-dir", str(tmp_path)).code == 0


@pytest.mark.parametrize("command", [
    ("db", "upgrade"), ("token",), ("doctor", "--device", "cpu"), ("serve", "--port", "0")])
def test_a_damaged_database_is_said_in_a_line(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "autotune.sqlite3").write_bytes(b"no database at all" * 1000)
    result = run(*command, "--data-dir", str(tmp_path))
    assert result.code == 1
    assert "file is not a database" in result.out + result.err


def test_a_database_url_that_is_none_is_said_in_a_line(run: Run) -> None:
    result = run("db", "upgrade", "--database", "postgresql://me:hidden@127.0.0.1:port/x")
    assert result.code == 2
    assert "AUTOTUNE_DATABASE: not a URL; write" in result.err
    assert "hidden" not in result.err


def test_a_token_that_no_header_can_carry_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("b\u00e4d-token-of-some-length", "two\nlines", " spaces "):
        monkeypatch.setenv("AUTOTUNE_TOKEN", token)
        result = run("list")
        assert result.code == 2
        assert "AUTOTUNE_TOKEN: give printable ASCII" in result.err


def test_the_default_data_directory_follows_xdg(run: Run, tmp_path: Path) -> None:
    run("db", "upgrade")
    assert (tmp_path / "xdg" / "autotune" / "autotune.sqlite3").exists()


def test_help_names_every_command(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    for command in ("serve", "scheduler", "submit", "tune", "watch", "list", "export", "cancel", "import",
                    "token", "db", "doctor"):
        assert command in result.out


@pytest.mark.parametrize("arguments", [("nonsense",), ("serve", "--port", "x"), ("export",), ("submit",)])
def test_a_wrong_command_line_is_code_2(run: Run, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).code == 2


def test_the_command_line_starts_without_heavy_libraries() -> None:
    code = """
import sys
import autotune.cli
print(sorted({"torch", "numpy", "optuna", "sqlalchemy", "fastapi", "pydantic", "httpx"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
