"""Runs migrations on the connection that `autotune.store` hands over; from the command line, on AUTOTUNE_DATABASE."""

import os
from typing import Any, Literal

from alembic import context
from sqlalchemy import Connection, create_engine

from autotune.store.tables import JsonValue, UtcDateTime, metadata

TABLES = frozenset(metadata.tables)


def include_name(name: str | None, kind: str, _parents: object) -> bool:
    """Leave tables that others keep in the same database alone."""
    return kind != "table" or name in TABLES


def render_item(kind: str, item: Any, _context: object) -> str | Literal[False]:
    """Migrations name plain column types, so that old ones do not change with the code."""
    if kind == "type" and isinstance(item, JsonValue):
        return "sa.JSON()"
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    return False


def migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, transactional_ddl=True,
                      include_name=include_name, render_item=render_item)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    with create_engine(os.environ["AUTOTUNE_DATABASE"]).begin() as made:
        migrate(made)
