"""What happened to studies, in an order that readers can follow."""

from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, text

from autotune.domain.study import Event, EventKind
from autotune.store.base import Clock, Repository
from autotune.store.tables import events

_APPEND_LOCK = 0x6175746F_65766E74
"""Key of the PostgreSQL advisory lock that is held while events become visible."""


class EventRepository(Repository):
    """Events of one transaction.

    Guarantees that ids become visible in growing order: a reader that has seen event n never misses one below n. They
    are therefore written last, under a lock that the commit releases; until then they wait here.
    """

    def __init__(self, connection: Connection, clock: Clock) -> None:
        super().__init__(connection, clock)
        self._waiting: list[dict[str, Any]] = []

    def append(self, study_id: str, kind: EventKind, data: dict[str, Any]) -> None:
        """Tell the readers; `data` must be JSON. It is written when the transaction commits."""
        self._waiting.append({"study_id": study_id, "kind": kind, "data": data, "created_at": self._clock()})

    def after(self, last_id: int, *, study_id: str | None = None, limit: int = 500) -> tuple[Event, ...]:
        """Events with a larger id, oldest first; of one study or of all."""
        self.flush()
        statement = select(events).where(events.c.id > last_id).order_by(events.c.id).limit(limit)
        if study_id is not None:
            statement = statement.where(events.c.study_id == study_id)
        return tuple(_event(row) for row in self._connection.execute(statement))

    def last_id(self, study_id: str | None = None) -> int:
        """The newest event's id, of one study or of all; 0 before the first."""
        self.flush()
        statement = select(func.coalesce(func.max(events.c.id), 0))
        if study_id is not None:
            statement = statement.where(events.c.study_id == study_id)
        return int(self._connection.execute(statement).scalar_one())

    def takeovers(self, study_id: str) -> int:
        """How often the study's scheduler was lost since a trial last finished, by the events written so far."""
        last_trial = select(func.coalesce(func.max(events.c.id), 0)).where(
            events.c.study_id == study_id, events.c.kind == EventKind.TRIAL_FINISHED).scalar_subquery()
        told = self._connection.execute(select(events.c.data).where(
            events.c.study_id == study_id, events.c.kind == EventKind.STUDY_STATE, events.c.id > last_trial)).scalars()
        return sum("taken_over" in data for data in told)

    def prune_progress(self, study_id: str) -> None:
        """Drop the progress messages of trials that have ended; nobody needs them again."""
        self._connection.execute(delete(events).where(
            events.c.study_id == study_id, events.c.kind == EventKind.TRIAL_PROGRESS))

    def flush(self) -> None:
        """Write what waits. The transaction calls this at its end."""
        if not self._waiting:
            return
        if self._connection.dialect.name == "postgresql":
            self._connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _APPEND_LOCK})
        for values in self._waiting:  # one by one: the order of ids is the order of calls
            self._connection.execute(insert(events).values(values))
        self._waiting.clear()


def _event(row: Row[Any]) -> Event:
    return Event(id=row.id, study_id=row.study_id, kind=EventKind(row.kind), data=row.data, created_at=row.created_at)
