"""An engine in training on its ranks, parked between its turns: the driver's end of `worker`."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.peers.memory import join_peaks
from benchmarks.peers.plan import RANKS, REFERENCE, Scenario
from benchmarks.peers.values import Job, RankReady, RankTurn, Ready, Segment, Turn

ROOT = Path(__file__).parents[2]
HEAP_COUNTER = Path(sys.prefix) / "heap_counter.so"
_LOGS = Path(sys.prefix) / "logs"
_DEADLINE_SECONDS = 600.0
"""For one answer of all ranks; the first start of DeepSpeed compiles an extension."""
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class EngineFailedError(Exception):
    """A rank ended or did not answer; tells its error, and where its log is."""


class LiveEngine:
    """The processes of one engine, started and trained for its equal steps.

    Args:
        name: of an engine, or the reference.
        scenario: how it trains.

    Raises:
        EngineFailedError: it does not start.
    """

    def __init__(self, name: str, scenario: Scenario) -> None:
        world_size = 1 if name == REFERENCE else RANKS
        _LOGS.mkdir(exist_ok=True)
        self._logs = [_LOGS / f"{scenario.name}-{name}-{rank}.log" for rank in range(world_size)]
        self._channels: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._segments: set[Segment] = set()
        port = _free_port()
        for rank in range(world_size):
            self._spawn(Job(adapter=name, scenario=scenario, rank=rank, world_size=world_size), port)
        self.ready = self._joined(self._answers())

    def turn(self, steps: int) -> Turn:
        """Train for some steps, by the clock.

        Raises:
            EngineFailedError: a rank ended.
        """
        busy, start = _busy_seconds(), time.perf_counter()
        self._tell(steps)
        ranks: list[RankTurn] = self._answers()
        wall = time.perf_counter() - start
        own = sum(rank.cpu_seconds for rank in ranks)
        steps_of_ranks = zip(*(rank.step_seconds for rank in ranks), strict=True)
        return Turn(step_seconds=tuple(max(seconds) for seconds in steps_of_ranks),
                    cpu_seconds=own / len(ranks) / steps,
                    foreign_cores=max(0.0, (_busy_seconds() - busy - own) / wall))

    def close(self) -> None:
        """End the processes, and remove the shared memory that they leave behind."""
        with suppress(BrokenPipeError):
            self._tell(0)
        for process in self._processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for channel in self._channels:
            channel.close()
        for segment in self._segments:
            if segment.path.startswith("/dev/shm/"):
                Path(segment.path).unlink(missing_ok=True)

    def _spawn(self, job: Job, port: int) -> None:
        ours, theirs = Pipe()
        rank = str(job.rank)
        environment = {
            **os.environ, "LD_PRELOAD": str(HEAP_COUNTER), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
            "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",  # ninja, for DeepSpeed's extension
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(job.world_size), "LOCAL_SIZE": str(job.world_size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with self._logs[job.rank].open("wb") as log, theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.worker", str(theirs.fileno())], cwd=ROOT, env=environment,
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self._processes.append(process)
        self._channels.append(ours)
        ours.send(job)

    def _tell(self, steps: int) -> None:
        for channel in self._channels:
            channel.send(steps)

    def _answers(self) -> list[Any]:
        """One answer of every rank, in rank order; where one fails, all are ended."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while len(answers) < len(self._channels):
            waiting = [channel for rank, channel in enumerate(self._channels) if rank not in answers]
            answered = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not answered:
                raise self._failed(len(answers), "did not answer in time")
            for channel in answered:
                assert isinstance(channel, Connection)
                rank = self._channels.index(channel)
                try:
                    answers[rank] = channel.recv()
                except (EOFError, ConnectionResetError):
                    raise self._failed(rank, "ended") from None
        return [answers[rank] for rank in sorted(answers)]

    def _failed(self, rank: int, how: str) -> EngineFailedError:
        with suppress(subprocess.TimeoutExpired):
            how += f" with status {self._processes[rank].wait(timeout=5)}"
        for process in self._processes:
            process.kill()
        self.close()
        lines = self._logs[rank].read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)]
        return EngineFailedError(": ".join([f"rank {rank} {how}", *errors[-1:]]) + f" ({self._logs[rank]})")

    def _joined(self, ranks: Sequence[RankReady]) -> Ready:
        self._segments = {segment for rank in ranks for segment in rank.segments}
        losses_of_ranks = zip(*(rank.losses for rank in ranks), strict=True)
        return Ready(losses=tuple(sum(losses) / len(ranks) for losses in losses_of_ranks),
                     peaks=join_peaks(ranks))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _busy_seconds() -> float:
    """Seconds that all cores together have worked since the machine started."""
    user, nice, system, _idle, _waiting, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system + sum(rest[:3])) / _CLOCK_TICKS
