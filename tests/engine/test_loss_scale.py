"""fp16's loss scale: how it moves, and that a step whose gradients overflowed leaves no trace."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import ConfigurationError, OptimizerConfig, TrainConfig
from engine.precision import LossScale
from engine.trainer import Trainer, initialize
from tests.engine.test_optimizers import sign_momentum
from tests.engine.training import (
    Optimizer,
    RanksOf,
    Setup,
    Weights,
    assert_same_weights,
    built,
    loss_of,
    micro_batches,
    perceptron,
    plain_optimizer,
    samples,
    stages,
    start,
)

MOMENTUM = OptimizerConfig(name="sgd", lr=0.05, momentum=0.9)
ADAMW = OptimizerConfig(lr=0.01)
SMALL = 1 / 64
"""Losses times this have gradients that a scale of 65536 leaves within fp16's range."""


def _fp16(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"precision": "fp16", **changes})


# --- the rule --------------------------------------------------------------------------------------------------------


def _trace(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step; x stands for an overflow."""
    trace = []
    for flag in overflows:
        scale.update(overflow=flag == "x")
        trace.append(scale.value)
    return trace


@pytest.mark.parametrize(("hysteresis", "overflows", "expected"), [
    (1, "x.x", [8, 8, 4]),
    # The first overflow is forgiven, the next halve; three good steps double, and refill what is forgiven.
    (2, "xxx...x...", [16, 8, 4, 4, 4, 8, 8, 8, 8, 16]),
    # What is forgiven is not refilled by good steps that do not double.
    (2, "x..x..x", [16, 16, 16, 8, 8, 8, 4]),
    (3, "xxxx", [16, 16, 8, 4]),
    # A full window counts from the last overflow, and every further one of the same length doubles.
    (1, "..x.....", [16, 16, 8, 8, 8, 16, 16, 16]),
    (2, "......", [16, 16, 32, 32, 32, 64]),
])
def test_the_scale_follows_deepspeeds_rule(hysteresis: int, overflows: str, expected: list[float]) -> None:
    config = _fp16(initial_scale_power=4, loss_scale_window=3, hysteresis=hysteresis)
    assert _trace(LossScale(config), overflows) == expected


def test_the_scale_stops_at_its_floor_and_rises_from_it() -> None:
    config = _fp16(initial_scale_power=2, hysteresis=1, min_loss_scale=2.0, loss_scale_window=2)
    assert _trace(LossScale(config), "xxxx..") == [2, 2, 2, 2, 2, 4]


def test_defaults_of_the_scale() -> None:
    scale = LossScale(_fp16())
    assert scale.value == 65536
    assert _trace(scale, "." * 1000)[-2:] == [65536, 131072]


def test_a_static_scale_never_moves() -> None:
    scale = LossScale(_fp16(loss_scale=128.0))
    assert scale.value == 128
    assert _trace(scale, "x.x." * 3) == [128] * 12
    assert scale.checks_overflow


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_are_not_scaled(precision: str) -> None:
    scale = LossScale(TrainConfig.model_validate({"precision": precision, "loss_scale": 128.0}))
    loss = torch.tensor(3.0)
    assert scale.value == 1
    assert scale.apply(loss) is loss
    assert not scale.checks_overflow


def test_a_floor_above_the_first_scale_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="min_loss_scale 32") as caught:
        initialize(perceptron(), config=_fp16(initial_scale_power=4, min_loss_scale=32.0))
    assert caught.value.fields == ("min_loss_scale", "initial_scale_power")


@pytest.mark.parametrize("overflows", ["..x....", "x..x.", "xx...x."])
def test_a_restored_scale_continues_its_trace(overflows: str) -> None:
    config = _fp16(initial_scale_power=4, loss_scale_window=3)
    whole = _trace(LossScale(config), overflows)
    for place in range(len(overflows)):
        first, second = LossScale(config), LossScale(config)
        trace = _trace(first, overflows[:place])
        second.load_state(first.state())
        assert trace + _trace(second, overflows[place:]) == whole


# --- overflows that nothing helps against ----------------------------------------------------------------------------


@pytest.mark.parametrize("config", [_fp16(initial_scale_power=0), _fp16(loss_scale=8.0)], ids=["floor", "static"])
def test_overflows_in_vain_are_given_up_after_a_hundred(config: TrainConfig) -> None:
    scale = LossScale(config)
    _trace(scale, "x" * 99 + "." + "x" * 99)
    with pytest.raises(FloatingPointError, match="100 steps in a row at loss scale"):
        scale.update(overflow=True)


def test_overflows_while_the_scale_can_fall_do_not_count() -> None:
    scale = LossScale(_fp16(initial_scale_power=32, hysteresis=1))
    _trace(scale, "x" * (32 + 99))
    assert scale.value == 1
    with pytest.raises(FloatingPointError):
        scale.update(overflow=True)


def _never_finite(stage: int) -> tuple[int, bool, str]:
    trainer = start(Setup(perceptron, _fp16(zero_stage=stage, initial_scale_power=1, hysteresis=1)))
    before = trainer.consolidated_state_dict()
    message = ""
    for _ in range(200):
        (inputs, target), = micro_batches(0, accumulation=1)
        loss = loss_of(trainer(inputs), target)
        trainer.backward(loss * float("inf") if trainer.rank == 1 else loss)
        try:
            trainer.step()
        except FloatingPointError as error:
            message = str(error)
            break
    after = trainer.consolidated_state_dict()
    skipped = trainer.skipped_steps
    trainer.close()
    return skipped, all(torch.equal(before[name], value) for name, value in after.items()), message


@stages
def test_training_that_overflows_for_ever_ends_on_all_ranks_at_once(ranks: RanksOf, stage: int) -> None:
    for skipped, unchanged, message in ranks(2).run(_never_finite, stage):
        assert skipped == 101  # one more took the scale to its floor
        assert unchanged
        assert message.startswith("gradients were not finite in 100 steps in a row at loss scale 1,")


# --- skipped steps ---------------------------------------------------------------------------------------------------


def _state_of(trainer: Trainer) -> list[Tensor]:
    """Copies of all that a step changes: masters, what the module computes with, and the optimizer's states."""
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    module = [*trainer.module.parameters()] if trainer.config.zero_stage < 3 else []
    masters = [part.master for part in trainer._update.parts]
    return [torch.as_tensor(value).detach().clone() for value in (*masters, *module, *states)]


def _with_overflows(config: TrainConfig, optimizer: Optimizer, overflowing: tuple[int, ...]) -> dict[str, Any]:
    """Trains six steps; at the given ones, the last rank's gradients of the first micro-batch are infinite."""
    trainer = start(Setup(perceptron, config, optimizer))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, gamma=0.5)
    record: dict[str, Any] = {"rate": trainer.optimizer.param_groups[0]["lr"], "results": [],
                              "weights": [], "rates": [], "kept": [], "counts": []}
    for step in range(6):
        before = _state_of(trainer)
        for number, (inputs, target) in enumerate(micro_batches(step, accumulation=config.gradient_accumulation_steps)):
            loss = loss_of(trainer(inputs), target) * SMALL
            overflows = step in overflowing and number == 0 and trainer.rank == trainer.data_parallel_size - 1
            trainer.backward(loss * float("inf") if overflows else loss)
            result = trainer.step()
        if result.applied:
            scheduler.step()
        after = _state_of(trainer)
        record["kept"].append(len(before) == len(after) and all(map(torch.equal, before, after)))
        record["results"].append(result)
        record["rates"].append(trainer.optimizer.param_groups[0]["lr"])
        record["counts"].append((trainer.steps, trainer.skipped_steps))
        record["weights"].append(trainer.consolidated_state_dict())
    trainer.close()
    return record


def _reference_without(optimizer: Optimizer, overflowing: tuple[int, ...]) -> list[Weights]:
    """fp32 weights of a run that never sees the overflowing steps, its rate halving at each step."""
    model = built(perceptron)
    torch_optimizer = plain_optimizer(optimizer, list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(torch_optimizer, gamma=0.5)
    history = []
    for step in range(6):
        if step not in overflowing:
            inputs, target = samples(step)
            torch_optimizer.zero_grad()
            (loss_of(model(inputs), target) * SMALL).backward()
            torch_optimizer.step()
            scheduler.step()
        history.append({name: value.clone() for name, value in model.state_dict().items()})
    return history


@stages
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW, sign_momentum], ids=["momentum", "adamw", "own"])
@pytest.mark.parametrize(("overflowing", "scales"), [
    ((1, 2), [65536, 65536, 65536, 32768, 32768, 32768]), ((0, 2, 3), [65536, 65536, 65536, 32768, 16384, 16384])])
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all_and_leaves_no_trace(
        ranks: RanksOf, stage: int, world_size: int, optimizer: Optimizer, overflowing: tuple[int, ...],
        scales: list[float]) -> None:
    records = ranks(world_size).run(_with_overflows, _fp16(zero_stage=stage), optimizer, overflowing)
    for record in records:
        skipped = [step in overflowing for step in range(6)]
        assert [result.applied for result in record["results"]] == [not skip for skip in skipped]
        assert record["kept"] == skipped
        assert record["counts"] == [(step + 1 - sum(skipped[:step + 1]), sum(skipped[:step + 1])) for step in range(6)]
        assert [result.grad_norm is None for result in record["results"]] == skipped
        assert [result.loss_scale for result in record["results"]] == scales
        rates = [record["rate"] / 2 ** steps for steps, _ in record["counts"]]  # moved at applied steps alone
        assert record["rates"] == pytest.approx(rates)
    assert_same_weights([record["weights"] for record in records], _reference_without(optimizer, overflowing),
                        atol=3e-2, rtol=1e-2)


@stages
@pytest.mark.parametrize("change", [{"offload_optimizer_ratio": 0.3}, {"offload_optimizer_ratio": 1.0},
                                    {"gradient_accumulation_steps": 3}, {"gradient_clipping": 0.001},
                                    {"reduce_dtype": "fp32", "loss_scale": 1024.0}])
def test_no_way_of_training_lets_a_trace_through(ranks: RanksOf, stage: int, change: dict[str, Any]) -> None:
    for record in ranks(2).run(_with_overflows, _fp16(zero_stage=stage, **change), ADAMW, (0, 3)):
        assert record["kept"] == [True, False, False, True, False, False]
        assert [result.applied for result in record["results"]] == [False, True, True, False, True, True]
        norms = [result.grad_norm for result in record["results"]]
        assert norms[0] is None
        assert all(0 < norm < 1 for norm in norms[1:3])


# --- unscaling -------------------------------------------------------------------------------------------------------


def _under_scale(config: TrainConfig) -> tuple[list[Weights], list[float | None], list[float]]:
    trainer = start(Setup(perceptron, config, MOMENTUM))
    weights, norms, scales = [], [], []
    for step in range(6):
        for inputs, target in micro_batches(step, accumulation=config.gradient_accumulation_steps):
            trainer.backward(loss_of(trainer(inputs), target) * SMALL)
            result = trainer.step()
        weights.append(trainer.consolidated_state_dict())
        norms.append(result.grad_norm)
        scales.append(result.loss_scale)
    trainer.close()
    return weights, norms, scales


@stages
@pytest.mark.parametrize("change", [{}, {"gradient_accumulation_steps": 2}, {"gradient_clipping": 0.002},
                                    {"offload_optimizer_ratio": 0.3}])
def test_a_growing_scale_changes_neither_norm_nor_update(ranks: RanksOf, stage: int, change: dict[str, Any]) -> None:
    growing = ranks(2).run(_under_scale, _fp16(zero_stage=stage, initial_scale_power=12, loss_scale_window=2, **change))
    fixed = ranks(2).run(_under_scale, _fp16(zero_stage=stage, loss_scale=4096.0, **change))
    for (weights, norms, scales), (expected, their_norms, their_scales) in zip(growing, fixed, strict=True):
        assert scales == [4096, 4096, 8192, 8192, 16384, 16384]
        assert their_scales == [4096] * 6
        assert norms == pytest.approx(their_norms, rel=1e-3)
        assert_same_weights([weights], expected)


@stages
def test_the_norm_is_that_of_the_unscaled_mean_gradient(ranks: RanksOf, stage: int) -> None:
    model = built(perceptron)
    inputs, target = samples(0)
    (loss_of(model(inputs), target) * SMALL).backward()
    expected = torch.linalg.vector_norm(torch.cat([parameter.grad.flatten() for parameter in model.parameters()
                                                   if parameter.grad is not None]))
    for scale in (1.0, 1024.0):
        config = _fp16(zero_stage=stage, loss_scale=scale, gradient_accumulation_steps=2)
        for _, norms, _ in ranks(3).run(_under_scale, config):
            assert norms[0] == pytest.approx(float(expected), rel=1e-2)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def _scales(config: TrainConfig, overflows: str, path: Path, save_at: int | None) -> list[float]:
    """The scale after each step, from the checkpoint where there is one."""
    trainer = start(Setup(perceptron, config))
    if save_at is None:
        trainer.load_checkpoint(path)
    scales = []
    for position, kind in enumerate(overflows):
        if position == save_at:
            trainer.save_checkpoint(path)
        (inputs, target), = micro_batches(position, accumulation=1)
        loss = loss_of(trainer(inputs), target) * SMALL
        trainer.backward(loss * float("inf") if kind == "x" else loss)
        trainer.step()
        scales.append(trainer.loss_scale)
    trainer.close()
    return scales


@stages
@pytest.mark.parametrize(("overflows", "save_at"), [("...", 2), ("...x...", 2), ("x.x...", 1), ("xx...x", 5)])
def test_training_resumes_with_the_scale_where_it_was(ranks: RanksOf, tmp_path: Path, stage: int, overflows: str,
                                                      save_at: int) -> None:
    config = _fp16(zero_stage=stage, initial_scale_power=4, loss_scale_window=3)
    whole = ranks(2).run(_scales, config, overflows, tmp_path / "c", save_at)
    assert whole == [_trace(LossScale(config), overflows)] * 2
    assert ranks(2).run(_scales, config, overflows[save_at:], tmp_path / "c", None) == [whole[0][save_at:]] * 2


@pytest.mark.parametrize(("saved", "loaded", "scale"), [
    (TrainConfig(precision="bf16"), _fp16(initial_scale_power=10), 1024),
    (_fp16(loss_scale=8.0), _fp16(initial_scale_power=10), 1024),
    (_fp16(initial_scale_power=6), _fp16(loss_scale=8.0), 8),
    (_fp16(initial_scale_power=6), TrainConfig(precision="bf16"), 1),
    (_fp16(initial_scale_power=6), _fp16(initial_scale_power=10), 64),
])
def test_a_checkpoint_of_another_scaling_leaves_the_scale_as_configured(
        ranks: RanksOf, tmp_path: Path, saved: TrainConfig, loaded: TrainConfig, scale: float) -> None:
    ranks(1).run(_scales, saved, ".", tmp_path / "c", 0)
    assert ranks(1).run(_scales, loaded, ".", tmp_path / "c", None) == [[scale]]
