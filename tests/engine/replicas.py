"""Loops written once and run twice: under the engine, and as plain replicas of the model in one process.

The replicas are what data parallelism means, by hand: one copy of the model for every rank, each with its own buffers
and random numbers; gradients are the mean over copies, a copy without one counting as zeros, and a parameter that no
copy used is left alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine import OptimizerConfig, TrainConfig
from engine.stages.parameter_sharded import ParameterSharded
from engine.trainer import Trainer, initialize
from tests.engine.training import (
    GLOBAL_BATCH,
    Optimizer,
    RanksOf,
    Weights,
    assert_same_weights,
    built,
    loss_of,
    plain_optimizer,
    samples,
)

ways = pytest.mark.parametrize(("stage", "transport"), [
    (0, "shared"), (1, "shared"), (2, "shared"), (3, "shared"), (3, "sockets")], indirect=["transport"])
"""Every stage, and the third as among hosts: there parameters are gathered for each use."""


@dataclass(frozen=True)
class Batch:
    """One rank's micro-batch: inputs (n, FEATURES), target (n, 1), and where in the run it is."""

    inputs: Tensor
    target: Tensor
    step: int
    micro: int
    rank: int


class Training(Protocol):
    """What a loop may use of a trainer; replicas have the same."""

    @property
    def module(self) -> Any: ...

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None: ...


Loop = Callable[[Training, Batch], None]
"""One micro-batch: its forwards and backwards."""


def plain(training: Training, batch: Batch) -> None:
    training.backward(loss_of(training.module(batch.inputs), batch.target))


_ADAMW = OptimizerConfig(lr=0.02, weight_decay=0.1)
SMALL_BUCKETS = TrainConfig(reduce_bucket_size=100, prefetch_bucket_size=150)


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        build: makes the model, from the seed that is set.
        loop: runs on every micro-batch, on every rank.
        worlds: numbers of ranks to try.
        config: of any stage.
    """

    build: Callable[[], nn.Module]
    loop: Loop = plain
    optimizer: Optimizer = _ADAMW
    worlds: tuple[int, ...] = (2,)
    config: TrainConfig = SMALL_BUCKETS
    steps: int = 3

    def at_stage(self, stage: int) -> TrainConfig:
        return self.config.model_copy(update={"zero_stage": stage})


def each_world(cases: dict[str, Case]) -> pytest.MarkDecorator:
    """Parametrizes by `name` and `world_size`, the same size together: changing it makes a new process group."""
    pairs = [(name, size) for name, case in cases.items() for size in case.worlds]
    return pytest.mark.parametrize(("name", "world_size"), sorted(pairs, key=lambda pair: pair[1]))


def assert_trains_as_replicas(ranks: RanksOf, case: Case, *, stage: int, world_size: int) -> None:
    """Every rank has the weights and buffers of its replica after every step."""
    histories = ranks(world_size).run(train_case, case, stage)
    for history, expected in zip(histories, replicate_case(case, world_size), strict=True):
        assert_same_weights([history], expected)


def _batches(case: Case, step: int, *, rank: int, world_size: int) -> Iterator[Batch]:
    """A rank's micro-batches of a step, each with the random seed of its place."""
    inputs, target = samples(step)
    accumulation = case.config.gradient_accumulation_steps
    size = GLOBAL_BATCH // (world_size * accumulation)
    for micro in range(accumulation):
        first = (micro * world_size + rank) * size
        torch.manual_seed(1000 * step + 10 * micro + rank)
        yield Batch(inputs[first:first + size], target[first:first + size], step, micro, rank)


def train_case(case: Case, stage: int) -> list[Weights]:
    """The whole weights, and this rank's buffers, after every step; runs on a rank.

    Nothing stays gathered after a micro-batch.
    """
    trainer = initialize(built(case.build), config=case.at_stage(stage), optimizer=case.optimizer)
    history = []
    for step in range(case.steps):
        for batch in _batches(case, step, rank=dist.get_rank(), world_size=dist.get_world_size()):
            case.loop(trainer, batch)
            assert gathered_bytes(trainer) == 0
            trainer.step()
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


def gathered_bytes(trainer: Trainer) -> int:
    stage = trainer._stage
    return stage.gathered_bytes() if isinstance(stage, ParameterSharded) else 0


@dataclass(frozen=True)
class _Replica:
    module: nn.Module

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        try:
            loss.backward(retain_graph=retain_graph)
        except Exception:
            self.module.zero_grad()
            raise


def replicate_case(case: Case, world_size: int) -> list[list[Weights]]:
    """For every rank what `train_case` is to return."""
    replicas = [built(case.build) for _ in range(world_size)]
    first, *others = replicas
    optimizer = plain_optimizer(case.optimizer, [p for p in first.parameters() if p.requires_grad])
    histories: list[list[Weights]] = [[] for _ in replicas]
    for step in range(case.steps):
        for rank, module in enumerate(replicas):
            for batch in _batches(case, step, rank=rank, world_size=world_size):
                case.loop(_Replica(module), batch)
        _average_gradients(replicas, micro_batches=case.config.gradient_accumulation_steps)
        if case.config.gradient_clipping:
            nn.utils.clip_grad_norm_(first.parameters(), case.config.gradient_clipping)
        optimizer.step()
        for module in others:
            for ours, theirs in zip(module.parameters(), first.parameters(), strict=True):
                if theirs.grad is not None:
                    ours.data.copy_(theirs.data)
        for module, history in zip(replicas, histories, strict=True):
            module.zero_grad()
            history.append({name: value.detach().clone() for name, value in module.state_dict().items()})
    return histories


def _average_gradients(replicas: Sequence[nn.Module], *, micro_batches: int) -> None:
    """The mean gradients, in the first replica; None where no replica has one."""
    for parameters in zip(*(module.parameters() for module in replicas), strict=True):
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            parameters[0].grad = torch.stack(gradients).sum(0) / (len(replicas) * micro_batches)
