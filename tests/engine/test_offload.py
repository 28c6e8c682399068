"""Optimizer states and parameters on the host, at any ratio."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine import OptimizerConfig, TrainConfig
from engine.offload import DirectTransfers, HostMemory
from engine.report import StateBytes
from tests.engine.test_optimizers import sign_momentum
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
    stages,
    start,
    train,
    wide,
)


@stages
@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_optimizer_trains_the_same(ranks: RanksOf, stage: int, ratio: float, precision: str) -> None:
    config = TrainConfig.model_validate({"zero_stage": stage, "offload_optimizer_ratio": ratio, "precision": precision,
                                         "gradient_clipping": 0.3, "reduce_bucket_size": 150})
    setup = Setup(Awkward, config)
    histories = ranks(2).run(train, setup)
    on_device = ranks(2).run(train, Setup(Awkward, config.model_copy(update={"offload_optimizer_ratio": 0.0})))
    for ours, theirs in zip(histories[0], on_device[0], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    if precision == "fp32":
        assert_same_weights(histories, reference(setup))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_offloaded_parameters_train_the_same(ranks: RanksOf, precision: str, ratio: float) -> None:
    config = TrainConfig.model_validate({"zero_stage": 3, "offload_param": True, "offload_optimizer_ratio": ratio,
                                         "precision": precision})
    setup = Setup(Awkward, config)
    histories = ranks(3).run(train, setup)
    resident = ranks(3).run(train, Setup(Awkward, config.model_copy(update={"offload_param": False})))
    for ours, theirs in zip(histories[1], resident[1], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@dataclass(frozen=True)
class Held:
    """What a rank holds after two steps.

    Attributes:
        host, peak_host: bytes on the host, with buffers.
        owned: elements whose states the rank has.
        largest: elements of the largest run of them in one bucket on the host.
    """

    state: StateBytes
    host: int
    peak_host: int
    owned: int
    largest: int


def _held(config: TrainConfig) -> Held:
    trainer = start(Setup(wide, config))
    for step in range(2):
        run_step(trainer, step)
    owned = sum(trainer._stage.parameters(bucket).numel() for bucket in trainer._stage.buckets)
    largest = max((part.master.numel() for part in trainer._update.parts if part.on_host), default=0)
    result = Held(trainer.state_bytes(), trainer.host_bytes, trainer.peak_host_bytes, owned, largest)
    trainer.close()
    return result


@stages
@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize(("precision", "on_device"), [("fp32", 8), ("bf16", 12)])
def test_the_host_takes_its_ratio_of_the_states(ranks: RanksOf, stage: int, ratio: float, precision: str,
                                                on_device: int) -> None:
    """Two moments and a master, which on the device are the parameters themselves where both are fp32."""
    config = TrainConfig.model_validate({"zero_stage": stage, "offload_optimizer_ratio": ratio, "precision": precision,
                                         "reduce_bucket_size": 30_000})
    for held in ranks(2).run(_held, config):
        padding = 0.02 * 12 * held.owned  # has masters only
        device = held.state.optimizer - held.state.host
        assert device == pytest.approx(on_device * held.owned * (1 - ratio), abs=padding)
        assert held.state.host == pytest.approx(12 * held.owned * ratio, abs=padding)
        converted = 4 * held.largest if precision == "bf16" else 0
        assert held.host == held.state.host + converted
        assert held.peak_host >= held.host


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("precision", "parameter", "state"), [("fp32", 4, 8), ("bf16", 2, 12)])
def test_offloaded_parameters_are_counted_on_the_host(ranks: RanksOf, precision: str, parameter: int, state: int,
                                                      ratio: float) -> None:
    """In the optimizer's dtype they are its masters there."""
    config = TrainConfig.model_validate({"zero_stage": 3, "offload_param": True, "precision": precision,
                                         "offload_optimizer_ratio": ratio})
    held = ranks(2).run(_held, config)[0]
    assert held.state.parameters == parameter * held.owned
    assert held.state.host == pytest.approx((parameter + state * ratio) * held.owned, rel=0.02)
    assert held.state.optimizer == pytest.approx((12 * (1 - ratio) + state * ratio) * held.owned, rel=0.02)
    assert held.host == held.state.host + (4 * held.largest if precision == "bf16" else 0)


def _clipped_step(stage: int, ratio: float) -> tuple[float, float | None]:
    setup = Setup(_steep, TrainConfig(zero_stage=stage, offload_optimizer_ratio=ratio, gradient_clipping=1.0),
                  OptimizerConfig(name="sgd", lr=1.0))
    trainer = start(setup)
    before = trainer.consolidated_state_dict()
    (inputs, _), = micro_batches(0, accumulation=1)
    trainer.backward(trainer(torch.ones_like(inputs)).mean() * 10 / FEATURES**0.5)
    norm = trainer.step().grad_norm
    after = trainer.consolidated_state_dict()
    trainer.close()
    return float(torch.stack([(after[name] - before[name]).norm() for name in before]).norm()), norm


def _steep() -> nn.Module:
    return nn.Linear(FEATURES, 1, bias=False)


@stages
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_the_host_updates_with_the_clipped_gradient(ranks: RanksOf, stage: int, ratio: float) -> None:
    for moved, norm in ranks(2).run(_clipped_step, stage, ratio):
        assert norm == pytest.approx(10.0, rel=1e-5)
        assert moved == pytest.approx(1.0, rel=1e-5)


class ReusedBuffers(DirectTransfers):
    """Fetches into as many buffers as were asked for, in turn, as from an accelerator."""

    def __init__(self, host: HostMemory, *, in_use: int, upcoming: int) -> None:
        super().__init__(host, in_use=in_use)
        self._buffers = [torch.empty(0)] * (in_use + upcoming)
        self._fetched = 0

    def fetch(self, source: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        number = self._fetched % len(self._buffers)
        self._fetched += 1
        if self._buffers[number].numel() < source.numel():
            self._buffers[number] = torch.empty_like(source)
        staged = self._buffers[number][:source.numel()]
        staged.copy_(source)
        return super().fetch(staged, dtype)


def _train_through_reused_buffers(setup: Setup) -> list[Weights]:
    with mock.patch("engine.update.make_transfers", lambda _, host, **counts: ReusedBuffers(host, **counts)):
        return train(setup)


@pytest.mark.parametrize("optimizer", [OptimizerConfig(lr=0.01, weight_decay=0.1), sign_momentum])
def test_gradients_on_the_host_stay_until_they_are_used(ranks: RanksOf, optimizer: Optimizer) -> None:
    setup = Setup(Awkward, TrainConfig(offload_optimizer_ratio=1.0, reduce_bucket_size=50), optimizer)
    assert_same_weights(ranks(2).run(_train_through_reused_buffers, setup), reference(setup))


@pytest.mark.parametrize("optimizer", [OptimizerConfig(lr=0.01, weight_decay=0.1), sign_momentum])
def test_converted_gradients_stay_until_they_are_used(ranks: RanksOf, optimizer: Optimizer) -> None:
    config = TrainConfig(precision="bf16", reduce_bucket_size=50)
    offloaded = config.model_copy(update={"offload_optimizer_ratio": 1.0})
    ours = ranks(2).run(_train_through_reused_buffers, Setup(Awkward, offloaded, optimizer))
    assert_same_weights(ours, ranks(2).run(train, Setup(Awkward, config, optimizer))[0], atol=0, rtol=0)


def _divisor_of_kernels() -> list[torch.device]:
    trainer = start(Setup(perceptron, TrainConfig(gradient_accumulation_steps=2)))
    trainer._update._device = torch.device("meta")  # stands for an accelerator
    seen: list[torch.device] = []
    trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.grad_scale.device))
    run_step(trainer, 0)
    trainer.close()
    return seen


def test_fused_kernels_find_their_divisor_on_the_host(ranks: RanksOf) -> None:
    """From a device, torch.optim copies it to the host without waiting: parts on the host would read what was there."""
    assert ranks(1).run(_divisor_of_kernels) == [[torch.device("cpu")]]


class Passes(TorchDispatchMode):
    """Operators that read or write some memory."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._storages = storages

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        views = any(result.alias_info is not None and not result.alias_info.is_write
                    for result in operator._schema.returns)
        given = [tensor for value in arguments for tensor in (value if isinstance(value, list | tuple) else [value])
                 if isinstance(tensor, torch.Tensor)]
        if not views and any(tensor.untyped_storage().data_ptr() in self._storages for tensor in given):
            self.seen.append(operator.__name__)
        return operator(*arguments, **(keywords or {}))


def _passes_over_the_host(config: TrainConfig) -> tuple[list[str], int]:
    """What touches masters and states on the host in a step, and how many buckets there are."""
    trainer = start(Setup(wide, config))
    run_step(trainer, 0)
    (inputs, target), = micro_batches(1, accumulation=1)
    trainer.backward(loss_of(trainer(inputs), target))
    storages = {tensor.untyped_storage().data_ptr() for tensor in trainer._update.state_tensors(on_host=True)
                if tensor.numel() > 1}
    with Passes(storages) as passes:
        trainer.step()
    buckets = len(trainer._stage.buckets)
    trainer.close()
    return passes.seen, buckets


@stages
@pytest.mark.parametrize("change", [{}, {"gradient_clipping": 0.1}, {"precision": "bf16", "gradient_clipping": 0.1},
                                    {"precision": "fp16", "initial_scale_power": 4}])
def test_a_step_passes_once_over_the_states_on_the_host(ranks: RanksOf, stage: int, change: dict[str, Any]) -> None:
    """No check and no norm reads them besides the update itself and the copy to the device."""
    config = TrainConfig.model_validate({"zero_stage": stage, "offload_optimizer_ratio": 1.0,
                                         "reduce_bucket_size": 30_000, **change})
    for seen, buckets in ranks(2).run(_passes_over_the_host, config):
        assert buckets > 2
        assert seen == ["_fused_adamw_.default", "copy_.default"] * buckets


def test_memory_that_cannot_be_pinned_is_used_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def refuse_pinning(*size: int, **options: object) -> torch.Tensor:
        if options.pop("pin_memory", False):
            raise RuntimeError("Cannot access accelerator device when none is available.")
        return real(*size, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", refuse_pinning)
    host = HostMemory(torch.device("cuda"))
    tensor = host.empty(100, torch.float32)
    assert tensor.shape == (100,)
    assert not host.can_pin
    assert host.bytes == 400


def test_scarce_memory_is_not_pinned_where_no_transfer_needs_it() -> None:
    host = HostMemory(torch.device("cuda"))
    host.empty(100, torch.float32, pinned=False)  # would be refused here
    assert host.can_pin
    assert host.bytes == 400


def test_host_memory_remembers_its_peak() -> None:
    host = HostMemory(torch.device("cpu"))
    host.empty(10, torch.float32)
    host.note(also=100)
    host.note()
    assert (host.bytes, host.peak_bytes, host.can_pin) == (40, 140, False)
