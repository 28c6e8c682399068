"""Parameters have their values whoever reads them and whenever: what stage 3 among hosts must gather in time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.engine.replicas import (
    SMALL_BUCKETS,
    Batch,
    Case,
    Loop,
    Training,
    assert_trains_as_replicas,
    each_world,
    plain,
    ways,
)
from tests.engine.training import FEATURES, Block, RanksOf, Tower, loss_of

FULL = SMALL_BUCKETS.model_copy(update={"activation_checkpointing": "full"})
SELECTIVE = SMALL_BUCKETS.model_copy(update={"activation_checkpointing": "selective"})
UNEVEN = (2, 3)


class Stack(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layer() for _ in range(3))
        self.leave = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.leave(x)


# Checkpoints


class FrozenNorm(nn.Module):
    """Its norm is a frozen parameter that backward needs as it is, not a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES).requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.up(self.down(x))


class ChecksPart(nn.Module):
    """Checkpoints a module of its own, or a method that reads several."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.norm, self.scale = nn.LayerNorm(FEATURES), nn.Parameter(torch.tensor(0.5))
        self.core = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, FEATURES))

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * self.core(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(getattr(self, self.part), x, use_reentrant=False)


class ChecksRoot(nn.Module):
    """Checkpoints a function of a parameter that lies in no layer, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES) * 0.3)
        self.leave = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(x @ self.weight), x, use_reentrant=False)
        return self.leave(x)


CHECKPOINTS = {
    **{f"frozen_norm_{config.activation_checkpointing}": Case(partial(Stack, FrozenNorm), config=config)
       for config in (SMALL_BUCKETS, FULL, SELECTIVE)},
    "checks_a_module": Case(partial(Stack, partial(ChecksPart, "core")), worlds=UNEVEN),
    "checks_a_method": Case(partial(Stack, partial(ChecksPart, "scaled"))),
    "checks_inside_a_checkpoint": Case(partial(Stack, partial(ChecksPart, "scaled")), config=FULL),
    "checks_a_function_of_the_root": Case(ChecksRoot),
}


# Readers other than the forward of the module that a parameter belongs to


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.core = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.core(self.norm(x))

    def encode(self, x: Tensor) -> Tensor:
        return x + self.core(self.norm(x))


class ReadsAround(nn.Module):
    """Reads its layers by the way named; has a parameter for the loss alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers, self.leave = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(FEATURES, 1)
        self.log_variance = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.way == "children":
                x = x + layer.core(layer.norm(x))  # type: ignore[operator]
            elif self.way == "method":
                x = layer.encode(x)  # type: ignore[operator]
            else:
                x = layer(x)
        if self.way == "function":
            x = functional.linear(x, self.layers[0].core.weight)  # type: ignore[union-attr, arg-type]
        penalty = sum(p.square().sum() for p in self.layers.parameters()) if self.way == "regularizer" else 0
        return self.leave(x) + 0.01 * penalty


def _weighted_loss(training: Training, batch: Batch) -> None:
    log_variance = training.module.log_variance
    training.backward(loss_of(training.module(batch.inputs), batch.target) * torch.exp(-log_variance) + log_variance)


def _pruned() -> nn.Module:
    return prune.l1_unstructured(  # type: ignore[no-untyped-call, no-any-return]
        nn.Linear(FEATURES, FEATURES), "weight", amount=0.5)


def _spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(FEATURES, FEATURES))


class _KeepsWeight(torch.autograd.Function):
    """Saves its weight where autograd does not see it, unlike the input."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        context.weight = weight
        context.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x,) = context.saved_tensors
        return gradient @ context.weight, gradient.t() @ x


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return _KeepsWeight.apply(x, self.weight)  # type: ignore[no-untyped-call, no-any-return]


READERS = {
    **{f"by_{way}": Case(partial(ReadsAround, way)) for way in ("children", "method", "function", "regularizer")},
    "in_the_loss": Case(partial(ReadsAround, "forward"), _weighted_loss, worlds=UNEVEN),
    "pre_hook_of_a_block_pruned": Case(partial(Stack, _pruned)),
    "pre_hook_of_a_block_spectral": Case(partial(Stack, _spectral_norm)),
    "own_function": Case(partial(Stack, OwnFunction)),
}


# Passes of the user's own, and blocks used again


def _saliency(training: Training, batch: Batch) -> None:
    inputs = batch.inputs.clone().requires_grad_()
    torch.autograd.grad(training.module(inputs).sum(), inputs)
    plain(training, batch)


def _adversarial(training: Training, batch: Batch) -> None:
    inputs = batch.inputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(training.module(inputs), batch.target), inputs)
    training.backward(loss_of(training.module((inputs + 0.1 * slope.sign()).detach()), batch.target))


class Ordered(nn.Module):
    """Uses its blocks in the order given, some of them again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.leave = nn.ModuleList(Block(FEATURES) for _ in range(4)), nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for number in order:
            x = self.blocks[number](x)
        return self.leave(x)


def _again_on_some_ranks(training: Training, batch: Batch) -> None:
    order = ((0, 1, 2, 3), (1, 1, 0, 0), (2,))[(batch.step + batch.rank) % 3]
    training.backward(loss_of(training.module(batch.inputs, order), batch.target))


def _passes(loop: Loop) -> Case:
    return Case(partial(Tower, 3, FEATURES), loop, worlds=UNEVEN)


PASSES = {
    "saliency": _passes(_saliency),
    "adversarial": _passes(_adversarial),
    "again_on_some_ranks": Case(Ordered, _again_on_some_ranks, worlds=UNEVEN),
    "again_on_some_ranks_checkpointed": Case(Ordered, _again_on_some_ranks, config=FULL, worlds=UNEVEN),
}

CASES = {**CHECKPOINTS, **READERS, **PASSES}


@ways
@each_world(CASES)
def test_parameters_are_there_when_they_are_read(ranks: RanksOf, stage: int, name: str, world_size: int) -> None:
    assert_trains_as_replicas(ranks, CASES[name], stage=stage, world_size=world_size)
