"""Versions of the schema: where the database is, and bringing it to the newest."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, text

from autotune.domain.errors import StoreUnavailableError

SCRIPTS = Path(__file__).resolve().parents[2] / "alembic"

_UPGRADE_LOCK = 0x6175746F_6D696772
"""Key of the PostgreSQL advisory lock under which the schema changes."""


def upgrade_to_head(connection: Connection) -> None:
    """Apply what is missing. The transaction must be a writing one: its lock makes sure that one process does it.

    Raises:
        StoreUnavailableError: the database is newer than this code.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
    if current_revision(connection) == head_revision():
        return
    config = _config()
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreUnavailableError(f"the database cannot be brought to version {head_revision()}: {error}. Was it "
                                    "written by a newer release?") from error


def require_head(connection: Connection) -> None:
    """Check the version.

    Raises:
        StoreUnavailableError: it is another one.
    """
    current, head = current_revision(connection), head_revision()
    if current != head:
        raise StoreUnavailableError(f"the database is at version {current or 'none'}, this code needs {head}: run "
                                    "`autotune db upgrade`")


def current_revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def head_revision() -> str:
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def _config() -> Config:
    assert SCRIPTS.is_dir(), f"the migrations are missing: {SCRIPTS}"
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
