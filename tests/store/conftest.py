"""Every test of the store runs on both databases."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from autotune.store import Database
from tests.support.postgres import PostgresServer
from tests.support.samples import FakeClock


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes URLs of databases without any table."""
    if request.param == "sqlite":
        numbers = count()
        return lambda: f"sqlite:///{tmp_path}/autotune-{next(numbers)}.sqlite3"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.create_database


@pytest.fixture
def empty_url(new_url: Callable[[], str]) -> str:
    return new_url()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def database(empty_url: str, clock: FakeClock) -> Iterator[Database]:
    made = Database(empty_url, clock=clock)
    made.upgrade()
    yield made
    made.close()
