"""The update in rounds, and the order in which buckets get there."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from engine import OptimizerConfig, TrainConfig
from tests.engine.training import FEATURES, RanksOf, Setup, assert_same_weights, reference, run_step, start, train

LAYERS = 30


def test_step_hooks_run_once_a_step(ranks: RanksOf) -> None:
    assert ranks(2).run(_hook_calls) == [(3, 3, 4)] * 2


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
