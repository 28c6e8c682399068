"""Asks the sampler for the next configuration in a process of its own.

Some of Optuna's samplers load torch and compute for seconds; here they neither slow the scheduler's heartbeats nor
weigh on its memory. The helper answers one question at a time over its standard streams, and ends with the scheduler.
"""

import asyncio
import ctypes
import os
import pickle
import signal
import struct
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Protocol

from autotune.domain.earlier import EarlierStudy
from autotune.domain.request import SearchRequest
from autotune.domain.study import Trial
from autotune.search.plan import Plan
from engine.config import TrainConfig

_LENGTH = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


class Suggester(Protocol):
    """Proposes configurations."""

    async def suggest(self, plan: Plan, trials: Sequence[Trial], search: SearchRequest,
                      earlier: Sequence[EarlierStudy] = ()) -> TrainConfig | None:
        """The next configuration to try, never one that was tried; None where none is left."""


class HelperSuggester:
    """Proposes with `autotune.search.suggest` in a helper process, started when first needed."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def suggest(self, plan: Plan, trials: Sequence[Trial], search: SearchRequest,
                      earlier: Sequence[EarlierStudy] = ()) -> TrainConfig | None:
        """Ask the helper. A helper that dies is replaced once; a caller that is cancelled stops it at once.

        Raises:
            RuntimeError: the sampler failed, or its process did not live to answer; carries the traceback or says so.
        """
        question = pickle.dumps((plan, tuple(trials), search, tuple(earlier)))
        async with self._turn:
            try:
                answer = await self._ask_twice(question)
            except BaseException:
                await self.close()
                raise
        if isinstance(answer, str):
            raise RuntimeError(f"the sampler failed:\n{answer}")
        assert answer is None or isinstance(answer, TrainConfig), answer
        return answer

    async def close(self) -> None:
        """End the helper. It is started again when needed."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _ask_twice(self, question: bytes) -> object:
        for again in (True, False):
            try:
                return await self._ask(question)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                await self.close()
                if not again:
                    raise RuntimeError("the sampler's process ended twice without an answer: it may have run out of "
                                       "memory; the scheduler's standard error has what it printed") from error
        raise AssertionError("unreachable")

    async def _ask(self, question: bytes) -> object:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "autotune.scheduler.suggester", stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(_LENGTH.pack(len(question)) + question)
        await self._process.stdin.drain()
        (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
        return pickle.loads(await self._process.stdout.readexactly(length))


def main() -> None:
    """The helper: answer until the scheduler hangs up."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with answers
    while (question := _read(questions)) is not None:
        answer = pickle.dumps(_answer(question))
        answers.write(_LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


def _answer(question: bytes) -> Any:
    """The configuration, or the traceback's text."""
    from autotune.search.suggest import suggest

    try:
        return suggest(*pickle.loads(question))
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return traceback.format_exc()


if __name__ == "__main__":
    main()
