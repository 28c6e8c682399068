"""Optimizers of the user's own, and what cannot be sharded."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import ConfigurationError, OptimizerConfig, TrainConfig
from engine.trainer import initialize
from tests.engine.training import (
    Awkward,
    RanksOf,
    Setup,
    Weights,
    assert_same_weights,
    built,
    loss_of,
    over_shared_memory,
    perceptron,
    reference,
    run_step,
    samples,
    stages,
    start,
    train,
)

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class SignMomentum(torch.optim.Optimizer):
    """Element-wise (Lion's update), with a plain number among its states and a counter in its group."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    state["count"] = state.get("count", 0) + 1
                    parameter.add_((momentum * 0.9 + parameter.grad * 0.1).sign(), alpha=-group["lr"] / group["calls"])
                    momentum.mul_(0.99).add_(parameter.grad, alpha=0.01)


class Accumulating(torch.optim.Optimizer):
    """Element-wise; keeps things of its own beside states and groups, and makes its states on construction."""

    def __init__(self, params: Iterable[nn.Parameter], start: float = 0.1) -> None:
        self.power = 0.5
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.full_like(parameter, start)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    total = self.state[parameter]["sum"].add_(parameter.grad.square())
                    parameter.sub_(group["lr"] * parameter.grad / total**self.power)


class TrustRatio(torch.optim.AdamW):
    """Not element-wise (LAMB): the length of a step is that of the whole parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        before = [parameter.clone() for parameter in every]
        super().step()
        for parameter, old in zip(every, before, strict=True):
            update = parameter - old
            parameter.copy_(old + update * old.norm() / update.norm())


class ClipsUpdates(torch.optim.SGD):
    """Not element-wise (StableAdamW): a large gradient is scaled down by its root mean square."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= max(1.0, parameter.grad.square().mean().sqrt().item())
        super().step()


class Spectral(torch.optim.Optimizer):
    """Not element-wise in one of its groups: there it divides by the largest singular value."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        every = list(params)
        super().__init__([{"params": [p for p in every if p.dim() == 1], "matrices": False},
                          {"params": [p for p in every if p.dim() == 2], "matrices": True}], {"lr": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                scale = torch.linalg.matrix_norm(parameter.grad, 2) if group["matrices"] else 1.0
                parameter.sub_(group["lr"] * parameter.grad / scale)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()


class RowScaled(torch.optim.Optimizer):
    """Not element-wise: it divides by the norm of the whole tensor."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


def sign_momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return SignMomentum(parameters, lr=0.01)


@stages
def test_element_wise_optimizer_of_the_users_own(ranks: RanksOf, stage: int) -> None:
    setup = Setup(Awkward, TrainConfig(zero_stage=stage, reduce_bucket_size=100), sign_momentum)
    assert_same_weights(ranks(2).run(train, setup), reference(setup))


@stages
def test_optimizer_with_states_from_its_construction(ranks: RanksOf, stage: int) -> None:
    setup = Setup(Awkward, TrainConfig(zero_stage=stage, reduce_bucket_size=100), Accumulating)
    assert_same_weights(ranks(2).run(train, setup), reference(setup))


@over_shared_memory
@stages
@pytest.mark.parametrize("factory", [
    functools.partial(torch.optim.Adadelta, lr=0.5),
    functools.partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    functools.partial(torch.optim.Adam, amsgrad=True, maximize=True, foreach=True),
    functools.partial(torch.optim.AdamW, amsgrad=True, maximize=True, fused=True),
    functools.partial(torch.optim.Adamax, weight_decay=0.1),
    functools.partial(torch.optim.ASGD, lambd=0.1),
    functools.partial(torch.optim.NAdam, decoupled_weight_decay=True, weight_decay=0.1),
    functools.partial(torch.optim.RAdam, decoupled_weight_decay=True, weight_decay=0.1),
    functools.partial(torch.optim.RMSprop, centered=True, momentum=0.5, eps=1e-3),
    functools.partial(torch.optim.Rprop, lr=1e-3),
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True, fused=True),
], ids=lambda factory: factory.func.__name__)
def test_element_wise_optimizers_of_torch(ranks: RanksOf, stage: int, factory: Factory) -> None:
    setup = Setup(perceptron, TrainConfig(zero_stage=stage, reduce_bucket_size=100), factory, steps=4)
    assert_same_weights(ranks(2).run(train, setup), reference(setup), atol=2e-6, rtol=5e-5)


Schedule = Callable[[torch.optim.Optimizer], Any]


def _warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: step / 4, lambda step: 1.0])


def _one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Moves the betas as well."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=5)


def _chained(optimizer: torch.optim.Optimizer) -> Any:
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
             torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def _train_on_schedule(setup: Setup, schedule: Schedule) -> list[Weights]:
    trainer = start(setup)
    scheduler = schedule(trainer.optimizer)
    history = []
    for step in range(setup.steps):
        run_step(trainer, step)
        scheduler.step()
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


@stages
@pytest.mark.parametrize("schedule", [_warm_up, _one_cycle, _chained])
def test_schedulers_attach_to_the_trainers_optimizer(ranks: RanksOf, stage: int, schedule: Schedule) -> None:
    setup = Setup(perceptron, TrainConfig(zero_stage=stage, reduce_bucket_size=100), _two_groups, steps=4)
    model = built(setup.build)
    optimizer = _two_groups(model.parameters())
    scheduler = schedule(optimizer)
    expected = []
    for step in range(setup.steps):
        inputs, target = samples(step)
        optimizer.zero_grad()
        loss_of(model(inputs), target).backward()
        optimizer.step()
        scheduler.step()
        expected.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same_weights(ranks(2).run(_train_on_schedule, setup, schedule), expected)


def _count_after_loading(path: Path, save: bool) -> tuple[set[int], int]:
    trainer = start(Setup(perceptron, TrainConfig(zero_stage=2), sign_momentum))
    if save:
        for step in range(3):
            run_step(trainer, step)
        trainer.save_checkpoint(path)
    else:
        trainer.load_checkpoint(path)
    counts = {state["count"] for state in trainer.optimizer.state.values()}
    calls = trainer.optimizer.param_groups[0]["calls"]
    trainer.close()
    return counts, calls


def test_plain_numbers_among_optimizer_states_are_saved(ranks: RanksOf, tmp_path: Path) -> None:
    assert ranks(2).run(_count_after_loading, tmp_path / "c", True) == [({3}, 3)] * 2
    assert ranks(3).run(_count_after_loading, tmp_path / "c", False) == [({3}, 3)] * 3


@pytest.mark.parametrize(("factory", "reason"), [
    (torch.optim.LBFGS, "closure"),
    (lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2]), "whole matrices"),
    (torch.optim.Adafactor, "factors"),
    (torch.optim.SparseAdam, "sparse"),
    (RowScaled, "does not update a flat slice"),
    (TrustRatio, "does not update a flat slice"),
    (functools.partial(TrustRatio, lr=0.0, weight_decay=0.0), "does not update a flat slice"),
    (ClipsUpdates, "does not update a flat slice"),
    (Spectral, "does not update a flat slice"),
    (NeedsClosure, "TypeError.*closure"),
    (functools.partial(torch.optim.Adam, differentiable=True), "differentiable"),
])
def test_optimizers_that_are_not_element_wise_are_refused(factory: Factory, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        initialize(built(perceptron), config=TrainConfig(), optimizer=factory)
    assert caught.value.fields == ("optimizer",)
    assert "AdamW" in str(caught.value)


def test_factory_must_return_an_optimizer_over_the_models_parameters() -> None:
    with pytest.raises(ConfigurationError, match="returned list"):
        initialize(built(perceptron), config=TrainConfig(), optimizer=list)  # type: ignore[arg-type]
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigurationError, match=r"shape \(3,\)"):
        initialize(built(perceptron), config=TrainConfig(), optimizer=lambda _: torch.optim.SGD([stranger], lr=1.0))


def _slices(stage: int) -> tuple[list[list[tuple[int, ...]]], list[float]]:
    trainer = start(Setup(perceptron, TrainConfig(zero_stage=stage), _two_groups))
    shapes = [[tuple(tensor.shape) for tensor in group["params"]] for group in trainer.optimizer.param_groups]
    decays = [group["weight_decay"] for group in trainer.optimizer.param_groups]
    run_step(trainer, 0)
    again = [[tuple(tensor.shape) for tensor in group["params"]] for group in trainer.optimizer.param_groups]
    assert again == shapes
    trainer.close()
    return shapes, decays


def _two_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.AdamW([{"params": [p for p in every if p.dim() > 1]},
                              {"params": [p for p in every if p.dim() == 1], "weight_decay": 0.0}], weight_decay=0.3)


@stages
def test_optimizer_holds_one_flat_slice_per_owned_parameter_in_the_users_groups(ranks: RanksOf, stage: int) -> None:
    results = ranks(2).run(_slices, stage)
    sizes = {0: 13 * 8 + 5 * 13 + 5, 1: 13 + 5 + 1}
    for shapes, decays in results:
        assert decays == [0.3, 0.0]
        assert all(len(shape) == 1 for group in shapes for shape in group)
        assert all(len(group) <= 3 for group in shapes)
    copies = 2 if stage == 0 else 1
    for group, elements in sizes.items():
        assert sum(shape[0] for shapes, _ in results for shape in shapes[group]) == copies * elements


def _partly_optimized(stage: int) -> bool:
    """A parameter that is in no group keeps its value."""
    trainer = start(Setup(perceptron, TrainConfig(zero_stage=stage), _first_only))
    before = trainer.consolidated_state_dict()
    run_step(trainer, 0)
    after = trainer.consolidated_state_dict()
    trainer.close()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    return moved == ["0.weight"]


def _first_only(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[:1], lr=0.1)


@stages
def test_parameters_in_no_group_stay_as_they_are(ranks: RanksOf, stage: int) -> None:
    assert ranks(2).run(_partly_optimized, stage) == [True, True]


def test_an_optimizer_by_name_is_fused() -> None:
    trainer = initialize(built(perceptron), config=TrainConfig(), optimizer=OptimizerConfig(name="adamw"))
    assert trainer.optimizer.param_groups[0]["fused"] is True
    trainer.close()


class TwoPhase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sum() * x


def test_trains_without_any_process_group() -> None:
    trainer = initialize(TwoPhase(), config=TrainConfig(zero_stage=3), optimizer=OptimizerConfig(name="sgd", lr=0.5))
    trainer.backward(trainer(torch.ones(())))
    result = trainer.step()
    assert (result.applied, result.boundary, result.grad_norm, result.loss_scale) == (True, True, None, 1.0)
    assert torch.equal(trainer.consolidated_state_dict()["weight"], torch.full((2, 2), 0.5))
    assert (trainer.rank, trainer.data_parallel_size, trainer.collective_counts) == (0, 1, {})
    trainer.close()
