"""Keeps a claimed study and its devices, and notices when work on it must stop."""

import asyncio
import logging
import time
from enum import Enum

from autotune.domain.errors import LeaseLostError, NotFoundError, StoreUnavailableError
from autotune.domain.study import StudyState
from autotune.scheduler.record import Record
from autotune.store import Transaction
from engine.values import Value

_log = logging.getLogger(__name__)


class SchedulerPolicy(Value):
    """Intervals of the scheduler, in seconds.

    Attributes:
        lease: how long a study stays with a scheduler that is not heard of.
        renew: between renewals of a lease.
        poll: between looks for new studies, and for wishes to cancel running ones.
        report: between reports that this host is there.
        progress: between progress messages of one trial.
    """

    lease: float = 10.0
    renew: float = 3.0
    poll: float = 0.5
    report: float = 5.0
    progress: float = 1.0


class Interruption(Enum):
    """Why work on a study stops before its end."""

    CANCELLED = "the user cancelled it"
    STOPPING = "the scheduler is stopping"
    LOST = "the lease was lost"


async def keep_lease(record: Record, devices: int, policy: SchedulerPolicy, stopping: asyncio.Event) -> Interruption:
    """Renew the lease until work must stop, and say why it must. Runs beside the work, in a task of its own.

    Args:
        devices: how many were acquired with the study.
        stopping: set when the scheduler is to end.
    """
    renewed_at = time.monotonic()
    while True:
        try:
            async with asyncio.timeout(policy.poll):
                await stopping.wait()
            return Interruption.STOPPING
        except TimeoutError:
            pass
        started_at = time.monotonic()
        due = started_at - renewed_at >= policy.renew
        try:
            if due:
                cancelled = await record.write(lambda tx: _renew(tx, record, devices, policy.lease))
                renewed_at = started_at
            else:
                cancelled = await record.read(lambda tx: _look(tx, record))
        except (LeaseLostError, NotFoundError) as error:
            _log.warning("study %s: %s", record.study_id, error)
            return Interruption.LOST
        except StoreUnavailableError as error:
            _log.warning("study %s: the lease could not be renewed: %s", record.study_id, error)
            if time.monotonic() - renewed_at > policy.lease:
                return Interruption.LOST
            continue
        if cancelled:
            return Interruption.CANCELLED


def _renew(tx: Transaction, record: Record, devices: int, seconds: float) -> bool:
    study = tx.studies.renew(record.study_id, record.epoch, lease_seconds=seconds)
    held = tx.leases.renew(record.study_id, record.epoch, seconds=seconds)
    if held != devices:
        raise LeaseLostError(f"holds {held} of its {devices} devices")
    return study.cancel_requested


def _look(tx: Transaction, record: Record) -> bool:
    study = tx.studies.get(record.study_id, with_plan=False)
    if (study.lease_epoch, study.state) != (record.epoch, StudyState.RUNNING):
        raise LeaseLostError(f"is {study.state} with lease epoch {study.lease_epoch}, not running with {record.epoch}")
    return study.cancel_requested
