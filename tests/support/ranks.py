"""A warm pool of rank processes: a test on several ranks costs milliseconds instead of the seconds of importing torch.

    def _twice(value: int) -> int: ...           # module-level, so that it can be pickled

    def test_it(ranks):
        assert ranks(2).run(_twice, 4) == [8, 8]

The processes are forked from one that has torch loaded. A failing test leaves them running when they reported cleanly
and replaces them when one hung or died. Every rank has one thread; the process group is gloo and is made anew when the
number of ranks changes.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 60.0
GRACE_SECONDS = 0.5


class RankError(AssertionError):
    """A rank raised; carries the first failing rank's traceback."""


def rank_context() -> ForkServerContext:
    """Starts processes that are forked from one that has torch loaded."""
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo is imported with a first optimizer, pytest with the function to run: more than a second.
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "engine.trainer", "pytest"])
    return context


class RankPool:
    """Processes that run a function on several ranks at once."""

    def __init__(self) -> None:
        self._context = rank_context()
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._groups = 0
        self._group_size = 0

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any,
            timeout: float = TIMEOUT_SECONDS, sockets: bool = False) -> list[Any]:
        """Run `function(*arguments)` on every rank, in a process group of `world_size`.

        Args:
            sockets: as if the ranks were on hosts of their own.

        Returns:
            The ranks' results, in rank order; they must pickle.

        Raises:
            RankError: a rank raised or died, or none answered in time.
        """
        self._require(world_size)
        if world_size != self._group_size:
            self._groups += 1
            self._group_size = world_size
        store = f"{self._directory.name}/{self._groups}"
        for rank, (_, connection) in enumerate(self._ranks[:world_size]):
            connection.send((store, rank, world_size, sockets, function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        connections = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:world_size])}
        first_failure = None
        while len(answers) < world_size:
            pending = [connection for connection, rank in connections.items() if rank not in answers]
            ready = wait(pending, timeout=max(deadline - time.monotonic(), 0))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = connections[connection]
                answers[rank] = _receive(connection)
                if not answers[rank][0] and first_failure is None:
                    first_failure = rank
                    # The others may wait for it in a collective: they get a moment, then they are replaced.
                    deadline = min(deadline, time.monotonic() + 2)
            if not ready and time.monotonic() >= deadline:
                break
        if first_failure is not None:
            self.close_ranks()
            raise RankError(f"rank {first_failure} of {world_size}:\n{answers[first_failure][1]}")
        if len(answers) < world_size:
            self.close_ranks()
            missing = sorted(set(range(world_size)) - set(answers))
            raise RankError(f"no answer from ranks {missing} of {world_size} within {timeout} s: they hang")
        return [answers[rank][1] for rank in range(world_size)]

    def close_ranks(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for _, connection in self._ranks:
            connection.close()  # those who wait for work end by themselves
        deadline = time.monotonic() + GRACE_SECONDS
        for process, _ in self._ranks:
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()
        self._ranks, self._group_size = [], 0

    def close(self) -> None:
        self.close_ranks()
        self._directory.cleanup()

    def _require(self, count: int) -> None:
        if any(not process.is_alive() for process, _ in self._ranks):
            self.close_ranks()
        while len(self._ranks) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


class Ranks:
    """The pool, seen as so many ranks."""

    def __init__(self, pool: RankPool, world_size: int, *, sockets: bool) -> None:
        self._pool, self.world_size, self._sockets = pool, world_size, sockets

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
        """As `RankPool.run`."""
        return self._pool.run(self.world_size, function, *arguments, timeout=timeout, sockets=self._sockets)

    def restart(self) -> None:
        """Replace the processes, after a test that broke something in them."""
        self._pool.close_ranks()


def _receive(connection: Connection) -> tuple[bool, Any]:
    try:
        succeeded, value = connection.recv()
    except EOFError:
        return False, "the process died"
    return succeeded, value


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from engine.collectives import SOCKETS

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    present = None
    while True:
        try:
            store, rank, world_size, sockets, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            if present != store:
                if dist.is_initialized():
                    dist.destroy_process_group()
                Path(store).parent.mkdir(exist_ok=True)
                dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank,
                                        world_size=world_size)
                present = store
            os.environ.pop(SOCKETS, None)
            if sockets:
                os.environ[SOCKETS] = "1"
            torch.manual_seed(0)
            answer = (True, function(*arguments))
        except BaseException:  # noqa: BLE001 - the traceback is the answer
            answer = (False, traceback.format_exc())
        connection.send(answer)
