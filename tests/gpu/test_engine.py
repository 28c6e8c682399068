"""The engine on one accelerator: every stage, precision, offload ratio and checkpointing choice trains as plain torch.

One device is enough: at world size 1 the streams, events, pinned buffers and fused kernels are those of many.
"""

import gc

import pytest
import torch

from engine import OptimizerConfig, TrainConfig, initialize
from tests.engine.training import GLOBAL_BATCH, Awkward, Setup, Tower, Weights, built, loss_of, reference, samples

STEPS = 5
ADAMW = OptimizerConfig(lr=0.01, weight_decay=0.1)


def train_on(device: torch.device, config: TrainConfig, build: type[torch.nn.Module] = Awkward) -> list[Weights]:
    """The weights after every step, on the CPU."""
    trainer = initialize(built(build), config=config, optimizer=ADAMW)
    assert trainer.device.type == device.type
    size = GLOBAL_BATCH // config.gradient_accumulation_steps
    history = []
    for step in range(STEPS):
        inputs, target = (tensor.to(device) for tensor in samples(step))
        for first in range(0, GLOBAL_BATCH, size):
            loss = loss_of(trainer(inputs[first:first + size]), target[first:first + size])
            trainer.backward(loss)
            trainer.step()
        history.append({name: value.cpu() for name, value in trainer.consolidated_state_dict().items()})
    trainer.close()
    return history


def assert_close(history: list[Weights], expected: list[Weights], *, atol: float, rtol: float) -> None:
    for ours, theirs in zip(history, expected, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, atol=atol, rtol=rtol, check_dtype=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("clipping", [0.0, 0.3])
def test_fp32_trains_as_plain_torch(device: torch.device, stage: int, offload: float, clipping: float) -> None:
    config = TrainConfig(zero_stage=stage, offload_optimizer_ratio=offload, gradient_clipping=clipping,
                         gradient_accumulation_steps=2, reduce_bucket_size=150)
    assert_close(train_on(device, config), reference(Setup(Awkward, config, ADAMW)), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_sixteen_bit_follows_the_fp32_masters(device: torch.device, stage: int, precision: str, offload: float) -> None:
    config = TrainConfig.model_validate({"zero_stage": stage, "precision": precision, "gradient_clipping": 1.0,
                                         "offload_optimizer_ratio": offload, "initial_scale_power": 10})
    assert_close(train_on(device, config), reference(Setup(Awkward, config, ADAMW)), atol=3e-2, rtol=5e-2)


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("stage", [0, 3])
def test_checkpointing_changes_nothing(device: torch.device, checkpointing: str, stage: int) -> None:
    config = TrainConfig.model_validate({"zero_stage": stage, "activation_checkpointing": checkpointing})
    plain = config.model_copy(update={"activation_checkpointing": "none"})
    assert_close(train_on(device, config, Tower), train_on(device, plain, Tower), atol=1e-6, rtol=1e-5)


def test_parameters_offloaded_to_the_host_train_the_same(device: torch.device) -> None:
    config = TrainConfig(zero_stage=3, offload_param=True, offload_optimizer_ratio=1.0)
    plain = TrainConfig(zero_stage=3)
    assert_close(train_on(device, config), train_on(device, plain), atol=1e-5, rtol=1e-4)


def allocated_in_training(device: torch.device, config: TrainConfig) -> tuple[int, int]:
    """Bytes allocated between steps, and those of optimizer states and masters, wherever they are."""
    gc.collect()
    before = torch.accelerator.memory_allocated(device)
    trainer = initialize(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))), config=config)
    for _ in range(2):
        trainer.backward(trainer(torch.ones(2, 1024, device=device)).float().mean())
        trainer.step()
    torch.accelerator.synchronize(device)
    allocated, states = torch.accelerator.memory_allocated(device) - before, trainer.state_bytes().optimizer
    trainer.close()
    return allocated, states


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
def test_the_device_loses_its_ratio_of_the_states(device: torch.device, precision: str, ratio: float) -> None:
    config = TrainConfig.model_validate({"precision": precision, "reduce_bucket_size": 2**20})
    kept, states = allocated_in_training(device, config)
    offloaded, _ = allocated_in_training(device, config.model_copy(update={"offload_optimizer_ratio": ratio}))
    assert kept - offloaded == pytest.approx(ratio * states, rel=0.03)
