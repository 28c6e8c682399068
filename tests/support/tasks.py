"""Tasks that misbehave on purpose, each in one way: entry points for model kind `python`, imported by workers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.spec import PythonSpec

MODULE = "tests.support.tasks"


def spec(name: str, **arguments: Any) -> PythonSpec:
    """The specification of a task of this module, by the name of its function."""
    return PythonSpec(kind="python", entry_point=f"{MODULE}:{name}", arguments=arguments)


class ToyTask:
    """A small regression that calls `before_forward(step)` on each rank before each forward pass.

    Steps are counted by forward passes: use one accumulation step.
    """

    def __init__(self, before_forward: Callable[[int], None] = lambda step: None, *, width: int = 8, depth: int = 1,
                 tokens_per_sample: int = 10, seed: int = 0) -> None:
        self.tokens_per_sample = tokens_per_sample
        self._before_forward = before_forward
        self._width, self._depth, self._seed = width, depth, seed
        self._step = 0

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(self._width, self._width) for _ in range(self._depth)))

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs = torch.stack([torch.full((self._width,), float((index + self._seed) % 7) / 7) for index in indices])
        return inputs, inputs * 2

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        self._before_forward(self._step)
        self._step += 1
        inputs, targets = batch
        loss: Tensor = (model(inputs) - targets).float().square().mean()
        return loss


def _here(rank: int) -> bool:
    return not dist.is_initialized() or dist.get_rank() == rank


def _on(rank: int, step: int, action: Callable[[], None]) -> Callable[[int], None]:
    return lambda now: action() if now == step and _here(rank) else None


def toy(*, seed: int = 0, **options: Any) -> ToyTask:
    return ToyTask(seed=seed, **options)


def fails_at_build(message: str = "bad arg") -> ToyTask:
    raise ValueError(message)


def raises(*, rank: int, step: int, message: str = "boom") -> ToyTask:
    def action() -> None:
        raise ValueError(message)

    return ToyTask(_on(rank, step, action))


def raises_memory_error(*, step: int) -> ToyTask:
    def action() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    return ToyTask(lambda now: action() if now == step else None)


def sends_itself(*, rank: int, step: int, signal_number: int = signal.SIGKILL) -> ToyTask:
    return ToyTask(_on(rank, step, lambda: os.kill(os.getpid(), signal_number)))


def exits(*, rank: int, step: int, code: int = 3) -> ToyTask:
    return ToyTask(_on(rank, step, lambda: os._exit(code)))


def calls_sys_exit(*, step: int) -> ToyTask:
    return ToyTask(_on(0, step, lambda: sys.exit(5)))


def burns(*, rank: int = 0, step: int = 1) -> ToyTask:
    def action() -> None:
        while True:
            pass

    return ToyTask(_on(rank, step, action))


def hangs_deaf(*, step: int = 1) -> ToyTask:
    """Ignores SIGTERM and sleeps."""

    def action() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)

    return ToyTask(_on(0, step, action))


def sleeps(*, first: Sequence[float] = (), then: float = 0.0, tokens_per_sample: int = 10) -> ToyTask:
    """Each step takes the given seconds: those of `first`, then always `then`."""
    return ToyTask(lambda now: time.sleep(first[now] if now < len(first) else then),
                   tokens_per_sample=tokens_per_sample)


def compiles(*, steps: Sequence[int], seconds: float) -> ToyTask:
    """In these steps code is compiled, which takes so long more."""
    doubled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)

    def action(now: int) -> None:
        if now in steps:
            doubled(torch.ones(now + 2))
            time.sleep(seconds)

    return ToyTask(action)


def prints(*, megabytes: int) -> ToyTask:
    """Prints so much at its third step, half of it to stderr, and a last word."""

    def action() -> None:
        line = "x" * 1023 + "\n"
        for _ in range(megabytes * 512):
            sys.stdout.write(line)
            sys.stderr.write(line)
        print("the last word")

    return ToyTask(_on(0, 2, action))


def prints_nul() -> ToyTask:
    return ToyTask(_on(0, 0, lambda: print("before\x00after")))


def becomes_nan(*, step: int) -> "NanTask":
    return NanTask(step)


class NanTask(ToyTask):
    def __init__(self, nan_step: int) -> None:
        super().__init__()
        self._nan_step = nan_step

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        nan = self._step == self._nan_step and _here(0)
        loss = super().loss(model, batch)
        return loss * float("nan") if nan else loss


def needs_memory(*, step: int, megabytes: int, steps: int = 1) -> ToyTask:
    """From `step` on, for so many steps, holds this much for a moment on every rank."""

    def action(now: int) -> None:
        if step <= now < step + steps:
            torch.ones(megabytes * 2**18).add_(1)

    return ToyTask(action)


def hoards(*, megabytes_per_second: int = 500) -> ToyTask:
    """Takes more and more memory within one step and never returns."""

    def action() -> None:
        held = []
        while True:
            held.append(torch.ones(megabytes_per_second * 2**18 // 10))
            time.sleep(0.1)

    return ToyTask(_on(0, 1, action))


class LongestTask(ToyTask):
    """Names a longest sample; a batch with it holds much more for a moment."""

    longest_sample = 10**9

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self._megabytes = megabytes

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        if self.longest_sample in indices:
            torch.ones(self._megabytes * 2**18).add_(1)
        return super().batch(indices)


def longest(*, megabytes: int) -> LongestTask:
    return LongestTask(megabytes)


def spawns_child(*, pid_file: str, own_session: bool = False, then: str = "hangs") -> ToyTask:
    """Starts a process of its own that would outlive it, then hangs, exits or goes on."""

    def action() -> None:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=own_session)
        Path(pid_file).write_text(str(child.pid))
        if then == "hangs":
            time.sleep(1000)
        if then == "exits":
            os._exit(3)

    return ToyTask(_on(0, 1, action))


def tells_environment(*, file: str) -> ToyTask:
    """Writes what a rank sees of its environment."""

    def action() -> None:
        threads, cores = torch.get_num_threads(), sorted(os.sched_getaffinity(0))
        Path(file).write_text(repr({"environment": dict(os.environ), "threads": threads, "cores": cores}))

    return ToyTask(_on(0, 0, action))


class NoTask:
    pass


def not_a_task() -> NoTask:
    return NoTask()


def loss_is_a_list() -> ToyTask:
    class Broken(ToyTask):
        def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
            return [1.0]  # type: ignore[return-value]

    return Broken()


NOT_CALLABLE = 1
