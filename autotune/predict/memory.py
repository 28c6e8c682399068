"""Peak bytes of one rank, by term.

Model states follow the ZeRO paper (arXiv 1910.02054, section 5): with Psi trainable parameters on W ranks, stage 1
divides the optimizer states by W, stage 2 the gradients as well, stage 3 the parameters as well. A shard is rounded
up, so that the shards of all ranks together are never less than one full copy. Activations are measured, not
estimated (`ModelProfile`).
"""

from dataclasses import dataclass

from engine.config import OptimizerConfig, TrainConfig
from engine.profile import ModelProfile
from engine.values import BYTES_PER_ELEMENT

MASTER_BYTES = 4
"""fp32 master weights and optimizer states."""


@dataclass(frozen=True, kw_only=True)
class MemoryTerms:
    """Bytes by term; the terms of each place sum to its peak."""

    device: dict[str, int]
    host: dict[str, int]


def memory_terms(model: ModelProfile, optimizer: OptimizerConfig, config: TrainConfig, world_size: int) -> MemoryTerms:
    """Peak bytes of the rank that holds most.

    Raises:
        KeyError: the profile lacks the activations of this checkpointing and precision.
    """
    compute_bytes = BYTES_PER_ELEMENT[config.precision]
    parameters = compute_bytes * (shard(model.parameters, world_size) if config.zero_stage >= 3 else model.parameters)
    gradients = compute_bytes * (shard(model.trainable_parameters, world_size) if config.zero_stage >= 2
                                 else model.trainable_parameters)
    states = optimizer_bytes(model, optimizer, config, world_size)
    host_share = config.offload_optimizer_ratio
    host_states = round(states * host_share)
    activation = model.activation(config.activation_checkpointing, config.precision)
    device = {
        "parameters": 0 if config.offload_param else parameters,
        "gradients": gradients,
        "optimizer": states - host_states,
        "model_buffers": model.buffer_bytes,
        "buckets": bucket_bytes(model, config, world_size),
        "gathered": gathered_bytes(model, config, world_size),
        "activations": activation.fixed + config.micro_batch_size * activation.saved_per_sample,
        "workspace": config.micro_batch_size * max(activation.peak_per_sample - activation.saved_per_sample, 0),
    }
    host = {
        "parameters": parameters if config.offload_param else 0,
        "gradients": round(host_share * MASTER_BYTES * owned(model, config, world_size)),
        "optimizer": host_states,
    }
    return MemoryTerms(device=device, host=host)


def shard(elements: int, world_size: int) -> int:
    """Elements of the largest of `world_size` shards, padding included."""
    return -(-elements // world_size)


def owned(model: ModelProfile, config: TrainConfig, world_size: int) -> int:
    """Elements whose optimizer states this rank keeps."""
    return shard(model.trainable_parameters, world_size) if config.zero_stage >= 1 else model.trainable_parameters


def states_per_parameter(optimizer: OptimizerConfig) -> int:
    """Optimizer states of the size of a parameter, master weights not counted."""
    match optimizer.name:
        case "sgd":
            return 1 if optimizer.momentum else 0
        case "rmsprop":
            return 2 if optimizer.momentum else 1
        case "adagrad":
            return 1
        case _:
            return 2


def optimizer_bytes(model: ModelProfile, optimizer: OptimizerConfig, config: TrainConfig, world_size: int) -> int:
    """States and, where the optimizer works in another precision than the model, master weights; device and host."""
    in_fp32 = config.optimizer_precision == "fp32"
    state_bytes = MASTER_BYTES if in_fp32 else BYTES_PER_ELEMENT[config.precision]
    per_element = state_bytes * states_per_parameter(optimizer)
    if in_fp32 and config.precision != "fp32":
        per_element += MASTER_BYTES
    return per_element * owned(model, config, world_size)


def bucket_bytes(model: ModelProfile, config: TrainConfig, world_size: int) -> int:
    """Buffers that communication needs beside gradients and parameters: none on one rank.

    A bucket is never larger than what goes through it. With overlap a second reduce bucket fills while the first is
    under way.
    """
    if world_size == 1:
        return 0
    compute_bytes = BYTES_PER_ELEMENT[config.precision]
    reduce_elements = min(config.reduce_bucket_size, model.trainable_parameters)
    reduce = reduce_elements * BYTES_PER_ELEMENT[config.reduce_dtype]
    if config.zero_stage == 0:
        return reduce if config.reduce_dtype != config.precision else 0
    total = reduce * (2 if config.overlap_comm else 1)
    if config.zero_stage in (1, 2):
        total += min(config.allgather_bucket_size, model.trainable_parameters) * compute_bytes
    return total


def gathered_bytes(model: ModelProfile, config: TrainConfig, world_size: int) -> int:
    """Stage 3: full parameters that exist for the time of their use: the block in use and those gathered ahead."""
    if config.zero_stage < 3 or (world_size == 1 and not config.offload_param):
        return 0
    blocks = model.block_count * model.block_parameters
    in_use = max(model.block_parameters, model.largest_parameter, model.parameters - blocks)
    ahead = min(config.prefetch_bucket_size, model.parameters - in_use) if world_size > 1 else 0
    return (in_use + max(ahead, 0)) * BYTES_PER_ELEMENT[config.precision]
