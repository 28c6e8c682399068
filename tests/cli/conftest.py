"""The command line, run in this process, against a real service in another."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from autotune.cli import main
from autotune.store import Database
from tests.support.service import RunningService, running_service


class Result(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _no_variables_of_the_developer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("AUTOTUNE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``autotune ARGUMENTS``."""
    def run_command(*arguments: str) -> Result:
        monkeypatch.setattr("sys.argv", ["autotune", *arguments])
        capsys.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as exit:
            code = exit.code or 0
        captured = capsys.readouterr()
        return Result(code if isinstance(code, int) else 1, captured.out, captured.err)

    return run_command


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service without a scheduler: studies stay as the test makes them."""
    with running_service(tmp_path_factory.mktemp("service"), "--no-scheduler") as started:
        yield started


@pytest.fixture
def database(service: RunningService) -> Iterator[Database]:
    """The service's own database, seen from outside."""
    opened = Database(f"sqlite:///{service.data_dir}/autotune.sqlite3")
    yield opened
    opened.close()


@pytest.fixture
def connected(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> RunningService:
    """Variables that point commands at the service."""
    monkeypatch.setenv("AUTOTUNE_SERVER", service.url)
    monkeypatch.setenv("AUTOTUNE_TOKEN", service.token)
    return service
