"""A database for schedulers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.store import Database
from tests.support.postgres import PostgresServer


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(f"sqlite:///{tmp_path}/autotune.sqlite3")
    made.upgrade()
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def any_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Each kind of database in turn."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/autotune.sqlite3"
    else:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.create_database()
    made = Database(url)
    made.upgrade()
    yield made
    made.close()
