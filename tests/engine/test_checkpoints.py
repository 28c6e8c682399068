"""Checkpoints: training goes on as if uninterrupted, at any world size, stage and precision."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from engine import OptimizerConfig, TrainConfig
from engine.precision import LossScale
from engine.trainer import initialize
from tests.engine.training import (
    FEATURES,
    Awkward,
    Optimizer,
    RanksOf,
    Setup,
    Weights,
    assert_same_weights,
    loss_of,
    micro_batches,
    perceptron,
    reference,
    run_step,
    samples,
    stages,
    start,
    train,
)


def _save_after(setup: Setup, steps: int, path: Path) -> list[Weights]:
    trainer = start(setup)
    history = []
    for step in range(steps):
        run_step(trainer, step)
        history.append(trainer.consolidated_state_dict())
    trainer.save_checkpoint(path)
    trainer.close()
    return history


def _resume(setup: Setup, first: int, path: Path) -> list[Weights]:
    """Loads into a model with other weights, and trains the remaining steps."""
    torch.manual_seed(123)
    trainer = start(Setup(_scrambled(setup), setup.config, setup.optimizer))
    trainer.load_checkpoint(path)
    assert trainer.steps == first
    history = [trainer.consolidated_state_dict()]
    for step in range(first, setup.steps):
        run_step(trainer, step)
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


def _scrambled(setup: Setup) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = setup.build()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(3)
        return model

    return build


@stages
@pytest.mark.parametrize("optimizer", [OptimizerConfig(lr=0.01, weight_decay=0.1),
                                       OptimizerConfig(name="sgd", lr=0.05, momentum=0.9)], ids=["adamw", "momentum"])
@pytest.mark.parametrize("offload", [0.0, 0.4])
def test_resumed_training_is_bitwise_the_uninterrupted_one(ranks: RanksOf, tmp_path: Path, stage: int,
                                                           optimizer: OptimizerConfig, offload: float) -> None:
    config = TrainConfig(zero_stage=stage, offload_optimizer_ratio=offload, gradient_accumulation_steps=2,
                         reduce_bucket_size=200)
    setup = Setup(Awkward, config, optimizer, steps=6)
    whole = ranks(2).run(train, setup)[0]
    ranks(2).run(_save_after, setup, 3, tmp_path / "checkpoint")
    for resumed in ranks(2).run(_resume, setup, 3, tmp_path / "checkpoint"):
        for ours, theirs in zip(resumed, whole[2:], strict=True):
            assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize(("saved", "loaded"), [((3, 3), (2, 1)), ((2, 2), (1, 0)), ((1, 0), (3, 3)), ((2, 3), (3, 1)),
                                               ((3, 1), (2, 3))])
def test_checkpoints_load_at_another_world_size_and_stage(ranks: RanksOf, tmp_path: Path, saved: tuple[int, int],
                                                          loaded: tuple[int, int]) -> None:
    def setup(stage: int) -> Setup:
        return Setup(Awkward, TrainConfig(zero_stage=stage, reduce_bucket_size=90 + 100 * stage), steps=6)

    path = tmp_path / "checkpoint"
    ranks(saved[0]).run(_save_after, setup(saved[1]), 3, path)
    resumed = ranks(loaded[0]).run(_resume, setup(loaded[1]), 3, path)
    assert_same_weights(resumed, reference(setup(0))[2:])


def _moments(setup: Setup, path: Path) -> dict[str, torch.Tensor]:
    """Adam's states of whole parameters, at one rank after loading."""
    trainer = start(setup)
    trainer.load_checkpoint(path)
    moments = {f"{piece.managed.name}.{key}": value for piece in trainer._update.slices
               for key, value in trainer.optimizer.state[piece.tensor].items()}
    trainer.close()
    return moments


def odd_sizes() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7, bias=False), nn.Linear(7, 13), nn.Linear(13, 1))


def test_moments_of_odd_sized_parameters_survive_repartitioning(ranks: RanksOf, tmp_path: Path) -> None:
    setup = Setup(odd_sizes, TrainConfig(zero_stage=2), steps=3)
    ranks(3).run(_save_after, setup, 3, tmp_path / "checkpoint")
    moments = ranks(1).run(_moments, setup, tmp_path / "checkpoint")[0]
    torch.manual_seed(7)
    model = odd_sizes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        inputs, target = samples(step)
        optimizer.zero_grad()
        loss_of(model(inputs), target).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert float(moments[f"{name}.step"]) == 3
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(moments[f"{name}.{key}"], state[key].flatten(), atol=1e-7, rtol=1e-5)


@stages
def test_plain_sgd_has_no_states_and_loading_moves_nothing(ranks: RanksOf, tmp_path: Path, stage: int) -> None:
    setup = Setup(perceptron, TrainConfig(zero_stage=stage), OptimizerConfig(name="sgd", lr=0.1), steps=2)
    saved = ranks(2).run(_save_after, setup, 2, tmp_path / "checkpoint")[0]
    resumed = ranks(2).run(_resume, setup, 2, tmp_path / "checkpoint")[0]
    assert all(torch.equal(resumed[0][name], value) for name, value in saved[-1].items())


@pytest.mark.parametrize(("saved", "loaded"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_checkpoints_load_in_another_precision(ranks: RanksOf, tmp_path: Path, saved: str, loaded: str) -> None:
    def setup(precision: str) -> Setup:
        return Setup(Awkward, TrainConfig.model_validate({"zero_stage": 2, "precision": precision}), steps=2)

    written = ranks(2).run(_save_after, setup(saved), 2, tmp_path / "checkpoint")[0][-1]
    read = ranks(2).run(_resume, setup(loaded), 2, tmp_path / "checkpoint")[0][0]
    trainable = [name for name in written if not name.startswith(("frozen", "shift", "count"))]
    assert all(torch.equal(written[name], read[name]) for name in trainable)  # masters are fp32 in both
    torch.testing.assert_close(written["frozen.weight"], read["frozen.weight"], atol=0, rtol=2**-8)


def _overflow_pattern(config: TrainConfig, pattern: str, path: Path, save_at: int | None,
                      load_first: bool) -> list[float]:
    trainer = start(Setup(perceptron, config))
    if load_first:
        trainer.load_checkpoint(path)
    scales = []
    for position, kind in enumerate(pattern):
        if position == save_at:
            trainer.save_checkpoint(path)
        (inputs, target), = micro_batches(position, accumulation=1)
        loss = loss_of(trainer(inputs), target)
        trainer.backward(loss * float("inf") if kind == "x" else loss)
        trainer.step()
        scales.append(trainer.loss_scale)
    trainer.close()
    return scales


def test_the_loss_scale_resumes_where_it_was(ranks: RanksOf, tmp_path: Path) -> None:
    config = TrainConfig(precision="fp16", initial_scale_power=4, loss_scale_window=3)
    whole = ranks(1).run(_overflow_pattern, config, "...x...", tmp_path / "a", 2, False)[0]
    expected, scale = [], LossScale(config)
    for kind in "...x...":
        scale.update(overflow=kind == "x")
        expected.append(scale.value)
    assert whole == expected
    assert ranks(1).run(_overflow_pattern, config, ".x...", tmp_path / "a", None, True)[0] == whole[2:]


def _decayed(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.AdamW([{"params": every[:1], "lr": 0.5}, {"params": every[1:]}], lr=0.25)


def _decayed_by_tensors(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.AdamW([{"params": every[:1], "lr": torch.tensor(0.5)}, {"params": every[1:]}],
                             lr=torch.tensor(0.25))


def _rates(optimizer: Optimizer, path: Path, save: bool) -> list[float]:
    trainer = start(Setup(perceptron, TrainConfig(zero_stage=1), optimizer))
    kinds = [type(group["lr"]) for group in trainer.optimizer.param_groups]
    if save:
        for group in trainer.optimizer.param_groups:
            group["lr"] /= 4
        trainer.save_checkpoint(path)
    else:
        trainer.load_checkpoint(path)
    rates = [float(group["lr"]) for group in trainer.optimizer.param_groups]
    assert [type(group["lr"]) for group in trainer.optimizer.param_groups] == kinds
    betas = {type(group["betas"]) for group in trainer.optimizer.param_groups}
    assert betas == {tuple}
    trainer.close()
    return rates


@pytest.mark.parametrize("optimizer", [_decayed, _decayed_by_tensors])
def test_learning_rates_are_restored(ranks: RanksOf, tmp_path: Path, optimizer: Optimizer) -> None:
    assert ranks(2).run(_rates, optimizer, tmp_path / "c", True)[0] == [0.125, 0.0625]
    assert ranks(2).run(_rates, optimizer, tmp_path / "c", False)[1] == [0.125, 0.0625]


def _resume_in_the_middle_of_a_step(setup: Setup, path: Path) -> list[Weights]:
    trainer = start(setup)
    trainer.load_checkpoint(path)
    history = []
    for interrupted in (False, True):
        if interrupted:
            for inputs, target in micro_batches(7, accumulation=2):
                trainer.backward(loss_of(trainer(inputs), target))
            trainer.load_checkpoint(path)
        run_step(trainer, 1)
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


@stages
def test_loading_drops_gradients_that_no_step_has_used(ranks: RanksOf, tmp_path: Path, stage: int) -> None:
    setup = Setup(perceptron, TrainConfig(zero_stage=stage, gradient_accumulation_steps=2))
    ranks(2).run(_save_after, setup, 1, tmp_path / "c")
    for plain, interrupted in ranks(2).run(_resume_in_the_middle_of_a_step, setup, tmp_path / "c"):
        assert all(torch.equal(plain[name], interrupted[name]) for name in plain)


def _start_over(setup: Setup, path: Path) -> list[Weights]:
    """A checkpoint from before the first step, loaded after two; and the steps from there on."""
    trainer = start(setup)
    trainer.save_checkpoint(path)
    for step in (3, 4):
        run_step(trainer, step)
    trainer.load_checkpoint(path)
    history = []
    for step in range(setup.steps):
        run_step(trainer, step)
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


@stages
def test_a_checkpoint_without_states_leaves_none_behind(ranks: RanksOf, tmp_path: Path, stage: int) -> None:
    setup = Setup(Awkward, TrainConfig(zero_stage=stage, offload_optimizer_ratio=0.4), steps=2)
    histories = ranks(2).run(_start_over, setup, tmp_path / "c")
    assert_same_weights(histories, ranks(2).run(train, setup)[0], atol=0, rtol=0)


def _buffers_after_loading(path: Path) -> float:
    """Of ranks that each had a value of their own when they saved."""
    trainer = start(Setup(Awkward))
    shift = dict(trainer.module.named_buffers())["shift"]
    shift.fill_(5 + trainer.rank)
    trainer.save_checkpoint(path)
    shift.zero_()
    trainer.load_checkpoint(path)
    trainer.close()
    return float(shift.mean())


def test_the_first_ranks_buffers_are_saved(ranks: RanksOf, tmp_path: Path) -> None:
    assert ranks(3).run(_buffers_after_loading, tmp_path / "c") == [5, 5, 5]


@stages
def test_weights_loaded_behind_the_engines_back_are_refused(stage: int) -> None:
    trainer = initialize(perceptron(), config=TrainConfig.model_validate({"zero_stage": stage, "precision": "bf16"}))
    with pytest.raises(RuntimeError, match="load before initialize"):
        trainer.module.load_state_dict(perceptron().state_dict())
    module = trainer.module
    trainer.close()
    if stage < 3:
        module.load_state_dict(perceptron().state_dict())


@stages
def test_frozen_parameters_and_buffers_are_in_every_checkpoint(ranks: RanksOf, tmp_path: Path, stage: int) -> None:
    ranks(2).run(_save_after, Setup(Awkward, TrainConfig(zero_stage=stage), steps=1), 1, tmp_path / "c")
    metadata = FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    names = {name.removeprefix("model/") for name in metadata if name.startswith("model/")}
    expected = {name for name, parameter in Awkward().named_parameters() if parameter.numel()}
    assert names == expected
    assert {name for name in metadata if name.startswith("buffer/")} == {"buffer/shift", "buffer/count"}
    assert json.loads((tmp_path / "c" / "progress.json").read_text())["progress"]["steps"] == 1


def _consolidated(stage: int, precision: str) -> tuple[bool, bool, bool]:
    config = TrainConfig.model_validate({"zero_stage": stage, "precision": precision, "initial_scale_power": 2})
    trainer = start(Setup(Awkward, config))
    run_step(trainer, 0)
    weights = trainer.consolidated_state_dict()
    if stage == 3:
        with pytest.raises(RuntimeError, match="consolidated_state_dict"):
            trainer.module.state_dict()
    else:
        assert list(trainer.module.state_dict()) == list(weights)
    trainer.close()
    plain = Awkward()
    result = plain.load_state_dict(weights, strict=True)
    fp32 = all(weights[name].dtype == torch.float32 for name, _ in plain.named_parameters())
    tied = weights["mix.weight"].data_ptr() == weights["again.weight"].data_ptr()
    return not result.missing_keys and not result.unexpected_keys, fp32, tied


@stages
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_consolidated_state_dict_loads_into_the_plain_model(ranks: RanksOf, stage: int, precision: str) -> None:
    assert ranks(2).run(_consolidated, stage, precision) == [(True, True, True)] * 2
