"""Peak bytes of one rank, by term.

Model states follow the ZeRO paper (arXiv 1910.02054, section 5): with Psi trainable parameters on W ranks, stage 1
divides the optimizer states by W, stage 2 the gradients as well, stage 3 the parameters as well. A shard is rounded
up, so that the shards of all ranks together are never less than one full copy. Activations are measured, not
estimated (`ModelProfile`). Buffers follow what the engine holds: see `reduce_buffer_bytes` and `gather_buffer_bytes`.

With tensor and pipeline parallelism all of this is said of the part of the model that a device holds
(`autotune.predict.parallel`), and the ranks are those that hold the same part.

A step peaks either in the backward pass, with activations and reduction buffers, or in the update, with gathers and
converted gradients; the terms are those of the phase that needs more.
"""

from dataclasses import dataclass

from autotune.predict.parallel import ALONE, Parallel, activation_bytes, hidden_size, outside_blocks
from engine.config import OptimizerConfig, TrainConfig
from engine.process import SINGLE_BLOCK_BYTES
from engine.profile import BackwardPoint, ModelProfile
from engine.values import BYTES_PER_ELEMENT

MASTER_BYTES = 4
"""fp32 master weights and optimizer states."""

_KEPT_BLOCKS = 2

CPU_SCRATCH_BYTES = 3 * 2**20
"""What the CPU's math libraries keep for themselves in 16 bit; measured beyond the tensors of real trials."""

_HEAP_GAPS = 0.5
"""Of the activations, where they lie on the heap; measured were none to all of them."""


@dataclass(frozen=True, kw_only=True)
class MemoryTerms:
    """Bytes by term; the terms of each place sum to its peak."""

    device: dict[str, int]
    host: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a configuration's memory depends on besides itself.

    Attributes:
        model: the part that one device holds.
        world_size: ranks that hold the same part.
        device_is_host: the device's memory is the host's, as on a CPU.
        reads_in_place: ranks read each other's memory where it lies, as the processes of one host do on a CPU.
        whole: the model that `model` is a part of.
    """

    model: ModelProfile
    whole: ModelProfile
    parallel: Parallel
    optimizer: OptimizerConfig
    world_size: int
    device_is_host: bool
    reads_in_place: bool


def memory_terms(situation: Situation, config: TrainConfig) -> MemoryTerms:
    """Peak bytes of the rank that holds most.

    Raises:
        KeyError: the profile lacks the activations of this checkpointing and precision.
    """
    model = situation.model
    parameters = parameter_bytes(model, config, situation.world_size)
    on_device, on_host = optimizer_bytes(situation, config)
    activations, transient, gradients = _backward_peak(situation, config)
    scratch = CPU_SCRATCH_BYTES if situation.device_is_host and config.precision != "fp32" else 0
    reducing, updating = reduce_buffer_bytes(situation, config), gather_buffer_bytes(situation, config)
    all_gradients = max(gradient_bytes(model, config, situation.world_size) - _gradients_in_rooms(situation, config), 0)
    kept = reducing if situation.reads_in_place else 0  # rooms stay
    if kept + updating + all_gradients > reducing + activations + transient + gradients:
        reducing, activations, transient, gradients = kept + updating, 0, 0, all_gradients
    device = {
        "parameters": 0 if config.offload_param else parameters,
        "gradients": gradients,
        "optimizer": on_device,
        "model_buffers": model.buffer_bytes,
        "buckets": reducing,
        "gathered": gathered_bytes(situation, config),
        "activations": activations,
        "workspace": transient + scratch + _heap_gap_bytes(situation, config),
    }
    host = {
        "parameters": parameters if config.offload_param else 0,
        "optimizer": on_host,
        "buckets": staging_bytes(situation, config),
    }
    return MemoryTerms(device=device, host=host)


def _backward_peak(situation: Situation, config: TrainConfig) -> tuple[int, int, int]:
    """(activations, transient, gradients) where their sum is largest. With one micro-batch gradients come as
    activations go; with several, those of the ones before are there from the beginning."""
    gradients = gradient_bytes(situation.model, config, situation.world_size)
    backward = _backward_points(situation, config)
    if not backward:
        return *activation_bytes(situation.whole, config, situation.parallel), gradients
    size, trained = config.micro_batch_size, max(situation.model.trainable_parameters, 1)
    elsewhere = _gradients_in_rooms(situation, config)
    held, total, there = 0, -1, gradients
    for point in backward:
        bytes_then = point.fixed + size * point.per_sample
        gradients_then = gradients if config.gradient_accumulation_steps > 1 else max(
            gradients * point.gradients // trained - elsewhere, 0)
        if bytes_then + gradients_then > total:
            held, there, total = bytes_then, gradients_then, bytes_then + gradients_then
    entry = situation.whole.activation(config.activation_checkpointing, config.precision)
    saved = min(size * entry.saved_per_sample, held)
    return saved, held - saved, there


def _heap_gap_bytes(situation: Situation, config: TrainConfig) -> int:
    """On a CPU, memory of the heap that was activations and is not used, where a block's tensors are so small that they
    lie there: what is freed there is used again by such tensors alone, so that larger gradients need memory beside it.
    """
    model, size = situation.whole, config.micro_batch_size
    between_blocks = size * model.tokens_per_sample * hidden_size(model) * BYTES_PER_ELEMENT[config.precision]
    if not situation.device_is_host or between_blocks >= SINGLE_BLOCK_BYTES:
        return 0
    saved = size * model.activation(config.activation_checkpointing, config.precision).saved_per_sample
    return round(_HEAP_GAPS * saved)


def shard(elements: int, world_size: int) -> int:
    """Elements of the largest of `world_size` shards, padding included."""
    return -(-elements // world_size)


def owned(model: ModelProfile, config: TrainConfig, world_size: int) -> int:
    """Elements whose optimizer states this rank keeps."""
    return shard(model.trainable_parameters, world_size) if config.zero_stage >= 1 else model.trainable_parameters


def parameter_bytes(model: ModelProfile, config: TrainConfig, world_size: int) -> int:
    """Parameters that stay on this rank, device or host."""
    elements = shard(model.parameters, world_size) if config.zero_stage >= 3 else model.parameters
    return elements * BYTES_PER_ELEMENT[config.precision]


def gradient_bytes(model: ModelProfile, config: TrainConfig, world_size: int) -> int:
    """Gradients that are kept until the step. Sums over micro-batches are fp32, whatever the precision.

    Stage 1 keeps whole ones over micro-batches only; with one, each bucket is reduced to a shard once it is there.
    """
    whole = config.zero_stage < 2 and not reduces_at_once(config)
    elements = model.trainable_parameters if whole else shard(model.trainable_parameters, world_size)
    return elements * held_bytes(config)


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


def optimizer_bytes(situation: Situation, config: TrainConfig) -> tuple[int, int]:
    """States and master weights: (device, host) bytes.

    Where dtypes agree, the parameters on the device are their own masters; offloaded masters are always copies.
    """
    elements = owned(situation.model, config, situation.world_size)
    state_bytes = _optimizer_element_bytes(config)
    states = state_bytes * states_per_parameter(situation.optimizer)
    has_masters = config.optimizer_precision == "fp32" and config.precision != "fp32"
    offloaded = round(elements * config.offload_optimizer_ratio)
    return ((elements - offloaded) * (states + (state_bytes if has_masters else 0)),
            offloaded * (states + state_bytes))


def reduce_buffer_bytes(situation: Situation, config: TrainConfig) -> int:
    """What reducing gradients needs beside them: none on one rank.

    With overlap two buckets are under way at once. Each takes its copy in the reduction's dtype, where that is not the
    gradients' own, and what is received; from stage 2 on, where no full gradients are kept, the bucket itself and the
    one being filled come on top, also where that is more buckets than there are: those of the micro-batch before may be
    under way yet; stage 1 with one micro-batch is like that. A bucket is at least the largest parameter and at most the
    model.
    """
    ranks = situation.world_size
    if ranks == 1:
        return 0
    if situation.reads_in_place:
        return _room_bytes(situation, config)
    elements = _bucket_elements(situation.model, config)
    wire = BYTES_PER_ELEMENT[config.reduce_dtype]
    under_way = 2 if config.overlap_comm else 1
    received = 0 if config.zero_stage == 0 else shard(elements, ranks)  # stage 0 reduces in place
    copied = elements if config.zero_stage < 2 and held_bytes(config) != wire else 0
    collected = elements * (under_way + 1) if reduces_at_once(config) else 0
    return wire * (under_way * (received + copied) + collected)


def _room_bytes(situation: Situation, config: TrainConfig) -> int:
    """Of ranks that share memory: rooms for the buckets under way and the one being filled, which are read where they
    lie, and from stage 2 on the sum of one on its way to those of earlier micro-batches.

    Sums over micro-batches in the dtype that is sent lie in rooms themselves, of which there are then as many as
    buckets; the shards that stage 1 makes of them need more: all of them where one bucket is reduced at a time.
    """
    model = situation.model
    wire, held = BYTES_PER_ELEMENT[config.reduce_dtype], held_bytes(config)
    rooms_bytes = _room_elements(model, config) * wire
    if reduces_at_once(config):
        added = config.gradient_accumulation_steps > 1
        return rooms_bytes + (shard(_bucket_elements(model, config), situation.world_size) * held if added else 0)
    if held != wire or _gradients_in_rooms(situation, config):
        return rooms_bytes
    if config.zero_stage == 0:
        return 0
    if config.overlap_comm:
        return rooms_bytes
    return shard(model.trainable_parameters, situation.world_size) * held


def _backward_points(situation: Situation, config: TrainConfig) -> tuple[BackwardPoint, ...]:
    """How activations go as gradients come; empty where it was not seen: then both are there at once."""
    if situation.parallel != ALONE:
        return ()
    return situation.whole.activation(config.activation_checkpointing, config.precision).backward


def _room_elements(model: ModelProfile, config: TrainConfig) -> int:
    """One room for the largest bucket; the others for those of the usual size."""
    usual = max(config.reduce_bucket_size, model.largest_block_parameter or model.largest_parameter)
    others = (2 if config.overlap_comm else 1) * usual
    return min(_bucket_elements(model, config) + others, model.trainable_parameters)


def _gradients_in_rooms(situation: Situation, config: TrainConfig) -> int:
    """Bytes of stage 0's gradients of one micro-batch that lie where they were reduced, and are counted there."""
    if (not situation.reads_in_place or config.zero_stage or config.gradient_accumulation_steps > 1
            or situation.world_size == 1 or not _backward_points(situation, config)):
        return 0
    return _room_elements(situation.model, config) * BYTES_PER_ELEMENT[config.reduce_dtype]


def reduces_at_once(config: TrainConfig) -> bool:
    """Whether no gradients are kept beside the shards and the buckets under way."""
    return config.zero_stage >= 2 or (config.zero_stage == 1 and config.gradient_accumulation_steps == 1)


def gather_buffer_bytes(situation: Situation, config: TrainConfig) -> int:
    """What the update needs: converted gradients of a bucket, but for those converted on the host, and at stages 1 and
    2 gathers through one buffer where ranks share no memory.

    Without overlap one such gather is under way at a time, else all of them.
    """
    model, ranks = situation.model, situation.world_size
    converted = 0
    if held_bytes(config) != _optimizer_element_bytes(config):
        bucket = shard(_bucket_elements(model, config), ranks if config.zero_stage >= 1 else 1)
        converted = round(bucket * (1 - config.offload_optimizer_ratio)) * _optimizer_element_bytes(config)
    in_place = ranks == 1 or situation.reads_in_place or config.zero_stage not in (1, 2)
    if in_place or config.allgather_bucket_size <= config.reduce_bucket_size:
        return converted
    gathered = (model.trainable_parameters if config.overlap_comm
                else min(config.allgather_bucket_size, model.trainable_parameters))
    return converted + gathered * BYTES_PER_ELEMENT[config.precision]


def gathered_bytes(situation: Situation, config: TrainConfig) -> int:
    """Stage 3: full parameters that exist for the time of their use: those outside of blocks, the block in use and
    the one before, and with overlap those gathered ahead. None where ranks read each other's."""
    model, ranks = situation.model, situation.world_size
    if config.zero_stage < 3 or ((ranks == 1 or situation.reads_in_place) and not config.offload_param):
        return 0
    in_use = min(outside_blocks(model) + _KEPT_BLOCKS * model.block_parameters, model.parameters)
    ahead = min(config.prefetch_bucket_size, model.parameters - in_use) if ranks > 1 and config.overlap_comm else 0
    return (in_use + ahead) * BYTES_PER_ELEMENT[config.precision]


def staging_bytes(situation: Situation, config: TrainConfig) -> int:
    """Host buffers through which offloaded gradients and parameters pass, two each way; none where host and device
    are the same memory."""
    if situation.device_is_host or config.offload_optimizer_ratio == 0:
        return 0
    ranks = situation.world_size if config.zero_stage >= 1 else 1
    elements = round(shard(_bucket_elements(situation.model, config), ranks) * config.offload_optimizer_ratio)
    return 2 * elements * (held_bytes(config) + BYTES_PER_ELEMENT[config.precision])


def _bucket_elements(model: ModelProfile, config: TrainConfig) -> int:
    return min(max(config.reduce_bucket_size, model.largest_parameter), model.trainable_parameters)


def held_bytes(config: TrainConfig) -> int:
    """Of an element of the gradients that are kept until the step."""
    return MASTER_BYTES if config.gradient_accumulation_steps > 1 else BYTES_PER_ELEMENT[config.reduce_dtype]


def _optimizer_element_bytes(config: TrainConfig) -> int:
    return MASTER_BYTES if config.optimizer_precision == "fp32" else BYTES_PER_ELEMENT[config.precision]
