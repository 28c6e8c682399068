"""Studies: submitted once, claimed by one scheduler at a time, written only by the holder of the lease."""

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, Row, and_, delete, func, or_, select, update

from autotune.domain.errors import ConflictError, NotFoundError, UnreadableError
from autotune.domain.page import Page
from autotune.domain.request import StudyRequest
from autotune.domain.study import (
    STUDY_TRANSITIONS,
    BestConfig,
    EventKind,
    PlanSummary,
    Progress,
    Study,
    StudyPhase,
    StudyState,
)
from autotune.store.base import Clock, Repository, decode_cursor, encode_cursor, page_size, require_readable, storable
from autotune.store.events import EventRepository
from autotune.store.tables import studies
from autotune.store.trials import TrialRepository

_log = logging.getLogger(__name__)

_SMALL = tuple(column for column in studies.c if column.name != "plan")
"""A plan may hold a megabyte of predictions: only `get` reads it."""

MAX_TAKEOVERS = 3
"""So often a study may lose its scheduler without a trial finishing in between: then it is taken for what ends it."""

_FINAL = tuple(state for state in StudyState if state.is_final)


class Lease(NamedTuple):
    """Who works on a running study."""

    study_id: str
    epoch: int
    owner: str


class StudyRepository(Repository):
    """Studies of one transaction. Whoever claims a study names its epoch in every later write."""

    def __init__(self, connection: Connection, clock: Clock, events: EventRepository, trials: TrialRepository) -> None:
        super().__init__(connection, clock)
        self._events = events
        self._trials = trials

    # Submitting and reading

    def add(self, request: StudyRequest, *, idempotency_key: str | None = None) -> Study:
        """Queue a study.

        Args:
            idempotency_key: with a key that was used before and the same request, the first study is returned.

        Raises:
            ConflictError: the key was used before for another request.
        """
        statement = self._insert(studies).values(
            id=uuid.uuid4().hex, idempotency_key=idempotency_key, name=request.name,
            device="auto" if request.mode == "plan" else request.hardware.device,
            devices=request.devices_needed, request=request, state=StudyState.QUEUED, cancel_requested=False,
            progress=Progress(), lease_epoch=0, created_at=self._clock()
        ).on_conflict_do_nothing(index_elements=["idempotency_key"])
        row = self._connection.execute(statement.returning(*_SMALL)).one_or_none()
        if row is not None:
            study = _study(row)
            self._events.append(study.id, EventKind.STUDY_STATE, {"state": study.state})
            return study
        first = _study(self._connection.execute(
            select(*_SMALL).where(studies.c.idempotency_key == idempotency_key)).one())
        if first.request != request:
            raise ConflictError(f"Idempotency-Key {idempotency_key!r} was used before, for study {first.id} with "
                                "another request: use a new key for a new study")
        return first

    def get(self, study_id: str, *, with_plan: bool = True) -> Study:
        """One study; its plan, which may be large, only where wanted.

        Raises:
            NotFoundError: no such study.
        """
        return self._one(study_id, tuple(studies.c) if with_plan else _SMALL)

    def page(self, *, state: StudyState | None = None, model: str | None = None, cursor: str | None = None,
             limit: int = 50) -> Page[Study]:
        """Studies, newest first, without their plans. One that cannot be read is left out; `get` tells why.

        Args:
            model: only studies submitted under this name.

        Raises:
            InvalidRequestError: a malformed cursor, or a limit out of range.
        """
        statement = select(*_SMALL).order_by(studies.c.sequence.desc()).limit(page_size(limit) + 1)
        if state is not None:
            statement = statement.where(studies.c.state == state)
        if model is not None:
            statement = statement.where(studies.c.name == model)
        if cursor is not None:
            statement = statement.where(studies.c.sequence < decode_cursor(cursor))
        rows = self._connection.execute(statement).all()
        more = len(rows) > limit
        return Page(items=tuple(_readable_studies(rows[:limit])),
                    next_cursor=encode_cursor(rows[limit - 1].sequence) if more else None)

    def count(self) -> dict[StudyState, int]:
        """How many studies there are in each state."""
        rows = self._connection.execute(select(studies.c.state, func.count()).group_by(studies.c.state))
        found = {StudyState(state): int(number) for state, number in rows}
        return {state: found.get(state, 0) for state in StudyState}

    # Ending from outside

    def request_cancel(self, study_id: str) -> Study:
        """Stop a study: at once while nobody works on it, else within seconds by whoever does.

        Raises:
            NotFoundError: no such study.
            ConflictError: it has ended.
        """
        now = self._clock()
        waits = or_(studies.c.state == StudyState.QUEUED,
                    and_(studies.c.state == StudyState.RUNNING, studies.c.lease_expires_at < now))
        row = self._connection.execute(
            update(studies).where(studies.c.id == study_id, waits)
            .values(state=StudyState.CANCELLED, phase=None, cancel_requested=True, finished_at=now,
                    lease_epoch=studies.c.lease_epoch + 1, lease_owner=None, lease_expires_at=None)
            .returning(*_SMALL)).one_or_none()
        if row is not None:
            self._trials.cancel_running(study_id)
            self._events.append(study_id, EventKind.STUDY_STATE, {"state": StudyState.CANCELLED})
            return _study(row)
        row = self._connection.execute(
            update(studies).where(studies.c.id == study_id, studies.c.state == StudyState.RUNNING)
            .values(cancel_requested=True).returning(*_SMALL)).one_or_none()
        if row is not None:
            return _study(row)
        study = self._one(study_id, _SMALL)
        raise ConflictError(f"study {study_id} has ended ({study.state}): there is nothing to cancel")

    def delete(self, study_id: str) -> None:
        """Forget a study that has ended, with its trials, logs and events. Its stored best configuration stays.

        Raises:
            NotFoundError: no such study.
            ConflictError: it has not ended.
        """
        self._events.flush()  # so that they go with it
        deleted = self._connection.execute(
            delete(studies).where(studies.c.id == study_id, studies.c.state.in_(_FINAL))).rowcount
        if not deleted:
            study = self._one(study_id, _SMALL)
            raise ConflictError(f"study {study_id} is {study.state}: cancel it before deleting it")

    # Claiming

    def claim(self, owner: str, *, lease_seconds: float, max_devices: int, total_devices: int | None = None,
              device_type: str | None = None) -> Study | None:
        """Take the oldest study that waits for a scheduler: queued, or running with an expired lease.

        Nobody overtakes: while the oldest needs more devices than are free, there is nothing to claim. One that cannot
        be read, or has lost its scheduler `MAX_TAKEOVERS` times and more without a trial finishing in between, fails,
        with the reason, so that it does not hold up those behind it; one that was to be cancelled when its scheduler
        was lost is.

        Args:
            owner: names the claiming process.
            max_devices: devices free now.
            total_devices: devices of the claimer, free or not; studies that need more are left to other hosts.
            device_type: the claimer's; studies for another type are left to other hosts.

        Returns:
            The study, running and with a new epoch; None where there is nothing to do, or the oldest was ended.
        """
        now = self._clock()
        statement = select(studies.c.id, studies.c.devices, studies.c.lease_epoch, studies.c.state,
                           studies.c.lease_owner).where(
            or_(studies.c.state == StudyState.QUEUED,
                and_(studies.c.state == StudyState.RUNNING, studies.c.lease_expires_at < now)))
        if total_devices is not None:
            statement = statement.where(studies.c.devices <= total_devices)
        if device_type is not None:
            statement = statement.where(studies.c.device.in_(("auto", device_type)))
        # FOR UPDATE without SKIP LOCKED: skipping a head that another claimer then leaves would be overtaking.
        head = self._connection.execute(
            statement.order_by(studies.c.sequence).limit(1).with_for_update()).one_or_none()
        if head is None or head.devices > max_devices:
            return None
        row = self._connection.execute(
            update(studies).where(studies.c.id == head.id, studies.c.lease_epoch == head.lease_epoch,
                                  studies.c.state == head.state)
            .values(state=StudyState.RUNNING, lease_epoch=studies.c.lease_epoch + 1, lease_owner=owner,
                    lease_expires_at=now + timedelta(seconds=lease_seconds),
                    started_at=func.coalesce(studies.c.started_at, now))
            .returning(*_SMALL)).one_or_none()
        if row is None:
            return None
        try:
            study = _study(row)
        except UnreadableError as error:
            self._fail(head.id, f"{error}; delete it, and submit it again")
            return None
        if study.cancel_requested:  # of its last scheduler, which is gone
            self._end(study.id, state=StudyState.CANCELLED)
            self._events.append(study.id, EventKind.STUDY_STATE, {"state": StudyState.CANCELLED})
            return None
        if head.state == StudyState.QUEUED:
            self._events.append(study.id, EventKind.STUDY_STATE, {"state": StudyState.RUNNING})
        elif head.lease_owner not in (None, owner):  # another had it, and did not give it back
            takeovers = self._events.takeovers(study.id) + 1
            if takeovers >= MAX_TAKEOVERS:
                self._fail(study.id, f"study {study.request.name}: its scheduler process was lost {takeovers} times "
                           "in a row without a trial finishing in between, which the study itself may have brought "
                           "about (host memory, most often): see the scheduler's log before submitting it again")
                return None
            self._events.append(study.id, EventKind.STUDY_STATE, {"state": StudyState.RUNNING, "taken_over": takeovers})
        return study

    def _fail(self, study_id: str, error: str) -> None:
        error = storable(error)
        self._end(study_id, state=StudyState.FAILED, error=error)
        self._events.append(study_id, EventKind.STUDY_STATE, {"state": StudyState.FAILED, "error": error, "note": None})

    def _end(self, study_id: str, **values: Any) -> None:
        """End a study that was just claimed, without reading it."""
        self._trials.cancel_running(study_id)
        self._connection.execute(update(studies).where(studies.c.id == study_id).values(
            phase=None, finished_at=self._clock(), lease_owner=None, lease_expires_at=None, **values))

    def renew(self, study_id: str, epoch: int, *, lease_seconds: float) -> Study:
        """Keep a lease for `lease_seconds` more; says also whether the study is to be cancelled.

        Raises:
            LeaseLostError: the study was taken over, has ended, or is gone.
        """
        return self._write(study_id, epoch, lease_expires_at=self._clock() + timedelta(seconds=lease_seconds))

    def expire_lease(self, study_id: str, epoch: int) -> None:
        """Let the next claim take the study at once. Does nothing when the lease is lost already."""
        self._connection.execute(
            update(studies).where(studies.c.id == study_id, studies.c.lease_epoch == epoch,
                                  studies.c.state == StudyState.RUNNING)
            .values(lease_expires_at=self._clock() - timedelta(microseconds=1)))

    def give_back(self, study_id: str, epoch: int) -> None:
        """As `expire_lease`, by a scheduler that stops in good order: it does not count as lost."""
        self.expire_lease(study_id, epoch)
        self._connection.execute(
            update(studies).where(studies.c.id == study_id, studies.c.lease_epoch == epoch,
                                  studies.c.state == StudyState.RUNNING).values(lease_owner=None))

    def leases(self) -> tuple[Lease, ...]:
        """Leases that have not expired."""
        rows = self._connection.execute(
            select(studies.c.id, studies.c.lease_epoch, studies.c.lease_owner)
            .where(studies.c.state == StudyState.RUNNING, studies.c.lease_expires_at >= self._clock()))
        return tuple(Lease(row.id, row.lease_epoch, row.lease_owner) for row in rows)

    # Writing under a lease; each of these raises LeaseLostError when it is not the caller's any more

    def set_phase(self, study_id: str, epoch: int, phase: StudyPhase) -> Study:
        study = self._write(study_id, epoch, phase=phase)
        self._events.append(study_id, EventKind.STUDY_PHASE, {"phase": phase})
        return study

    def set_plan(self, study_id: str, epoch: int, plan: PlanSummary) -> Study:
        return self._write(study_id, epoch, plan=plan)

    def set_progress(self, study_id: str, epoch: int, progress: Progress) -> Study:
        return self._write(study_id, epoch, progress=progress)

    def set_best(self, study_id: str, epoch: int, best: BestConfig | None) -> Study:
        """Keep the best so far; None where what led turned out not to count."""
        study = self._write(study_id, epoch, best=best)
        self._events.append(study_id, EventKind.BEST_CHANGED, {
            name: best and getattr(best, name)
            for name in ("trial_number", "tokens_per_second", "speedup", "confirmed")})
        return study

    def set_fingerprints(self, study_id: str, epoch: int, *, model: str | None = None,
                         hardware: str | None = None) -> Study:
        """Note what was found out about the model and the hardware; None leaves a fingerprint as it is."""
        given = {"model_fingerprint": model, "hardware_fingerprint": hardware}
        return self._write(study_id, epoch, **{name: value for name, value in given.items() if value is not None})

    def finish(self, study_id: str, epoch: int, state: StudyState, *, error: str | None = None,
               note: str | None = None) -> Study:
        """End a running study and give up its lease. A trial that still runs ends with it."""
        assert state in STUDY_TRANSITIONS[StudyState.RUNNING], state
        error, note = error and storable(error), note and storable(note)
        study = self._write(study_id, epoch, state=state, phase=None, error=error, note=note,
                            finished_at=self._clock(), lease_owner=None, lease_expires_at=None)
        self._trials.cancel_running(study_id)
        self._events.append(study_id, EventKind.STUDY_STATE, {"state": state, "error": error, "note": note})
        return study

    def _write(self, study_id: str, epoch: int, **values: Any) -> Study:
        self._fence(study_id, epoch)
        row = self._connection.execute(
            update(studies).where(studies.c.id == study_id).values(**values).returning(*_SMALL)).one()
        return _study(row)

    def _one(self, study_id: str, columns: Sequence[Column[Any]]) -> Study:
        row = self._connection.execute(select(*columns).where(studies.c.id == study_id)).one_or_none()
        if row is None:
            raise NotFoundError(f"no study {study_id}")
        return _study(row)


def _readable_studies(rows: Iterable[Row[Any]]) -> Iterator[Study]:
    for row in rows:
        try:
            yield _study(row)
        except UnreadableError as error:
            _log.warning("left out of a list: %s", error)


def _study(row: Row[Any]) -> Study:
    """Raises: UnreadableError."""
    require_readable(row, f"study {row.id}")
    return Study(
        id=row.id, request=row.request, state=StudyState(row.state),
        phase=None if row.phase is None else StudyPhase(row.phase), error=row.error, note=row.note,
        cancel_requested=row.cancel_requested, progress=row.progress, plan=getattr(row, "plan", None), best=row.best,
        model_fingerprint=row.model_fingerprint, hardware_fingerprint=row.hardware_fingerprint,
        lease_epoch=row.lease_epoch, created_at=row.created_at, started_at=row.started_at, finished_at=row.finished_at)
