"""Seconds of one optimizer step, roughly: good for ranking and for a first guess, not for promises."""

from autotune.predict.memory import owned, states_per_parameter
from engine.config import OptimizerConfig, TrainConfig
from engine.profile import HardwareProfile, ModelProfile
from engine.values import BYTES_PER_ELEMENT

_RECOMPUTE = {"none": 0.0, "selective": 0.1, "full": 1 / 3}
"""Extra operations over forward and backward: full checkpointing repeats the forward pass, a third of them."""

_BACKWARD_SHARE = 2 / 3
_LAUNCH_SECONDS = 3e-6
"""Per operation started; about five operations a parameter tensor, thrice (forward, and twice in backward)."""
_OPERATIONS_PER_TENSOR = 15
_HOST_BYTES_PER_SECOND = 10e9
"""Between an accelerator and its host, and of an optimizer step on the host, where nothing was measured."""


def step_seconds(model: ModelProfile, hardware: HardwareProfile, optimizer: OptimizerConfig,
                 config: TrainConfig) -> float | None:
    """Seconds of one optimizer step over the whole global batch; None where the precision's rate is unknown."""
    rate = hardware.matmul_flops_per_second.get(config.precision)
    if not rate:
        return None
    compute = _compute_seconds(model, config, rate)
    backward = compute * _BACKWARD_SHARE
    communication = _communication_seconds(model, hardware, config)
    hidden = min(communication / 2, backward) if config.overlap_comm else 0.0
    return compute + communication - hidden + _optimizer_seconds(model, hardware, optimizer, config)


def _compute_seconds(model: ModelProfile, config: TrainConfig, rate: float) -> float:
    recompute = _RECOMPUTE[config.activation_checkpointing]
    samples = config.micro_batch_size * config.gradient_accumulation_steps
    operations = samples * model.flops_per_sample * (1 + recompute)
    launches = config.gradient_accumulation_steps * model.parameter_tensors * _OPERATIONS_PER_TENSOR * (1 + recompute)
    return operations / rate + launches * _LAUNCH_SECONDS


def _communication_seconds(model: ModelProfile, hardware: HardwareProfile, config: TrainConfig) -> float:
    """Stages 0 and 1 communicate once per step, 2 and 3 once per micro-batch; an all-reduce is a reduce-scatter and
    an all-gather, so each of these counts half of it (arXiv 1910.02054, section 7)."""
    bandwidth = hardware.allreduce_bytes_per_second
    if hardware.world_size == 1 or not bandwidth:
        return 0.0
    latency = hardware.allreduce_latency_seconds or 0.0
    steps = config.gradient_accumulation_steps
    compute_bytes = BYTES_PER_ELEMENT[config.precision]
    gradient_seconds = model.trainable_parameters * BYTES_PER_ELEMENT[config.reduce_dtype] / bandwidth
    parameter_seconds = model.parameters * compute_bytes / bandwidth
    buckets = _pieces(model.trainable_parameters, config.reduce_bucket_size)
    match config.zero_stage:
        case 0:
            return gradient_seconds + latency * buckets
        case 1 | 2:
            reductions = 1 if config.zero_stage == 1 else steps
            gathers = _pieces(model.trainable_parameters, config.allgather_bucket_size)
            return (reductions * (gradient_seconds / 2 + latency * buckets)
                    + parameter_seconds / 2 + latency * gathers)
        case _:
            gathers = max(model.block_count, 1) + 1
            return steps * (gradient_seconds / 2 + latency * buckets + parameter_seconds + 2 * latency * gathers)


def _pieces(elements: int, bucket: int) -> int:
    return -(-elements // bucket)


def _optimizer_seconds(model: ModelProfile, hardware: HardwareProfile, optimizer: OptimizerConfig,
                       config: TrainConfig) -> float:
    """Reading and writing parameters, gradients and states; offloaded ones also cross to the host and back."""
    elements = owned(model, config, hardware.world_size)
    state_bytes = 4 if config.optimizer_precision == "fp32" else BYTES_PER_ELEMENT[config.precision]
    traffic = elements * state_bytes * (3 + 2 * states_per_parameter(optimizer))
    transfer = 2 * elements * BYTES_PER_ELEMENT[config.precision]
    ratio = config.offload_optimizer_ratio
    host_rate = hardware.copy_bytes_per_second if hardware.device_type == "cpu" else _HOST_BYTES_PER_SECOND
    seconds = traffic * (1 - ratio) / hardware.copy_bytes_per_second + (traffic + transfer) * ratio / host_rate
    if config.offload_param:
        shard_bytes = model.parameters * BYTES_PER_ELEMENT[config.precision] / hardware.world_size
        seconds += (2 * config.gradient_accumulation_steps + 1) * shard_bytes / host_rate
    return seconds
