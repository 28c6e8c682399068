"""One rank of one engine: `python -m benchmarks.peers.worker FD`, where FD is a connection to the driver.

Receives a `Job`, trains its equal steps and answers `RankReady`; then, for each number of steps received, takes these
and answers `RankTurn`, until 0 or the driver's end.

What counts of the heap is above the level after connecting: imports, gloo's own buffers and the batches are left out.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.peers.adapters import ADAPTERS
from benchmarks.peers.memory import HeapCounter, MemoryWatch, mapped_segments, open_files_in_memory
from benchmarks.peers.plan import EQUAL_STEPS, RANKS, REFERENCE, WARM_UP_STEPS, Scenario
from benchmarks.peers.values import Job, Key, RankReady, RankTurn, Segment
from engine.spec import GptSpec
from engine.tasks.base import Batch
from engine.tasks.gpt import GptTask


class Worker:
    """A rank in training."""

    def __init__(self, job: Job) -> None:
        self._task = make_task(job.scenario)
        self._adapter = ADAPTERS[job.adapter](job, self._task)
        self._ranks = job.world_size
        self._batches = [self._make_batches(job, step) for step in range(EQUAL_STEPS)]
        self._steps = 0

    def start(self) -> RankReady:
        """Set the engine up and take the equal steps."""
        known = frozenset((*open_files_in_memory(), *(segment.key for segment in mapped_segments())))
        self._adapter.connect()
        _touch_kernels()
        heap = HeapCounter()
        _barrier()
        watch = MemoryWatch(heap, base_bytes=heap.live_bytes(), ranks=self._ranks, known=known)
        torch.manual_seed(0)
        self._adapter.set_up()
        losses = []
        for step in range(EQUAL_STEPS):
            _barrier()
            if step == WARM_UP_STEPS:
                watch.start()
            losses.append(self._step())
        return RankReady(losses=tuple(losses), peaks=watch.stop(), segments=self._new_segments(known))

    def turn(self, steps: int) -> RankTurn:
        """Take some steps by the clock."""
        _barrier()
        cpu, seconds = time.process_time(), []
        for _ in range(steps):
            _barrier()
            start = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - start)
        _barrier()
        return RankTurn(step_seconds=tuple(seconds), cpu_seconds=time.process_time() - cpu)

    def close(self) -> None:
        """Let go of what outlives the process."""
        self._adapter.close()

    def _step(self) -> float:
        batches = self._batches[self._steps % len(self._batches)]
        self._steps += 1
        return self._adapter.step(batches)

    def _make_batches(self, job: Job, step: int) -> list[Batch]:
        ranks = range(RANKS) if job.adapter == REFERENCE else (job.rank,)
        return [self._task.batch(indices) for rank in ranks for indices in job.scenario.samples(step, rank)]

    @staticmethod
    def _new_segments(known: frozenset[Key]) -> tuple[Segment, ...]:
        """Shared memory mapped by now and not before; read while no rank trains or leaves."""
        _barrier()
        files = open_files_in_memory()
        segments = [segment for segment in mapped_segments() if segment.key not in known]
        _barrier()
        return tuple(replace(segment, is_open=segment.key in files) for segment in segments)


def make_task(scenario: Scenario) -> GptTask:
    """The benchmark's model, 23.2 M parameters at 256 tokens, and its samples."""
    return GptTask(GptSpec(kind="gpt", layers=6, hidden=512, heads=8, vocab=8192,
                           sequence_length=scenario.sequence_length))


def _touch_kernels() -> None:
    """Have the matrix library make what it makes once."""
    square = torch.randn(64, 64)
    (square @ square).sum()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _requests(channel: Connection) -> Iterator[int]:
    with suppress(EOFError):
        while steps := channel.recv():
            yield steps


def main() -> None:
    channel = Connection(int(sys.argv[1]))
    worker = Worker(channel.recv())
    channel.send(worker.start())
    for steps in _requests(channel):
        channel.send(worker.turn(steps))
    worker.close()
    os._exit(0)  # Python's own ending would wait for threads of DeepSpeed that never end


if __name__ == "__main__":
    main()
