"""16-bit training: masters, loss scaling, norms, accumulation, buffers."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import OptimizerConfig, TrainConfig
from engine.precision import DTYPES
from engine.trainer import initialize
from tests.engine.training import (
    FEATURES,
    GLOBAL_BATCH,
    Awkward,
    RanksOf,
    Setup,
    Weights,
    assert_same_weights,
    built,
    perceptron,
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


def _layer_norm_descends(config: TrainConfig, lr: float, steps: int) -> tuple[float, float]:
    """The master weight after so many steps down a gradient of 1, and what the module computes with then."""
    model = nn.LayerNorm(FEATURES, bias=False)
    trainer = initialize(model, config=config, optimizer=OptimizerConfig(name="sgd", lr=lr))
    direction = torch.tensor([1.0, -1.0] * (FEATURES // 2))  # layer norm leaves it as it is
    for _ in range(steps):
        trainer.backward((trainer(direction) * direction).float().sum())
        trainer.step()
    compute = trainer(direction).detach()[0]
    master = trainer.consolidated_state_dict()["weight"][0]
    trainer.close()
    return float(master), float(compute)


@stages
@pytest.mark.parametrize(("world_size", "steps", "change"), [
    (1, 1000, {"precision": "bf16"}), (2, 100, {"precision": "bf16", "offload_optimizer_ratio": 1.0}),
    (2, 100, {"precision": "fp16"})])
def test_updates_below_half_an_ulp_add_up_in_the_master(ranks: RanksOf, stage: int, world_size: int, steps: int,
                                                        change: dict[str, Any]) -> None:
    config = TrainConfig.model_validate({"zero_stage": stage, "loss_scale": 1.0, **change})
    lr = 6e-4 if config.precision == "bf16" else 1e-4
    for master, compute in ranks(world_size).run(_layer_norm_descends, config, lr, steps):
        assert master == pytest.approx(1 - steps * lr, abs=1e-3 * steps / 1000)
        assert compute == float(torch.tensor(master).to(DTYPES[config.precision]))


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def _accumulates_ones(config: TrainConfig) -> float:
    trainer = start(Setup(OneWeight, config, OptimizerConfig(name="sgd", lr=1.0)))
    for _ in range(config.gradient_accumulation_steps):
        trainer.backward(trainer(torch.ones(1)).sum())
        trainer.step()
    weight = float(trainer.consolidated_state_dict()["weight"])
    trainer.close()
    return weight


@stages
@pytest.mark.parametrize(("world_size", "precision", "times"), [(1, "bf16", 1024), (1, "fp16", 2100), (2, "bf16", 270)])
def test_hundreds_of_equal_small_gradients_are_not_lost(ranks: RanksOf, stage: int, world_size: int, precision: str,
                                                        times: int) -> None:
    """Ones added up in bf16 stop at 256, in fp16 at 2048."""
    config = TrainConfig.model_validate({"precision": precision, "zero_stage": stage, "loss_scale": 1.0,
                                         "gradient_accumulation_steps": times})
    assert ranks(world_size).run(_accumulates_ones, config)[0] == pytest.approx(-1.0, abs=1e-6)


class Huge(nn.Module):
    """Every one of its 100,000 gradient elements is 500."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100_000))

    def forward(self, scale: Tensor) -> Tensor:
        return (self.weight * scale).sum()


def _huge_norm(stage: int, precision: str) -> tuple[float | None, bool, float]:
    config = TrainConfig.model_validate({"zero_stage": stage, "precision": precision, "gradient_clipping": 1.0,
                                         "loss_scale": 1.0})
    trainer = start(Setup(Huge, config, OptimizerConfig(name="sgd", lr=1.0)))
    trainer.backward(trainer(torch.full((1,), 500.0)).float())
    result = trainer.step()
    moved = float(trainer.consolidated_state_dict()["weight"].double().norm())
    trainer.close()
    return result.grad_norm, result.applied, moved


@stages
@pytest.mark.parametrize(("world_size", "precision"), [(2, "bf16"), (2, "fp16"), (3, "fp16")])
def test_norm_of_large_sixteen_bit_gradients_is_finite(ranks: RanksOf, stage: int, world_size: int,
                                                       precision: str) -> None:
    for norm, applied, moved in ranks(world_size).run(_huge_norm, stage, precision):
        assert applied
        assert norm == pytest.approx(500 * math.sqrt(100_000), rel=1e-3)
        assert moved == pytest.approx(1.0, rel=1e-3)


class Vast(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6_000_000))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def _norm_of_millions(precision: str) -> tuple[float, float | None]:
    config = TrainConfig.model_validate({"precision": precision, "gradient_clipping": 1.0, "loss_scale": 1.0})
    trainer = start(Setup(Vast, config, OptimizerConfig(name="sgd", lr=1.0)))
    gradient = torch.randn(6_000_000).to(next(trainer.module.parameters()).dtype)
    trainer.backward(trainer(gradient).float().sum())
    norm = trainer.step().grad_norm
    trainer.close()
    return float(torch.linalg.vector_norm(gradient.double())), norm


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_norm_of_millions_of_elements_is_not_rounded_away(ranks: RanksOf, precision: str) -> None:
    (expected, norm), = ranks(1).run(_norm_of_millions, precision)
    assert norm == pytest.approx(expected, rel=2e-5)


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
