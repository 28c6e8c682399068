"""Running schedulers in a test's event loop."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from autotune.domain.earlier import EarlierStudy
from autotune.domain.request import SearchRequest
from autotune.domain.study import Study, StudyState, Trial
from autotune.scheduler.launcher.base import Launcher
from autotune.scheduler.lease import SchedulerPolicy
from autotune.scheduler.loop import Scheduler
from autotune.scheduler.owner import Owner
from autotune.scheduler.record import in_thread
from autotune.search.plan import Plan
from autotune.search.suggest import suggest
from autotune.store import Database
from engine.config import TrainConfig
from tests.support.samples import sample_request

QUICK = SchedulerPolicy(lease=10.0, renew=0.2, poll=0.02, report=0.2, progress=0.05)
"""Short intervals, but a lease that survives a busy machine."""

WAIT_SECONDS = 60.0


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test."""
    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(2 * WAIT_SECONDS):
                await test(*args, **fixtures)

        asyncio.run(bounded())

    return run


class DirectSuggester:
    """Suggests without a helper process."""

    async def suggest(self, plan: Plan, trials: Sequence[Trial], search: SearchRequest,
                      earlier: Sequence[EarlierStudy] = ()) -> TrainConfig | None:
        return suggest(plan, trials, search, earlier)


class Working:
    """A scheduler at work."""

    def __init__(self, database: Database, launcher: Launcher, *, policy: SchedulerPolicy = QUICK,
                 owner: Owner | None = None) -> None:
        self.stop = asyncio.Event()
        self.scheduler = Scheduler(database, launcher, owner=owner, policy=policy, suggester=DirectSuggester())
        self.task = asyncio.create_task(self.scheduler.run(self.stop))

    async def end(self) -> None:
        """Stop it as SIGTERM would."""
        self.stop.set()
        await self.task


@asynccontextmanager
async def scheduler(database: Database, launcher: Launcher, *, policy: SchedulerPolicy = QUICK,
                    owner: Owner | None = None) -> AsyncIterator[Working]:
    working = Working(database, launcher, policy=policy, owner=owner)
    try:
        yield working
    finally:
        await working.end()


def submit(database: Database, name: str = "gpt-tiny", **changes: Any) -> Study:
    with database.begin() as tx:
        return tx.studies.add(sample_request(name, **changes))


def study_of(database: Database, study: Study) -> Study:
    with database.read() as tx:
        return tx.studies.get(study.id)


def trials_of(database: Database, study: Study) -> tuple[Trial, ...]:
    with database.read() as tx:
        return tx.trials.list(study.id)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that the store or a fake will show."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not await in_thread(condition):
            await asyncio.sleep(0.02)


async def until_state(database: Database, study: Study, state: StudyState) -> Study:
    def reached() -> bool:
        found = study_of(database, study)
        assert found.state is state or not found.state.is_final, f"{found.state}: {found.error}"
        return found.state is state

    await until(reached)
    return study_of(database, study)


async def finished(database: Database, study: Study) -> Study:
    await until(lambda: study_of(database, study).state.is_final)
    return study_of(database, study)
