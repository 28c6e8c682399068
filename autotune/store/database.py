"""`Database`: where everything is kept. `Transaction`: one unit of reading or writing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Connection as SqliteConnection
from sqlite3 import OperationalError as SqliteOperationalError
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from autotune.domain.errors import StoreUnavailableError
from autotune.domain.page import Page
from autotune.store.base import Clock, utc_now
from autotune.store.catalog import BestRepository, ProfileRepository
from autotune.store.devices import DeviceLeaseRepository, HostRepository
from autotune.store.earlier import EarlierRepository
from autotune.store.events import EventRepository
from autotune.store.migrations import require_head, upgrade_to_head
from autotune.store.secrets import SessionRepository, SettingsRepository, TokenRepository
from autotune.store.studies import StudyRepository
from autotune.store.trials import TrialRepository

__all__ = ["Database", "Page", "Transaction"]

BUSY_SECONDS = 15.0
"""How long a writer waits for another one on SQLite before it gives up."""


class Transaction:
    """One unit of work. Its repositories see one consistent state and return the domain's values; they never commit."""

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self.events = EventRepository(connection, clock)
        self.trials = TrialRepository(connection, clock, self.events)
        self.studies = StudyRepository(connection, clock, self.events, self.trials)
        self.best = BestRepository(connection, clock)
        self.earlier = EarlierRepository(connection, clock)
        self.profiles = ProfileRepository(connection, clock)
        self.hosts = HostRepository(connection, clock)
        self.leases = DeviceLeaseRepository(connection, clock)
        self.tokens = TokenRepository(connection, clock)
        self.sessions = SessionRepository(connection, clock)
        self.settings = SettingsRepository(connection, clock)


class Database:
    """SQLite or PostgreSQL by URL, with the same guarantees; usable from several threads and processes.

    Args:
        url: ``sqlite:///path/to/file`` or ``postgresql://user:password@host/name``.
        clock: tells the time, aware and in UTC.

    Raises:
        ValueError: a URL that cannot be used.
    """

    def __init__(self, url: str, *, clock: Clock = utc_now) -> None:
        self._url = _checked(url)
        self._clock = clock
        self._connections = _create(self._url)
        self._writing = self._connections.execution_options(autotune_write=True)
        self._reading = self._connections
        if self._url.get_backend_name() == "postgresql":
            # All reads of one transaction see one state, as on SQLite.
            self._reading = self._connections.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True)

    def upgrade(self) -> None:
        """Bring the schema to the newest version; any number of processes may do so at once.

        Raises:
            StoreUnavailableError: the database cannot be reached, or is newer than this code.
        """
        with self._reachable(), self._writing.begin() as connection:
            upgrade_to_head(connection)

    def check(self) -> None:
        """Make sure that the database answers and has the schema this code was written for.

        Raises:
            StoreUnavailableError: it does not.
        """
        with self._reachable(), self._reading.begin() as connection:
            require_head(connection)

    @contextmanager
    def begin(self) -> Iterator[Transaction]:
        """A transaction that writes: commits at the end, rolls back on an exception.

        Raises:
            StoreUnavailableError: the database cannot be reached, or stayed locked for too long. Nothing was written.
        """
        with self._reachable(), self._writing.begin() as connection:
            transaction = Transaction(connection, self._clock)
            yield transaction
            transaction.events.flush()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A transaction that only reads.

        Raises:
            StoreUnavailableError: the database cannot be reached.
        """
        with self._reachable(), self._reading.begin() as connection:
            yield Transaction(connection, self._clock)

    def close(self) -> None:
        """Close all connections. The database can be used again afterwards."""
        self._connections.dispose()

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except (OperationalError, InterfaceError, PoolTimeoutError) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise self._unavailable(cause) from error
        except DatabaseError as error:
            if type(error) is not DatabaseError:  # SQLite's word for a file that is damaged, or none of its own
                raise
            raise self._unavailable(error.orig) from error

    def _unavailable(self, cause: object) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"cannot use the database {self._url.render_as_string(hide_password=True)}: {cause}")


def _checked(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ValueError("database: not a URL; write sqlite:///path/to/file or postgresql://user:password@host/name"
                         ) from None
    if url.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername in ("sqlite", "sqlite+pysqlite"):
        if url.database in (None, "", ":memory:"):
            raise ValueError("database: SQLite needs a file, for example sqlite:///data/autotune.sqlite3; an in-memory "
                             "database cannot be shared between processes")
        return url
    raise ValueError(f"database: {url.drivername} is not supported; use sqlite:///path/to/file or "
                     "postgresql://user:password@host/name")


def _create(url: URL) -> Engine:
    if url.get_backend_name() == "postgresql":
        return create_engine(url, pool_pre_ping=True, pool_size=10, max_overflow=20)
    assert url.database is not None
    if not url.database.startswith("file:"):
        Path(url.database).expanduser().absolute().parent.mkdir(parents=True, exist_ok=True)
    connections = create_engine(url, pool_size=10, max_overflow=20,
                                connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False})
    event.listen(connections, "connect", _prepare_sqlite)
    event.listen(connections, "begin", _begin_sqlite)
    return connections


def _prepare_sqlite(connection: SqliteConnection, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin where we say so, not at the driver's guess
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = NORMAL")  # with WAL: safe against a killed process
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:  # changing the mode does not wait for other processes' locks as statements do
            if connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
                return
            connection.execute("PRAGMA journal_mode = WAL")
        except SqliteOperationalError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get("autotune_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
