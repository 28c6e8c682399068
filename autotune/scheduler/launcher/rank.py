"""One worker process of this machine: started, listened to, drained, ended."""

import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ValidationError

from autotune.scheduler.launcher.environment import worker_environment
from autotune.scheduler.launcher.log import BoundedLog
from autotune.scheduler.launcher.stragglers import GROUP_VARIABLE
from engine.wire import Command, RankMessage, WorkerSettings, decode_message, encode

_LINE_LIMIT = 64 * 2**20
_REAP_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class RankGone:
    """A process that left without being told to.

    Attributes:
        exit_code: as `subprocess` gives it, negative for a signal; None: it still runs, but said something that is no
            message, or closed its socket.
    """

    exit_code: int | None
    at_seconds: float


Event = tuple[int, "RankMessage | RankGone"]


class RankProcess:
    """A started process; make it with `spawn`.

    Its messages arrive in the queue as (rank, message), a `RankGone` last.
    """

    def __init__(self, process: asyncio.subprocess.Process, settings: WorkerSettings, log: BoundedLog) -> None:
        self.rank = settings.rank
        self.pid = process.pid
        self.log = log
        self._process = process
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._log_pipe: asyncio.ReadTransport | None = None
        self._log_closed = asyncio.Event()

    @classmethod
    async def spawn(cls, settings: WorkerSettings, events: "asyncio.Queue[Event]", *, log_limit_bytes: int
                    ) -> "RankProcess":
        """Start `python -m engine.worker`. The process dies with the calling thread.

        Args:
            settings: `control_fd` and `parent_pid` are filled in here.
        """
        ours, theirs = socket.socketpair()
        log_read, log_write = os.pipe()
        settings = settings.model_copy(update={"control_fd": theirs.fileno(), "parent_pid": os.getpid()})
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "engine.worker", settings.model_dump_json(), stdin=asyncio.subprocess.DEVNULL,
                stdout=log_write, stderr=log_write, pass_fds=(theirs.fileno(),), start_new_session=True,
                env=worker_environment(threads=settings.threads) | {GROUP_VARIABLE: settings.rendezvous_file})
        except BaseException:
            ours.close()
            os.close(log_read)
            raise
        finally:
            theirs.close()
            os.close(log_write)
        rank = cls(process, settings, BoundedLog(log_limit_bytes))
        rank._log_pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: _Drain(rank.log, rank._log_closed), os.fdopen(log_read, "rb", buffering=0))
        reader, rank._writer = await asyncio.open_connection(sock=ours, limit=_LINE_LIMIT)
        rank._listener = asyncio.create_task(rank._listen(reader, events))
        return rank

    @property
    def alive(self) -> bool:
        """Whether the process runs and still listens."""
        return self._process.returncode is None and self._listener is not None and not self._listener.done()

    def send(self, command: Command) -> None:
        """Queue a command. To a process that is gone it is lost; its `RankGone` tells."""
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(encode(command))

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and everything that it started in its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def signal_process(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def hang_up(self) -> None:
        """Close the socket: a process that waits for a command ends by itself."""
        if self._writer is not None:
            self._writer.close()

    async def wait(self, seconds: float) -> bool:
        """Wait until the process has ended; False if it has not."""
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def kill(self) -> None:
        """End the process and its group now, and wait until it is gone."""
        self.signal_group(signal.SIGKILL)
        await self.wait(_REAP_SECONDS)
        await self._release()

    async def _release(self) -> None:
        """Read the rest of the log and give the file descriptors back."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._log_closed.wait(), 0.5)
        if self._log_pipe is not None:
            self._log_pipe.close()
        if self._listener is not None:
            self._listener.cancel()
            with suppress(asyncio.CancelledError):
                await self._listener
        self.hang_up()

    async def _listen(self, reader: asyncio.StreamReader, events: "asyncio.Queue[Event]") -> None:
        try:
            while line := await reader.readline():
                events.put_nowait((self.rank, decode_message(line)))
        except (ValidationError, ValueError, ConnectionError):
            pass
        exit_code = self._process.returncode if await self.wait(1.0) else None
        events.put_nowait((self.rank, RankGone(exit_code=exit_code, at_seconds=time.monotonic())))


class _Drain(asyncio.Protocol):
    """Reads a pipe without ever pausing it, so that no process blocks on its output."""

    def __init__(self, log: BoundedLog, closed: asyncio.Event) -> None:
        self._log, self._closed = log, closed

    def data_received(self, data: bytes) -> None:
        self._log.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
