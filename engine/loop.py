"""Training a task step by step: the one way that trials and runs share, so that their losses agree bit for bit."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from engine.config import OptimizerConfig, TrainConfig
from engine.precision import DTYPES
from engine.ranks import RankContext
from engine.tasks.base import Task, checked_batch, checked_loss, move_batch, task_blocks
from engine.trainer import initialize
from engine.values import Precision

PhaseName = Literal["data", "forward", "backward", "step"]
PHASES: tuple[PhaseName, ...] = ("data", "forward", "backward", "step")

_PRECISIONS: dict[torch.dtype, Precision] = {dtype: name for name, dtype in DTYPES.items()}


class PhaseClock(Protocol):
    """Splits a step's time into phases: each lap ends one."""

    def start(self) -> None: ...

    def lap(self, phase: PhaseName) -> None: ...

    def seconds(self) -> dict[PhaseName, float]:
        """Since `start`, by phase. Waits for the device where it must."""


class HostClock:
    """For devices that compute within the call."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._last = 0.0

    def start(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def lap(self, phase: PhaseName) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    def seconds(self) -> dict[PhaseName, float]:
        return dict(self._seconds)


class DeviceClock:
    """For devices that compute behind the host's back: events in the current stream, read once the step is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[PhaseName | None, torch.Event]] = []

    def start(self) -> None:
        self._marks = []
        self._mark(None)

    def lap(self, phase: PhaseName) -> None:
        self._mark(phase)

    def seconds(self) -> dict[PhaseName, float]:
        torch.accelerator.synchronize(self._device)
        result = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            assert phase is not None
            result[phase] += before.elapsed_time(after) / 1000
        return result

    def _mark(self, phase: PhaseName | None) -> None:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        self._marks.append((phase, event))


def clock_for(device: torch.device) -> PhaseClock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)


@dataclass(frozen=True, kw_only=True)
class LoopStep:
    """One optimizer step on this rank.

    Attributes:
        loss_sum: sum of the micro-batches' mean losses, float.
        applied: whether the parameters changed; False when gradients overflowed.
        compiled: whether code was compiled meanwhile, so that the time is not that of training.
    """

    loss_sum: float
    applied: bool
    compiled: bool


class TrainingLoop:
    """A task under the engine, one rank's part.

    Args:
        task: what is trained.
        config: how.
        optimizer: by name.
        seed: of the initial weights.
        context: this rank.

    Attributes:
        has_states: whether the optimizer's states are there from the start, so that the first step needs what all need.
    """

    def __init__(
        self, task: Task, config: TrainConfig, optimizer: OptimizerConfig, *, seed: int, context: RankContext
    ) -> None:
        self.task = task
        self.config = config
        self._context = context
        self.clock = clock_for(context.device)
        torch.manual_seed(seed)
        model = task.build_model()
        self.trainer = initialize(model, config=config, optimizer=optimizer, blocks=task_blocks(task, model),
                                  device=context.device)
        self.trainer.train()
        self.has_states = self.trainer.prepare()
        torch.manual_seed(seed + 1 + context.rank)  # what is random while training differs between ranks

    def step(self, index: int) -> LoopStep:
        """The step with this 0-based number, on its own samples."""
        return self._run([self._indices(index, micro) for micro in range(self.config.gradient_accumulation_steps)])

    def step_on_sample(self, sample: int) -> LoopStep:
        """A step on nothing but copies of one sample."""
        indices = [sample] * self.config.micro_batch_size
        return self._run([indices] * self.config.gradient_accumulation_steps)

    def mean_losses(self, loss_sums: Sequence[float]) -> tuple[float | None, ...]:
        """Means over the global batch, from every rank's sums; None where not finite. Collective."""
        parts = self.config.gradient_accumulation_steps * self._context.world_size
        means = (total / parts for total in self._context.total(loss_sums))
        return tuple(mean if math.isfinite(mean) else None for mean in means)

    def compute_dtype(self) -> Precision:
        """The dtype that most trainable parameters really have."""
        counts: dict[torch.dtype, int] = {}
        for parameter in self.trainer.module.parameters():
            if parameter.requires_grad and parameter.dtype in _PRECISIONS:
                counts[parameter.dtype] = counts.get(parameter.dtype, 0) + 1
        return _PRECISIONS[max(counts, key=lambda dtype: counts[dtype])] if counts else self.config.precision

    def close(self) -> None:
        """Free what the trainer holds."""
        self.trainer.close()

    def _indices(self, step: int, micro: int) -> range:
        size, ranks = self.config.micro_batch_size, self._context.world_size
        first = step * self.config.global_batch_size(ranks) + micro * size * ranks + self._context.rank * size
        return range(first, first + size)

    def _run(self, micro_batches: Sequence[Sequence[int]]) -> LoopStep:
        clock, trainer, device = self.clock, self.trainer, self._context.device
        losses: list[Tensor] = []
        applied = False
        compilations = _compilations()
        clock.start()
        for indices in micro_batches:
            batch = move_batch(checked_batch(self.task, indices), device)
            clock.lap("data")
            loss = checked_loss(self.task, trainer, batch)
            clock.lap("forward")
            trainer.backward(loss)
            losses.append(loss.detach())
            clock.lap("backward")
            applied = trainer.step().applied
            clock.lap("step")
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return LoopStep(loss_sum=math.fsum(loss.item() for loss in losses), applied=applied,
                        compiled=_compilations() > compilations)


def _compilations() -> int:
    """How often this process began to compile a function so far, whether the engine or the task asked for it."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else int(compiler.counters["frames"]["total"])
