"""Progress messages on their way to the store."""

import asyncio

from autotune.domain.study import EventKind
from autotune.scheduler.record import Record
from autotune.scheduler.telling import telling
from autotune.store import Database
from engine.report import TrialProgress
from tests.support.scheduling import in_loop, until
from tests.support.studies import claimed, started


def steps(database: Database) -> list[int]:
    with database.read() as tx:
        return [event.data["step"] for event in tx.events.after(0) if event.kind is EventKind.TRIAL_PROGRESS]


@in_loop
async def test_of_many_messages_the_latest_are_told(database: Database) -> None:
    study = claimed(database)
    started(database, study)
    async with telling(Record(database, study.id, 1), 0, interval_seconds=0.2) as listen:
        for step in range(50):
            listen(TrialProgress(phase="measuring", step=step))
            await asyncio.sleep(0.01)
        await until(lambda: 49 in steps(database))
    told = steps(database)
    assert told == sorted(told)
    assert told[-1] == 49
    assert 2 <= len(told) <= 15


@in_loop
async def test_losing_the_lease_meanwhile_is_left_to_others(database: Database) -> None:
    study = claimed(database)
    async with telling(Record(database, study.id, 7), 0, interval_seconds=0.01) as listen:
        for step in range(3):
            listen(TrialProgress(phase="measuring", step=step))
            await asyncio.sleep(0.05)
    assert steps(database) == []
