"""Copies of a module in training and after it, and what a trainer refuses at the moment it goes wrong."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from engine import TrainConfig
from engine.trainer import initialize
from tests.engine.training import (
    FEATURES,
    RanksOf,
    Setup,
    Tower,
    Weights,
    assert_same_weights,
    built,
    loss_of,
    perceptron,
    plain_optimizer,
    reference,
    run_step,
    samples,
    stages,
    start,
)


def _average(stage: int) -> list[Weights]:
    """A moving average of the weights, from the first step on."""
    setup = Setup(Tower, TrainConfig(zero_stage=stage))
    trainer = start(setup)
    average = AveragedModel(trainer.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    history = []
    for step in range(setup.steps):
        run_step(trainer, step)
        average.update_parameters(trainer.module)
        history.append({name: value.clone() for name, value in average.module.state_dict().items()})
    average.module.load_state_dict(built(Tower).state_dict())  # a plain module, which the engine does not hold
    trainer.close()
    return history


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_moving_averages_of_weights(ranks: RanksOf, stage: int) -> None:
    setup = Setup(Tower)
    model = built(Tower)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = []
    for weights in reference(setup):
        model.load_state_dict(weights)
        average.update_parameters(model)
        expected.append({name: value.clone() for name, value in average.module.state_dict().items()})
    assert_same_weights(ranks(2).run(_average, stage), expected)


def _deep(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def _pickled(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [_deep, _pickled])
@pytest.mark.parametrize("after_close", [False, True])
def test_a_copy_trains_on_as_a_plain_module(copied: Callable[[nn.Module], nn.Module], *, after_close: bool) -> None:
    setup = Setup(perceptron, TrainConfig(zero_stage=2), steps=2)
    trainer = start(setup)
    run = [samples(step) for step in range(3)]
    module = trainer.module
    trainer.backward(loss_of(trainer(run[0][0]), run[0][1]))
    trainer.step()
    before = trainer.consolidated_state_dict()
    if after_close:
        trainer.close()
    twin = copied(module)
    optimizer = plain_optimizer(setup.optimizer, list(twin.parameters()))
    loss_of(twin(run[1][0]), run[1][1]).backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    trainer.close()


@pytest.mark.parametrize("change", [{"zero_stage": 3}, {"activation_checkpointing": "full"}])
def test_copies_that_would_run_the_original_are_refused(change: dict[str, object]) -> None:
    trainer = initialize(built(Tower), config=TrainConfig.model_validate(change))
    with pytest.raises(RuntimeError, match="copy the model before initialize"):
        copy.deepcopy(trainer.module)
    trainer.close()


@stages
def test_thawing_a_parameter_that_was_laid_out_frozen_is_refused(stage: int) -> None:
    model = built(perceptron)
    model[2].requires_grad_(False)  # type: ignore[index]
    trainer = initialize(model, config=TrainConfig(zero_stage=stage))
    model[2].bias.requires_grad_()  # type: ignore[index, union-attr]
    with pytest.raises(RuntimeError, match=r"2\.bias was frozen.*initialize with it trainable"):
        trainer.backward(loss_of(trainer(samples(0)[0]), samples(0)[1]))
    trainer.close()


def _without_gradient(stage: int) -> bool:
    """On one rank alone, before it takes part in anything: it can do as it is told, and the others find it in step."""
    trainer = start(Setup(perceptron, TrainConfig(zero_stage=stage)))
    output = trainer(samples(0)[0])
    if trainer.rank == 1:
        with pytest.raises(ValueError, match="zero times an output"):
            trainer.backward(torch.zeros(()))
        trainer.backward(output.sum() * 0)
    else:
        trainer.backward(loss_of(output, samples(0)[1]))
    trainer.step()
    finite = all(value.isfinite().all() for value in trainer.consolidated_state_dict().values())
    trainer.close()
    return finite


@stages
def test_a_loss_that_depends_on_nothing_is_refused_before_others_wait_for_it(ranks: RanksOf, stage: int) -> None:
    assert ranks(2).run(_without_gradient, stage) == [True, True]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, FEATURES)
        self.words = nn.Linear(FEATURES, 4096, bias=False)
        self.words.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(self.table(tokens))


@stages
def test_tied_weights_are_saved_once(stage: int) -> None:
    trainer = initialize(Tied(), config=TrainConfig(zero_stage=stage))
    trainer.backward(trainer(torch.arange(5)).square().mean())
    trainer.step()
    weights, file = trainer.consolidated_state_dict(), io.BytesIO()
    trainer.close()
    torch.save(weights, file)
    assert file.tell() == pytest.approx(4096 * FEATURES * 4, rel=0.05)
    file.seek(0)
    model = Tied()
    model.load_state_dict(torch.load(file), strict=True)
    assert model.words.weight is model.table.weight
    assert torch.equal(model.table.weight.detach(), weights["words.weight"])
