"""Passes a trial's progress on to the store, seldom enough not to be a burden."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from autotune.scheduler.record import Record
from engine.report import TrialProgress


@asynccontextmanager
async def telling(record: Record, number: int, *, interval_seconds: float) -> AsyncIterator[
        Callable[[TrialProgress], None]]:
    """Give a listener whose messages become events: the latest one, at most one in `interval_seconds`.

    A message that cannot be written is no reason to stop the trial: losing the lease is noticed elsewhere.
    """
    latest: asyncio.Queue[TrialProgress] = asyncio.Queue(maxsize=1)

    def listen(progress: TrialProgress) -> None:
        if latest.full():
            latest.get_nowait()
        latest.put_nowait(progress)

    async def tell(progress: TrialProgress) -> None:
        await record.write(lambda tx: tx.trials.tell_progress(record.study_id, record.epoch, number, progress))

    async def tell_all() -> None:
        while True:
            await tell(await latest.get())
            await asyncio.sleep(interval_seconds)

    task = asyncio.create_task(tell_all())
    try:
        yield listen
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()
