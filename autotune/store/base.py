"""What the repositories share: the connection, upserts, fences, cursors."""

import base64
import binascii
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row, Table, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.elements import ColumnElement

from autotune.domain.errors import FieldError, InvalidRequestError, LeaseLostError, UnreadableError
from autotune.domain.study import StudyState
from autotune.store.tables import Unreadable, studies

Clock = Callable[[], datetime]

MAX_PAGE = 500


def utc_now() -> datetime:
    return datetime.now(UTC)


class Repository:
    """Base of the repositories of one transaction; they never commit."""

    def __init__(self, connection: Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock

    def _insert(self, table: Table) -> postgresql.Insert | sqlite.Insert:
        """An insert statement that knows ``ON CONFLICT``, which both databases spell alike."""
        if self._connection.dialect.name == "postgresql":
            return postgresql.insert(table)
        return sqlite.insert(table)

    def _upsert(self, table: Table, values: Mapping[str, Any], *, where: ColumnElement[bool] | None = None) -> int:
        """Insert, or update the row with the same primary key where `where` holds of it; returns the rows written."""
        keys = [column.name for column in table.primary_key]
        statement = self._insert(table).values(values)
        rest = {name: statement.excluded[name] for name in values if name not in keys}
        written = self._connection.execute(  # rows returned, not `rowcount`: drivers disagree on that one
            statement.on_conflict_do_update(index_elements=keys, set_=rest, where=where).returning(table.c[keys[0]]))
        return len(written.all())

    def _fence(self, study_id: str, epoch: int) -> None:
        """Make sure that the caller's lease is the current one, and keep it so until the transaction ends.

        Raises:
            LeaseLostError: the study was taken over, has ended, or is gone.
        """
        current = self._connection.execute(
            select(studies.c.lease_epoch, studies.c.state).where(studies.c.id == study_id).with_for_update()
        ).one_or_none()
        if current is None:
            raise LeaseLostError(f"study {study_id} is gone")
        if current.lease_epoch != epoch or current.state != StudyState.RUNNING:
            raise LeaseLostError(f"study {study_id} is {current.state} with lease epoch {current.lease_epoch}, "
                                 f"not running with {epoch}")


def require_readable(row: Row[Any], what: str) -> None:
    """Make sure that all of a row could be read.

    Raises:
        UnreadableError: names what it is and the first column at fault.
    """
    for name, value in row._mapping.items():
        if isinstance(value, Unreadable):
            raise UnreadableError(f"{what} cannot be read by this release: its stored {name} is not valid "
                                  f"({value.reason})")


def storable(text: str) -> str:
    """Text as both databases accept it: without NUL characters and lone surrogates."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def page_size(limit: int) -> int:
    """Check the length of a page.

    Raises:
        InvalidRequestError: out of range.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequestError(FieldError("limit", f"give a number from 1 to {MAX_PAGE}, not {limit}"))
    return limit


def encode_cursor(position: int) -> str:
    return base64.urlsafe_b64encode(f"v1:{position}".encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> int:
    """The position that `encode_cursor` wrote.

    Raises:
        InvalidRequestError: it was not made by this function.
    """
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")
        version, _, position = text.partition(":")
        if version == "v1" and position.isdigit() and len(position) < 19:
            return int(position)
    except (binascii.Error, ValueError):
        pass
    raise InvalidRequestError(FieldError("cursor", "not a cursor of this list: leave it out for the first page"))
