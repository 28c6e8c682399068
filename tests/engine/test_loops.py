"""Training loops of every kind train as the same loops do on plain replicas, at every stage."""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import TrainConfig
from tests.engine.replicas import (
    SMALL_BUCKETS,
    Batch,
    Case,
    Training,
    assert_trains_as_replicas,
    each_world,
    plain,
    ways,
)
from tests.engine.training import (
    FEATURES,
    Block,
    RanksOf,
    Tower,
    loss_of,
)

FULL = SMALL_BUCKETS.model_copy(update={"activation_checkpointing": "full"})
ACCUMULATED = SMALL_BUCKETS.model_copy(update={"gradient_accumulation_steps": 2})
UNEVEN = (2, 3)


class Heads(nn.Module):
    """A trunk with two heads, one of them with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block(FEATURES) for _ in range(3))
        self.a, self.b, self.scale = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, heads: str = "a") -> tuple[Tensor, ...]:
        for block in self.trunk:
            x = block(x)
        return tuple(self.a(x) if head == "a" else self.b(x) * self.scale for head in heads)


def _loss(training: Training, batch: Batch, heads: str = "a") -> Tensor:
    outputs = training.module(batch.inputs, heads)
    return torch.stack([loss_of(output, batch.target) for output in outputs]).sum()


# Which parameters are used


def _heads_in_turns(training: Training, batch: Batch) -> None:
    training.backward(_loss(training, batch, "ab"[batch.step % 2]))


def _other_heads_on_other_ranks(training: Training, batch: Batch) -> None:
    training.backward(_loss(training, batch, "ab"[(batch.step + batch.rank) % 2]))


def _heads_by_micro_batch(training: Training, batch: Batch) -> None:
    training.backward(_loss(training, batch, "ab"[(batch.micro + batch.rank) % 2]))


def _head_of_the_data(training: Training, batch: Batch) -> None:
    training.backward(_loss(training, batch, "a" if batch.inputs.sum() > 0 else "b"))


def _nothing_to_learn_on_one_rank(training: Training, batch: Batch) -> None:
    loss = _loss(training, batch)
    training.backward(loss * 0 if batch.rank == 1 else loss)


def _uneven_batches(training: Training, batch: Batch) -> None:
    """Ranks with more samples count no more than others."""
    count = 1 + batch.rank
    training.backward(loss_of(training.module(batch.inputs[:count])[0], batch.target[:count]))


class Skips(nn.Module):
    """Uses some of its blocks in any order; layers outside of them are frozen or used by some routes only."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.enter, self.extra = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(Block(FEATURES) for _ in range(4))
        self.norm, self.leave = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 1)
        if frozen:
            for module in (self.norm, self.leave, self.extra, *(block.up for block in self.blocks)):
                module.requires_grad_(False)  # type: ignore[operator]

    def forward(self, x: Tensor, route: tuple[int, ...]) -> Tensor:
        x = self.enter(x)
        for number in route:
            x = self.blocks[number](x)
            if number % 2:
                x = self.norm(x)
        return self.leave(self.extra(x) if 0 in route else x)


ROUTES = ((0, 1, 2, 3), (3,), (), (1, 0), (2, 3, 1))


def _routes_by_rank(training: Training, batch: Batch) -> None:
    route = ROUTES[(2 * batch.step + 3 * batch.rank + batch.micro) % len(ROUTES)]
    training.backward(loss_of(training.module(batch.inputs, route), batch.target))


class Until(nn.Module):
    """Calls a layer as often as the data ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.leave = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        while float(x.detach().norm()) < 20:
            x = self.again(x) + 1.5 * x
        return self.leave(x)


class Router(nn.Module):
    """Sends every sample to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.leave = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 1)
        self.experts = nn.ModuleList(Block(FEATURES) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        mixed = x
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if len(rows):
                mixed = mixed.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return self.leave(mixed)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(FEATURES) for _ in range(2))
        self.leave = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x) + (0.5 * self(x, depth - 1) if depth else 0)


USED = {
    "heads_in_turns": Case(Heads, _heads_in_turns, worlds=UNEVEN),
    "other_heads_on_other_ranks": Case(Heads, _other_heads_on_other_ranks, worlds=UNEVEN),
    "other_heads_on_other_ranks_clipped": Case(Heads, _other_heads_on_other_ranks,
                                               config=TrainConfig(reduce_bucket_size=30, gradient_clipping=0.05)),
    "heads_by_micro_batch": Case(Heads, _heads_by_micro_batch, config=ACCUMULATED, worlds=UNEVEN),
    "head_of_the_data": Case(Heads, _head_of_the_data),
    "nothing_to_learn_on_one_rank": Case(Heads, _nothing_to_learn_on_one_rank),
    "uneven_batches": Case(Heads, _uneven_batches, worlds=UNEVEN),
    **{f"routes_by_rank_{name}": Case(partial(Skips, frozen=frozen), _routes_by_rank, config=config, worlds=UNEVEN,
                                      steps=5)
       for name, frozen, config in [("", False, SMALL_BUCKETS), ("accumulated", False, ACCUMULATED),
                                    ("frozen", True, SMALL_BUCKETS), ("frozen_checkpointed", True, FULL),
                                    ("frozen_unprefetched", True, TrainConfig(prefetch_bucket_size=1))]},
    "until": Case(Until, worlds=UNEVEN),
    "router": Case(Router, worlds=UNEVEN, steps=5),
    "router_checkpointed": Case(Router, config=FULL),
    "recursive": Case(Recursive),
}


# Forwards and backwards in any number and order


def _two_losses(training: Training, batch: Batch) -> None:
    first, second = training.module(batch.inputs, "ab")
    training.backward(loss_of(first, batch.target), retain_graph=True)
    training.backward(loss_of(second, batch.target))


def _forward_backward_twice(training: Training, batch: Batch) -> None:
    for head in "ab":
        training.backward(_loss(training, batch, head))


def _backwards_in_reverse(training: Training, batch: Batch) -> None:
    first, second = _loss(training, batch, "a"), _loss(training, batch, "b")
    training.backward(second)
    training.backward(first)


def _part_without_gradients(training: Training, batch: Batch) -> None:
    x = batch.inputs
    with torch.no_grad():
        for block in training.module.trunk:
            x = block(x)
    training.backward(loss_of(training.module.a(x), batch.target))


def _evaluates_before_backward(training: Training, batch: Batch) -> None:
    loss = _loss(training, batch)
    training.module.eval()
    with torch.no_grad():
        training.module(batch.inputs)
    training.module.train()
    training.backward(loss)


def _inference_mode_around(training: Training, batch: Batch) -> None:
    def infer() -> None:
        with torch.inference_mode():
            training.module(batch.inputs)

    infer()
    loss = _loss(training, batch)
    infer()
    training.backward(loss)
    infer()


def _its_own_teacher(training: Training, batch: Batch) -> None:
    with torch.no_grad():
        (taught,) = training.module(batch.inputs + 0.1)
    (output,) = training.module(batch.inputs)
    training.backward(loss_of(output, batch.target) + (output - taught).square().mean())


def _forward_for_nothing(training: Training, batch: Batch) -> None:
    training.module(batch.inputs)
    training.backward(_loss(training, batch))


def _gradient_penalty(training: Training, batch: Batch) -> None:
    inputs = batch.inputs.clone().requires_grad_()
    (output,) = training.module(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    training.backward(loss_of(output, batch.target) + (slope.norm(dim=1) - 1).square().mean())


def _gradients_of_inputs(training: Training, batch: Batch) -> None:
    inputs = batch.inputs.clone().requires_grad_()
    training.backward(loss_of(training.module(inputs)[0], batch.target))
    assert inputs.grad is not None
    assert inputs.grad.abs().sum() > 0


ORDER = {
    **{f"two_losses_{name}": Case(Heads, _two_losses, config=config, worlds=UNEVEN)
       for name, config in [("", SMALL_BUCKETS), ("accumulated", ACCUMULATED), ("checkpointed", FULL)]},
    "forward_backward_twice": Case(Heads, _forward_backward_twice, worlds=UNEVEN),
    "backwards_in_reverse": Case(Heads, _backwards_in_reverse),
    "backwards_in_reverse_checkpointed": Case(Heads, _backwards_in_reverse, config=FULL),
    "part_without_gradients": Case(Heads, _part_without_gradients),
    "evaluates_before_backward": Case(Heads, _evaluates_before_backward),
    "evaluates_before_backward_checkpointed": Case(Heads, _evaluates_before_backward, config=FULL),
    "inference_mode_around": Case(Heads, _inference_mode_around),
    "its_own_teacher": Case(Heads, _its_own_teacher),
    "forward_for_nothing": Case(Heads, _forward_for_nothing),
    "gradient_penalty": Case(Heads, _gradient_penalty),
    "gradient_penalty_checkpointed": Case(Heads, _gradient_penalty, config=FULL),
    "gradients_of_inputs": Case(Heads, _gradients_of_inputs),
}


# What goes in and comes out


class Structured(nn.Module):
    """Takes and returns structures, as do its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_StructuredBlock() for _ in range(2))
        self.leave = nn.Linear(FEATURES, 1)

    def forward(self, *, batch: dict[str, Any], unused: None = None) -> dict[str, Any]:
        hidden, kept = batch["x"][0], []
        for block in self.blocks:
            hidden, *_, details = block(hidden, scale=batch["scale"])
            kept.append(details["hidden"])
        return {"loss": loss_of(self.leave(hidden), batch["y"]), "kept": kept, "name": "structured", "unused": unused}


class _StructuredBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, None, dict[str, Tensor]]:
        hidden = torch.tanh(self.layer(x)) * scale
        return hidden, None, {"hidden": hidden}


def _structures(training: Training, batch: Batch) -> None:
    output = training.module(batch={"x": (batch.inputs, "a"), "y": batch.target, "scale": 0.9})
    training.backward(output["loss"] + sum(hidden.square().mean() for hidden in output["kept"]))


def _loss_of_one_element(training: Training, batch: Batch) -> None:
    training.backward(_loss(training, batch)[None] / 7)


CASES = {
    **USED, **ORDER,
    "structures": Case(Structured, _structures),
    "structures_checkpointed": Case(Structured, _structures, config=FULL),
    "loss_of_one_element": Case(Heads, _loss_of_one_element),
}


# Hooks, modes and switches of the user's


def _hooked() -> nn.Module:
    """Hooks on parameters and modules, from before the engine takes over."""
    model = Tower(blocks=3, width=FEATURES)
    model.enter.weight.register_hook(lambda gradient: gradient * 2)
    model.blocks[1].up.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[union-attr]
    model.leave.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,))  # type: ignore[index]
    model.blocks[0].register_forward_hook(lambda module, inputs, output: output * 1.1)
    model.blocks[2].register_full_backward_pre_hook(lambda module, outer: (outer[0] * 0.9,))  # type: ignore[index]
    return model


def _hooks_on_the_way(training: Training, batch: Batch) -> None:
    if batch.step == 0:
        training.module.enter.weight.register_hook(lambda gradient: gradient * 2)
        training.module.blocks[1].register_forward_hook(lambda module, inputs, output: output * 1.1)
    seen = []
    output = training.module(batch.inputs)
    output.register_hook(lambda gradient: seen.append(gradient.shape) or gradient * 0.3)
    training.backward(loss_of(output, batch.target))
    assert seen == [output.shape]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x)


def _train_and_eval_in_turns(training: Training, batch: Batch) -> None:
    training.module.train(batch.step % 2 == 0)
    plain(training, batch)
    training.module.train()


def _freezes_for_good(training: Training, batch: Batch) -> None:
    if batch.step == 1:
        training.module.a.requires_grad_(False)
    training.backward(_loss(training, batch))


def _freezes_in_turns(training: Training, batch: Batch) -> None:
    training.module.trunk.requires_grad_(batch.step % 2 == 0)
    training.module.a.weight.requires_grad_(batch.step % 2 == 1)
    training.backward(_loss(training, batch))


def _looks_around(training: Training, batch: Batch) -> None:
    """What loops written for plain modules do besides."""
    assert sum(parameter.numel() for parameter in training.module.parameters()) > 0
    assert "Heads" in repr(training.module)
    training.module.zero_grad()
    training.backward(_loss(training, batch))


CASES |= {
    "hooked": Case(_hooked),
    "hooked_checkpointed": Case(_hooked, config=FULL),
    "hooks_on_the_way": Case(partial(Tower, 3, FEATURES), _hooks_on_the_way),
    "dropout": Case(Dropped, worlds=UNEVEN),
    "train_and_eval_in_turns": Case(Dropped, _train_and_eval_in_turns),
    "freezes_for_good": Case(Heads, _freezes_for_good),
    "freezes_in_turns": Case(Heads, _freezes_in_turns, steps=4),
    "looks_around": Case(Heads, _looks_around),
}


# Failures that the loop survives


class BadSampleError(Exception):
    pass


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(_context: Any, _gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise BadSampleError


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)
        self.blocks = nn.ModuleList(Block(FEATURES) for _ in range(3))

    def forward(self, x: Tensor, *, fails_after: int | None = None, in_backward: bool = False) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == fails_after:
                if not in_backward:
                    raise BadSampleError
                x = _FailsInBackward.apply(x)  # type: ignore[no-untyped-call]
        return self.leave(x)


def _forward_fails(training: Training, batch: Batch, *, after: tuple[int | None, ...]) -> None:
    """In another block on every rank, or on some ranks only."""
    with suppress(BadSampleError):
        training.module(batch.inputs, fails_after=after[batch.rank % len(after)])
    plain(training, batch)


def _evaluation_fails(training: Training, batch: Batch) -> None:
    loss = loss_of(training.module(batch.inputs), batch.target)
    with torch.no_grad(), pytest.raises(BadSampleError):
        training.module(batch.inputs, fails_after=1)
    training.backward(loss)


def _backward_fails(training: Training, batch: Batch, *, after: tuple[int, ...]) -> None:
    """On every rank, at once or at different places."""
    output = training.module(batch.inputs, fails_after=after[batch.rank % len(after)], in_backward=True)
    with pytest.raises(BadSampleError):
        training.backward(loss_of(output, batch.target))
    plain(training, batch)


CASES |= {
    "forward_fails": Case(Fragile, partial(_forward_fails, after=(1,))),
    "forward_fails_differently": Case(Fragile, partial(_forward_fails, after=(0, 2)), worlds=UNEVEN),
    "forward_fails_on_some": Case(Fragile, partial(_forward_fails, after=(None, 1)), worlds=UNEVEN),
    "evaluation_fails": Case(Fragile, _evaluation_fails),
    "backward_fails": Case(Fragile, partial(_backward_fails, after=(1,)), worlds=UNEVEN),
    "backward_fails_differently": Case(Fragile, partial(_backward_fails, after=(0, 2)), worlds=UNEVEN),
}


@ways
@each_world(CASES)
def test_loop_trains_as_replicas(ranks: RanksOf, stage: int, name: str, world_size: int) -> None:
    assert_trains_as_replicas(ranks, CASES[name], stage=stage, world_size=world_size)
