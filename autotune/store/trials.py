"""Trials of a study, their measurements and logs."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, Connection, Row, delete, func, insert, select, update

from autotune.domain.errors import NotFoundError
from autotune.domain.page import Page
from autotune.domain.prediction import Prediction
from autotune.domain.study import EventKind, Trial, TrialRole, TrialState
from autotune.store.base import Clock, Repository, decode_cursor, encode_cursor, page_size, require_readable, storable
from autotune.store.events import EventRepository
from autotune.store.tables import studies, trial_logs, trials
from engine.config import TrainConfig
from engine.report import Measurement, Outcome, TrialProgress, TrialReport

MAX_LOG_CHARACTERS = 256 * 1024
"""Of a trial's log, at most this much is kept: the end of it."""


class TrialRepository(Repository):
    """Trials of one transaction. Every write names the lease's epoch; LeaseLostError when that has moved on."""

    def __init__(self, connection: Connection, clock: Clock, events: EventRepository) -> None:
        super().__init__(connection, clock)
        self._events = events

    def start(self, study_id: str, epoch: int, *, role: TrialRole, config: TrainConfig,
              prediction: Prediction | None) -> Trial:
        """Begin the study's next trial; numbers count from 0 without gaps."""
        self._fence(study_id, epoch)
        number = self._connection.execute(
            select(func.coalesce(func.max(trials.c.number) + 1, 0)).where(trials.c.study_id == study_id)).scalar_one()
        row = self._connection.execute(
            insert(trials).values(
                study_id=study_id, number=number, role=role, state=TrialState.RUNNING, config=config,
                prediction=prediction, detail="", repeats=(), started_at=self._clock())
            .returning(*trials.c)).one()
        self._events.append(study_id, EventKind.TRIAL_STARTED, {"number": number, "role": role})
        return read_trial(row)

    def finish(self, study_id: str, epoch: int, number: int, report: TrialReport, *, log: str) -> Trial:
        """Record a running trial's verdict.

        Raises:
            NotFoundError: no such trial is running.
        """
        self._fence(study_id, epoch)
        row = self._connection.execute(
            update(trials).where(*_is(study_id, number), trials.c.state == TrialState.RUNNING)
            .values(state=TrialState.FINISHED, outcome=report.outcome, detail=storable(report.detail),
                    measurement=report.measurement, finished_at=self._clock())
            .returning(*trials.c)).one_or_none()
        if row is None:
            raise NotFoundError(f"study {study_id} has no running trial {number}")
        self._append_log(study_id, number, log)
        self._events.prune_progress(study_id)
        return self._finished(read_trial(row))

    def add_repeat(self, study_id: str, epoch: int, number: int, measurement: Measurement, *, log: str = "") -> Trial:
        """Add a further measurement of a finished trial's configuration.

        Raises:
            NotFoundError: no such trial.
        """
        self._fence(study_id, epoch)
        trial = self.get(study_id, number)
        row = self._connection.execute(
            update(trials).where(*_is(study_id, number)).values(repeats=(*trial.repeats, measurement))
            .returning(*trials.c)).one()
        self._append_log(study_id, number, log)
        self._events.prune_progress(study_id)
        return self._finished(read_trial(row))

    def fail_repeat(self, study_id: str, epoch: int, number: int, report: TrialReport, *, log: str = "") -> Trial:
        """Record that a finished trial's configuration failed when it was measured again: that verdict stands.

        Raises:
            NotFoundError: no such trial.
        """
        assert report.outcome is not Outcome.OK, report
        self._fence(study_id, epoch)
        row = self._connection.execute(
            update(trials).where(*_is(study_id, number))
            .values(outcome=report.outcome, detail=storable(f"when measured again: {report.detail}"))
            .returning(*trials.c)).one_or_none()
        if row is None:
            raise NotFoundError(f"study {study_id} has no trial {number}")
        self._append_log(study_id, number, log)
        self._events.prune_progress(study_id)
        return self._finished(read_trial(row))

    def judge(self, study_id: str, epoch: int, judged: Trial) -> Trial:
        """Keep another outcome and detail of a finished trial: what it is held against came after it.

        Raises:
            NotFoundError: no such trial.
        """
        self._fence(study_id, epoch)
        row = self._connection.execute(
            update(trials).where(*_is(study_id, judged.number), trials.c.state == TrialState.FINISHED)
            .values(outcome=judged.outcome, detail=storable(judged.detail)).returning(*trials.c)).one_or_none()
        if row is None:
            raise NotFoundError(f"study {study_id} has no finished trial {judged.number}")
        return self._finished(read_trial(row))

    def announce_repeat(self, study_id: str, epoch: int, number: int) -> Trial:
        """Tell the readers that a finished trial's configuration is being measured again.

        Raises:
            NotFoundError: no such trial.
        """
        self._fence(study_id, epoch)
        trial = self.get(study_id, number)
        self._events.append(study_id, EventKind.TRIAL_STARTED, {
            "number": number, "role": trial.role, "repeat": len(trial.repeats) + 1})
        return trial

    def tell_progress(self, study_id: str, epoch: int, number: int, progress: TrialProgress) -> None:
        """Tell the readers how far a trial under way is."""
        self._fence(study_id, epoch)
        self._events.append(study_id, EventKind.TRIAL_PROGRESS, {
            "number": number, **progress.model_dump(mode="json", exclude={"kind"})})

    def discard_running(self, study_id: str, epoch: int) -> int:
        """Drop the trial that was under way when its scheduler ended; it will be run again under the same number.

        Returns:
            How many were dropped.
        """
        self._fence(study_id, epoch)
        return self._connection.execute(
            delete(trials).where(trials.c.study_id == study_id, trials.c.state == TrialState.RUNNING)).rowcount

    def cancel_running(self, study_id: str) -> None:
        """Put the trial under way on record as cancelled. Not fenced: for whoever ends the study in the transaction."""
        detail = "the study ended while this trial ran"
        numbers = self._connection.execute(
            update(trials).where(trials.c.study_id == study_id, trials.c.state == TrialState.RUNNING)
            .values(state=TrialState.FINISHED, outcome=Outcome.CANCELLED, detail=detail, finished_at=self._clock())
            .returning(trials.c.number)).scalars().all()
        for number in numbers:
            self._events.append(study_id, EventKind.TRIAL_FINISHED, {
                "number": number, "outcome": Outcome.CANCELLED, "detail": detail, "repeats": 0,
                "tokens_per_second": None})

    def list(self, study_id: str) -> tuple[Trial, ...]:
        """All trials of a study by number; none for an unknown study."""
        rows = self._connection.execute(
            select(trials).where(trials.c.study_id == study_id).order_by(trials.c.number))
        return tuple(read_trial(row) for row in rows)

    def page(self, study_id: str, *, cursor: str | None = None, limit: int = 50) -> Page[Trial]:
        """Trials of a study by number.

        Raises:
            InvalidRequestError: a malformed cursor, or a limit out of range.
            NotFoundError: no such study.
        """
        statement = (select(trials).where(trials.c.study_id == study_id).order_by(trials.c.number)
                     .limit(page_size(limit) + 1))
        if cursor is not None:
            statement = statement.where(trials.c.number > decode_cursor(cursor))
        rows = self._connection.execute(statement).all()
        if not rows:
            self._require_study(study_id)
        more = len(rows) > limit
        return Page(items=tuple(read_trial(row) for row in rows[:limit]),
                    next_cursor=encode_cursor(rows[limit - 1].number) if more else None)

    def count(self, study_id: str | None = None) -> dict[str, int]:
        """How many trials ended in which way, of one study or of all; those under way count as ``running``."""
        ended = func.coalesce(trials.c.outcome, trials.c.state)
        statement = select(ended, func.count()).group_by(ended)
        if study_id is not None:
            statement = statement.where(trials.c.study_id == study_id)
        return {name: int(number) for name, number in self._connection.execute(statement)}

    def get(self, study_id: str, number: int) -> Trial:
        """One trial.

        Raises:
            NotFoundError: no such study or trial.
        """
        return read_trial(self._one(study_id, number, trials.c.values()))

    def log(self, study_id: str, number: int) -> str:
        """What the trial's worker processes wrote, repeats included; empty while it runs.

        Raises:
            NotFoundError: no such study or trial.
        """
        self._one(study_id, number, [trials.c.number])
        found = self._connection.execute(select(trial_logs.c.text).where(
            trial_logs.c.study_id == study_id, trial_logs.c.number == number)).scalar_one_or_none()
        return found or ""

    def _append_log(self, study_id: str, number: int, log: str) -> None:
        if not log:
            return
        text = self.log(study_id, number) + storable(log)
        self._upsert(trial_logs, {"study_id": study_id, "number": number, "text": text[-MAX_LOG_CHARACTERS:]})

    def _finished(self, trial: Trial) -> Trial:
        last = trial.measurements[-1] if trial.measurements else None
        self._events.append(trial.study_id, EventKind.TRIAL_FINISHED, {
            "number": trial.number, "outcome": trial.outcome, "detail": trial.detail, "repeats": len(trial.repeats),
            "tokens_per_second": None if last is None else last.tokens_per_second})
        return trial

    def _one(self, study_id: str, number: int, columns: Sequence[Column[Any]]) -> Row[Any]:
        row = self._connection.execute(select(*columns).where(*_is(study_id, number))).one_or_none()
        if row is None:
            self._require_study(study_id)
            raise NotFoundError(f"study {study_id} has no trial {number}")
        return row

    def _require_study(self, study_id: str) -> None:
        if self._connection.execute(select(studies.c.id).where(studies.c.id == study_id)).one_or_none() is None:
            raise NotFoundError(f"no study {study_id}")


def _is(study_id: str, number: int) -> tuple[Any, Any]:
    return trials.c.study_id == study_id, trials.c.number == number


def read_trial(row: Row[Any]) -> Trial:
    """A whole row as the domain's value.

    Raises:
        UnreadableError: it is not of this release.
    """
    require_readable(row, f"trial {row.number} of study {row.study_id}")
    return Trial(
        study_id=row.study_id, number=row.number, role=TrialRole(row.role), state=TrialState(row.state),
        config=row.config, prediction=row.prediction, outcome=None if row.outcome is None else Outcome(row.outcome),
        detail=row.detail, measurement=row.measurement, repeats=row.repeats, started_at=row.started_at,
        finished_at=row.finished_at)
