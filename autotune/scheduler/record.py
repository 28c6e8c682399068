"""A claimed study's place in the store, for code that must not block the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from autotune.store import Database, Transaction

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work beside the event loop.

    A cancelled caller waits until the work under way has ended, so that what it does next cannot be overtaken.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            await asyncio.wait({running})
        running.exception()  # looked at: nobody else will
        raise


class Record:
    """One claimed study in the store.

    Attributes:
        epoch: of the lease; every write names it.
    """

    def __init__(self, database: Database, study_id: str, epoch: int) -> None:
        self._database = database
        self.study_id = study_id
        self.epoch = epoch

    async def write(self, work: Callable[[Transaction], Result]) -> Result:
        """Do `work` in one transaction.

        Raises:
            LeaseLostError: the study belongs to another scheduler now.
            StoreUnavailableError: the database cannot be reached.
        """
        def transact() -> Result:
            with self._database.begin() as transaction:
                return work(transaction)

        return await in_thread(transact)

    async def read(self, work: Callable[[Transaction], Result]) -> Result:
        """As `write`, for reading."""
        def transact() -> Result:
            with self._database.read() as transaction:
                return work(transaction)

        return await in_thread(transact)
