"""16-bit training: masters, loss scaling, norms, accumulation, buffers."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import OptimizerConfig, TrainConfig
from engine.precision import LossScale
from tests.engine.training import (
    FEATURES,
    GLOBAL_BATCH,
    Awkward,
    RanksOf,
    Setup,
    Weights,
    assert_same_weights,
    built,
    loss_of,
    micro_batches,
    perceptron,
    plain_optimizer,
    reference,
    run_step,
    samples,
    stages,
    start,
    train,
)

MOMENTUM = OptimizerConfig(name="sgd", lr=0.05, momentum=0.9)


@stages
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_sixteen_bit_follows_fp32_within_its_rounding(ranks: RanksOf, stage: int, precision: str,
                                                      accumulation: int) -> None:
    config = TrainConfig.model_validate({"zero_stage": stage, "precision": precision, "initial_scale_power": 8,
                                         "gradient_accumulation_steps": accumulation})
    setup = Setup(Awkward, config, MOMENTUM)
    histories = ranks(2).run(train, setup)
    assert_same_weights(histories, reference(setup), atol=2e-2, rtol=2e-2)
    # Masters are fp32: after a step they are not what 16 bit could hold.
    weight = histories[0][0]["mix.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.to(torch.bfloat16).float())


def _masters_start_exact() -> bool:
    trainer = start(Setup(perceptron, TrainConfig(precision="bf16", zero_stage=2)))
    weights = trainer.consolidated_state_dict()
    original = built(perceptron).state_dict()
    compute = dict(trainer.module.named_parameters())
    exact = all(torch.equal(weights[name], value) for name, value in original.items())
    rounded = all(torch.equal(compute[name].detach(), value.bfloat16()) for name, value in original.items())
    trainer.close()
    return exact and rounded


def test_masters_begin_as_the_models_own_fp32_weights(ranks: RanksOf) -> None:
    assert ranks(2).run(_masters_start_exact) == [True, True]


def _layer_norm_descends() -> tuple[float, float]:
    trainer = start(Setup(lambda: nn.LayerNorm(FEATURES), TrainConfig(precision="bf16"),
                          OptimizerConfig(name="sgd", lr=6e-4)))
    for _ in range(1000):
        trainer.backward(next(iter(trainer.module.parameters())).sum())
        trainer.step()
    master = float(trainer.consolidated_state_dict()["weight"][0])
    compute = float(next(iter(trainer.module.parameters())).detach()[0])
    trainer.close()
    return master, compute


def test_updates_below_half_an_ulp_add_up_in_the_master(ranks: RanksOf) -> None:
    master, compute = ranks(1).run(_layer_norm_descends)[0]
    assert master == pytest.approx(0.4, abs=1e-3)
    assert compute == float(torch.tensor(master).bfloat16())


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def _accumulates_ones(stage: int) -> float:
    trainer = start(Setup(OneWeight, TrainConfig(precision="bf16", zero_stage=stage, gradient_accumulation_steps=1024),
                          OptimizerConfig(name="sgd", lr=1.0)))
    for _ in range(1024):
        trainer.backward(trainer(torch.ones(1)).sum())
        trainer.step()
    weight = float(trainer.consolidated_state_dict()["weight"])
    trainer.close()
    return weight


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (1, 2), (2, 2), (3, 2)])
def test_a_thousand_equal_small_gradients_are_not_lost(ranks: RanksOf, stage: int, world_size: int) -> None:
    assert ranks(world_size).run(_accumulates_ones, stage)[0] == pytest.approx(-1.0, abs=1e-6)


class Huge(nn.Module):
    """Every one of its 100,000 gradient elements is 500."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100_000))

    def forward(self, scale: Tensor) -> Tensor:
        return (self.weight * scale).sum()


def _huge_norm(stage: int, precision: str) -> tuple[float | None, bool]:
    config = TrainConfig.model_validate({"zero_stage": stage, "precision": precision, "gradient_clipping": 1.0,
                                         "loss_scale": 1.0})
    trainer = start(Setup(Huge, config, OptimizerConfig(name="sgd", lr=1.0)))
    trainer.backward(trainer(torch.full((1,), 500.0)).float())
    result = trainer.step()
    trainer.close()
    return result.grad_norm, result.applied


@stages
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_norm_of_large_sixteen_bit_gradients_is_finite(ranks: RanksOf, stage: int, precision: str) -> None:
    for norm, applied in ranks(2).run(_huge_norm, stage, precision):
        assert applied
        assert norm == pytest.approx(500 * math.sqrt(100_000), rel=1e-3)


def _with_overflows(stage: int, optimizer: OptimizerConfig, overflowing: tuple[int, ...],
                    offload: float) -> dict[str, Any]:
    """Trains in fp16, with an infinite gradient on rank 1 (or 0 alone) at the given steps."""
    config = TrainConfig(zero_stage=stage, precision="fp16", initial_scale_power=10, hysteresis=1,
                         offload_optimizer_ratio=offload)
    trainer = start(Setup(perceptron, config, optimizer))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, gamma=0.5)
    record: dict[str, Any] = {"applied": [], "weights": [], "scales": [], "norms": [], "rates": []}
    for step in range(6):
        (inputs, target), = micro_batches(step, accumulation=1)
        loss = loss_of(trainer(inputs), target)
        if step in overflowing and trainer.rank == trainer.data_parallel_size - 1:
            loss = loss * float("inf")
        trainer.backward(loss)
        result = trainer.step()
        if result.applied:
            scheduler.step()
        record["applied"].append(result.applied)
        record["norms"].append(result.grad_norm)
        record["scales"].append(result.loss_scale)
        record["rates"].append(trainer.optimizer.param_groups[0]["lr"])
        record["weights"].append(trainer.consolidated_state_dict())
    record["skipped"] = trainer.skipped_steps
    trainer.close()
    return record


def _reference_without(optimizer: OptimizerConfig, overflowing: tuple[int, ...]) -> list[Weights]:
    """fp32 weights of a run that never sees the overflowing steps, its rate halving at each step."""
    model = built(perceptron)
    torch_optimizer = plain_optimizer(optimizer, list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(torch_optimizer, gamma=0.5)
    history = []
    for step in range(6):
        if step not in overflowing:
            inputs, target = samples(step)
            torch_optimizer.zero_grad()
            loss_of(model(inputs), target).backward()
            torch_optimizer.step()
            scheduler.step()
        history.append({name: value.clone() for name, value in model.state_dict().items()})
    return history


@stages
@pytest.mark.parametrize("optimizer", [MOMENTUM, OptimizerConfig(lr=0.01)], ids=["momentum", "adamw"])
@pytest.mark.parametrize("offload", [0.0, 0.5])
def test_overflow_on_one_rank_skips_the_step_on_all_and_leaves_no_trace(ranks: RanksOf, stage: int,
                                                                        optimizer: OptimizerConfig,
                                                                        offload: float) -> None:
    overflowing = (0, 2)
    records = ranks(2).run(_with_overflows, stage, optimizer, overflowing, offload)
    for record in records:
        assert record["applied"] == [False, True, False, True, True, True]
        assert record["skipped"] == 2
        assert record["norms"][0] is None
        assert record["norms"][1] is not None
        assert record["scales"] == [1024.0, 512.0, 512.0, 256.0, 256.0, 256.0]
        assert record["rates"][-1] == pytest.approx(optimizer.lr / 16)
        before, after = record["weights"][1], record["weights"][2]
        assert all(torch.equal(before[name], after[name]) for name in before)
    atol = 2e-2 if optimizer.name == "sgd" else 3e-2
    assert_same_weights([record["weights"] for record in records], _reference_without(optimizer, overflowing),
                        atol=atol, rtol=1e-2)


def _scale_trace(scale: LossScale, overflows: str) -> list[float]:
    trace = []
    for flag in overflows:
        scale.update(overflow=flag == "x")
        trace.append(scale.value)
    return trace


def test_loss_scale_follows_deepspeeds_rule() -> None:
    config = TrainConfig(precision="fp16", initial_scale_power=4, loss_scale_window=3)
    # Hysteresis 2: the first overflow is forgiven, the next halve; three good steps double and refill it.
    assert _scale_trace(LossScale(config), "xxx...x...") == [16, 8, 4, 4, 4, 8, 8, 8, 8, 16]


def test_loss_scale_stops_at_its_floor() -> None:
    config = TrainConfig(precision="fp16", initial_scale_power=2, hysteresis=1, min_loss_scale=2.0)
    assert _scale_trace(LossScale(config), "xxxx") == [2, 2, 2, 2]


def test_defaults_of_the_loss_scale() -> None:
    scale = LossScale(TrainConfig(precision="fp16"))
    assert scale.value == 65536
    assert _scale_trace(scale, "." * 1000)[-2:] == [65536, 131072]


def test_static_loss_scale_never_moves() -> None:
    scale = LossScale(TrainConfig(precision="fp16", loss_scale=128.0))
    assert scale.value == 128
    assert _scale_trace(scale, "x.x." * 3) == [128] * 12
    assert scale.checks_overflow


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_are_not_scaled(precision: str) -> None:
    scale = LossScale(TrainConfig.model_validate({"precision": precision, "loss_scale": 128.0}))
    loss = torch.tensor(3.0)
    assert scale.value == 1
    assert scale.apply(loss) is loss
    assert not scale.checks_overflow


def test_restored_loss_scale_continues_its_trace() -> None:
    config = TrainConfig(precision="fp16", initial_scale_power=4, loss_scale_window=3, hysteresis=1)
    whole = _scale_trace(LossScale(config), "..x....")
    first, second = LossScale(config), LossScale(config)
    trace = _scale_trace(first, "..x")
    second.load_state(first.state())
    assert trace + _scale_trace(second, "....") == whole


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 6)
        self.norm = nn.BatchNorm1d(6)
        self.leave = nn.Linear(6, 1)
        self.register_buffer("seen", torch.tensor(5, dtype=torch.int64))
        self.register_buffer("factors", torch.Tensor([6]).view(1, -1, 1, 1))
        self.register_buffer("inv_freq", torch.tensor([1e-4]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x)))) * self.factors.flatten()


def _buffers(stage: int, precision: str) -> tuple[dict[str, tuple[torch.dtype, torch.Size]], list[str], bool]:
    constructor = torch.Tensor
    config = TrainConfig.model_validate({"zero_stage": stage, "precision": precision, "initial_scale_power": 4})
    trainer = start(Setup(Normalised, config))
    run_step(trainer, 0)
    buffers = {name: (buffer.dtype, buffer.shape) for name, buffer in trainer.module.named_buffers()}
    weights = trainer.consolidated_state_dict()
    moved = bool((weights["norm.running_mean"] != 0).any())
    strict = Normalised().load_state_dict(weights, strict=True)
    assert not strict.missing_keys
    trainer.close()
    assert torch.Tensor is constructor
    return buffers, list(weights), moved


@stages
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_buffers_keep_type_shape_and_meaning(ranks: RanksOf, stage: int, precision: str) -> None:
    buffers, names, moved = ranks(2).run(_buffers, stage, precision)[0]
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert buffers["seen"] == (torch.int64, torch.Size([]))
    assert buffers["norm.running_mean"] == (torch.float32, torch.Size([6]))
    assert buffers["norm.running_var"] == (torch.float32, torch.Size([6]))
    assert buffers["norm.num_batches_tracked"] == (torch.int64, torch.Size([]))
    assert buffers["factors"] == (compute, torch.Size([1, 1, 1, 1]))
    assert buffers["inv_freq"] == (torch.float32, torch.Size([1]))
    assert names == list(Normalised().state_dict())
    assert moved


def _dtypes(precision: str) -> tuple[torch.dtype, torch.dtype]:
    trainer = start(Setup(perceptron, TrainConfig.model_validate({"precision": precision})))
    output = trainer(samples(0)[0])
    dtypes = next(iter(trainer.module.parameters())).dtype, output.dtype
    trainer.close()
    return dtypes


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_parameters_and_activations_really_have_the_precision(ranks: RanksOf, precision: str) -> None:
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert ranks(1).run(_dtypes, precision) == [(expected, expected)]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reduction_in_another_dtype_rounds_gradients_and_nothing_else(ranks: RanksOf, stage: int) -> None:
    setup = Setup(perceptron, TrainConfig(zero_stage=stage, reduce_dtype="bf16"), MOMENTUM)
    histories, expected = ranks(2).run(train, setup), reference(setup)
    assert_same_weights(histories, expected, atol=1e-2, rtol=1e-2)
    assert any(not torch.allclose(histories[0][0][name], value, atol=1e-6, rtol=1e-5)
               for name, value in expected[0].items())


def _no_masters(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def _compute_precision_loses_small_updates() -> tuple[bool, float]:
    results = []
    for choice in ("compute", "fp32"):
        config = TrainConfig.model_validate({"precision": "bf16", "optimizer_precision": choice, "zero_stage": 1})
        trainer = start(Setup(OneAway, config, _no_masters))
        for _ in range(20):
            trainer.backward(trainer(torch.ones(GLOBAL_BATCH)).sum())
            trainer.step()
        results.append(float(trainer.consolidated_state_dict()["weight"]))
        trainer.close()
    return results[0] == 1.0, results[1]


class OneAway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.mean()


def test_optimizer_in_compute_precision_has_no_masters(ranks: RanksOf) -> None:
    stuck, moved = ranks(2).run(_compute_precision_loses_small_updates)[0]
    assert stuck
    assert moved == pytest.approx(1 - 20 * 1e-4, abs=1e-6)


def _infinite_gradient(stage: int) -> Weights:
    """A step with clipping on a gradient with one infinite element."""
    trainer = start(Setup(OneAway4, TrainConfig(zero_stage=stage, gradient_clipping=1.0),
                          OptimizerConfig(name="sgd", lr=0.1)))
    trainer.backward(trainer(torch.tensor([1.0, math.inf, 2.0, 3.0])).sum())
    trainer.step()
    weights = trainer.consolidated_state_dict()
    trainer.close()
    return weights


class OneAway4(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@stages
def test_clipping_an_infinite_gradient_does_as_torch_does(ranks: RanksOf, stage: int) -> None:
    model = OneAway4()
    model(torch.tensor([1.0, math.inf, 2.0, 3.0])).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for weights in ranks(2).run(_infinite_gradient, stage):
        torch.testing.assert_close(weights["weight"], model.weight.detach(), equal_nan=True)


def _uneven_sums(precision: str) -> float:
    config = TrainConfig.model_validate({"precision": precision, "gradient_accumulation_steps": 3})
    trainer = start(Setup(OneWeight, config, OptimizerConfig(name="sgd", lr=1.0)))
    for value in (256.0, 1.0, 1.0):
        trainer.backward(trainer(torch.full((1,), value)).sum())
        trainer.step()
    weight = float(trainer.consolidated_state_dict()["weight"])
    trainer.close()
    return weight


def test_one_rank_does_not_round_its_sum_to_sixteen_bit(ranks: RanksOf) -> None:
    assert ranks(1).run(_uneven_sums, "bf16") == [pytest.approx(-258 / 3, rel=1e-6)]  # in bf16 256 + 1 is 256
