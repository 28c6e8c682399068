"""The update in rounds, and the order in which buckets get there."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import OptimizerConfig, TrainConfig
from engine.trainer import Trainer
from tests.engine.training import (
    FEATURES,
    RanksOf,
    Setup,
    Tower,
    assert_same_weights,
    reference,
    run_step,
    stages,
    start,
    train,
)

LAYERS = 30


def test_step_hooks_run_once_a_step(ranks: RanksOf) -> None:
    assert ranks(2).run(_hook_calls) == [(3, 3, 4)] * 2


class _HookError(Exception):
    pass


def _after_a_failing_hook(stage: int) -> tuple[list[int], bool]:
    """A step that fails in a user's hook, then one that does not: its gradients alone count."""
    config = TrainConfig(zero_stage=stage, reduce_bucket_size=50)
    sgd = OptimizerConfig(name="sgd", lr=0.1)
    trainer, other = (start(Setup(Tower, config, sgd)) for _ in range(2))
    sizes = [len(group["params"]) for group in trainer.optimizer.param_groups]

    def fail(*_: Any) -> None:
        raise _HookError

    handle = trainer.optimizer.register_step_pre_hook(fail)
    with pytest.raises(_HookError):
        run_step(trainer, 0)
    handle.remove()
    run_step(trainer, 1)
    run_step(other, 1)
    ours, theirs = trainer.consolidated_state_dict(), other.consolidated_state_dict()
    after = [len(group["params"]) for group in trainer.optimizer.param_groups]
    trainer.close()
    other.close()
    return [now - before for now, before in zip(after, sizes, strict=True)], all(
        torch.equal(ours[name], theirs[name]) for name in theirs)


@stages
def test_gradients_of_a_step_that_failed_do_not_count(ranks: RanksOf, stage: int) -> None:
    assert ranks(2).run(_after_a_failing_hook, stage) == [([0], True)] * 2


def _hook_calls() -> tuple[int, int, int]:
    trainer = start(Setup(Chain, TrainConfig(zero_stage=1, reduce_bucket_size=64)))
    before: list[float] = []
    after: list[float] = []
    trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: before.append(optimizer.param_groups[0]["lr"]))
    handle = trainer.optimizer.register_step_post_hook(lambda *_: after.append(1.0))
    for step in range(3):
        run_step(trainer, step)
    handle.remove()
    run_step(trainer, 3)
    trainer.close()
    return len(before) - 1, len(after), len(before)


class Chain(nn.Module):
    """A chain of layers with a parameter behind them, first in reduction order, that a step may leave out."""

    def __init__(self, left_out: str = "never") -> None:
        super().__init__()
        self.left_out = left_out
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(LAYERS))
        self.tail = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = inputs + 0.1 * layer(inputs)
        return inputs if self.left_out == "always" else self.tail(inputs)


def _gradient_share(left_out: str) -> float:
    config = TrainConfig(zero_stage=2, reduce_bucket_size=FEATURES**2)
    trainer = start(Setup(partial(Chain, left_out), config, OptimizerConfig(name="sgd", lr=0.001)))
    for step in range(3):
        run_step(trainer, step)
    share = trainer.state_bytes().gradients / (4 * sum(p.numel() for p in trainer.module.parameters()))
    trainer.close()
    return share


@pytest.mark.parametrize("left_out", ["never", "always"])
def test_a_parameter_without_gradient_holds_up_no_other(ranks: RanksOf, left_out: str) -> None:
    for share in ranks(2).run(_gradient_share, left_out):
        assert 0.5 <= share < 0.62  # its half, and the buckets under way


def test_weights_do_not_depend_on_the_order_of_reductions(ranks: RanksOf) -> None:
    for left_out in ("never", "always"):
        setup = Setup(partial(Chain, left_out), TrainConfig(zero_stage=2, reduce_bucket_size=FEATURES**2),
                      OptimizerConfig(name="sgd", lr=0.001))
        assert_same_weights(ranks(2).run(train, setup), reference(setup))


def test_the_update_sees_torch_optimizers_own_groups() -> None:
    trainer = start(Setup(Chain, TrainConfig(reduce_bucket_size=64)))
    sizes = [sum(tensor.numel() for tensor in group["params"]) for group in trainer.optimizer.param_groups]
    trainer.backward(trainer(torch.ones(2, FEATURES)).mean())
    trainer.step()
    assert sizes == [(LAYERS + 1) * FEATURES**2]
    assert [sum(tensor.numel() for tensor in group["params"]) for group in trainer.optimizer.param_groups] == sizes
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    trainer.close()


def test_a_hook_that_fails_leaves_the_optimizer_as_it_was() -> None:
    trainer = start(Setup(Chain, TrainConfig(reduce_bucket_size=64)))
    groups = [list(group["params"]) for group in trainer.optimizer.param_groups]

    def fail(*_: object) -> None:
        raise ValueError("of a user's hook")

    hook = trainer.optimizer.register_step_post_hook(fail)
    trainer.backward(trainer(torch.ones(2, FEATURES)).mean())
    with pytest.raises(ValueError, match="of a user's hook"):
        trainer.step()
    hook.remove()
    for group, tensors in zip(trainer.optimizer.param_groups, groups, strict=True):
        assert list(map(id, group["params"])) == list(map(id, tensors))
        assert all(tensor.grad is None for tensor in tensors)
    assert set(trainer.optimizer.state) <= set(groups[0])
    assert trainer.optimizer.grad_scale is None
    trainer.close()


def _stepped_tensors(config: TrainConfig) -> list[int]:
    """How many tensors the optimizer is given in each of three steps."""
    trainer = start(Setup(Chain, config))
    counts = []
    for _ in range(3):
        seen: list[int] = []
        trainer.backward(trainer(torch.ones(2, FEATURES)).mean())
        inner = trainer.optimizer.step
        trainer.optimizer.step = lambda *_, seen=seen, inner=inner: (  # type: ignore[method-assign]
            seen.append(sum(len(group["params"]) for group in trainer.optimizer.param_groups)), inner())[1]
        trainer.step()
        trainer.optimizer.step = inner  # type: ignore[method-assign]
        counts.append(sum(seen))
    trainer.close()
    return counts


def test_a_step_takes_one_tensor_a_bucket_however_many_parameters_there_are() -> None:
    assert _stepped_tensors(TrainConfig(reduce_bucket_size=10**6)) == [1, 1, 1]
    assert _stepped_tensors(TrainConfig(reduce_bucket_size=10**6, offload_optimizer_ratio=0.5)) == [2, 2, 2]


class Turns(nn.Module):
    """Leaves one layer out in the steps that it is told."""

    def __init__(self, without: tuple[int, ...]) -> None:
        super().__init__()
        self.without, self.calls = without, 0
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        left_out = self.calls in self.without
        self.calls += 1
        for number, layer in enumerate(self.layers):
            inputs = inputs if left_out and number == 2 else torch.tanh(layer(inputs))
        return inputs


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "radam", "rmsprop"])
@pytest.mark.parametrize("without", [(), (0,), (2,), (1, 3)])
def test_counts_go_apart_where_a_parameter_is_left_out(ranks: RanksOf, name: str, without: tuple[int, ...]) -> None:
    optimizer = OptimizerConfig.model_validate({"name": name, "lr": 0.01, "weight_decay": 0.1})
    setup = Setup(partial(Turns, without), TrainConfig(zero_stage=1), optimizer, steps=6)
    assert_same_weights(ranks(2).run(train, setup), reference(setup))


def _prepared_and_not(setup: Setup) -> bool:
    """Whether weights and states are equal bit for bit after every step, and all states were there before the first."""
    early, late = start(setup), start(setup)
    assert early.prepare()
    counts = [len(early.optimizer.state)]
    for step in range(setup.steps):
        run_step(early, step)
        run_step(late, step)
        ours, theirs = early.consolidated_state_dict(), late.consolidated_state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    counts.append(len(early.optimizer.state))
    for ours, theirs in zip(_states(early), _states(late), strict=True):
        assert list(ours) == list(theirs)
        assert all(ours[key].dtype == value.dtype and torch.equal(ours[key], value) for key, value in theirs.items())
    early.close()
    late.close()
    return 0 < counts[0] == counts[1]


def _states(trainer: Trainer) -> list[dict[str, Tensor]]:
    """By parameter slice; none of those that never stepped."""
    states = (trainer.optimizer.state.get(tensor, {}) for group in trainer.optimizer.param_groups
              for tensor in group["params"])
    return [state for state in states if state and state["step"]]


@pytest.mark.parametrize("without", [(), (0, 1, 2), (1,)])
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_states_made_beforehand_are_those_that_the_first_step_makes(
        ranks: RanksOf, name: str, without: tuple[int, ...]) -> None:
    optimizer = OptimizerConfig.model_validate({"name": name, "lr": 0.01, "weight_decay": 0.1})
    config = TrainConfig(zero_stage=1, precision="bf16", offload_optimizer_ratio=0.5, reduce_bucket_size=150)
    assert all(ranks(2).run(_prepared_and_not, Setup(partial(Turns, without), config, optimizer, steps=3)))


def test_states_of_which_it_is_not_known_what_they_are_come_with_the_first_step() -> None:
    trainer = start(Setup(Tower, TrainConfig(), OptimizerConfig(name="rmsprop")))
    assert not trainer.prepare()
    assert not trainer.optimizer.state
    trainer.close()
