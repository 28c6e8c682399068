"""Seconds of one optimizer step, by term. docs/prediction.md derives the formulas and says how well they hold.

Every operation is charged for its arithmetic and for its memory traffic, and for being started. What differs between
devices is in the `HardwareProfile`, what is the same everywhere in `Constants`.
"""

from dataclasses import dataclass

from autotune.predict.communication import Group, data_group, ring
from autotune.predict.constants import Constants
from autotune.predict.memory import Situation, held_bytes, owned, reduces_at_once, states_per_parameter
from autotune.predict.operators import operator_seconds
from autotune.predict.parallel import hidden_size, saved_bytes, stage_share
from engine.config import Checkpointing, TrainConfig
from engine.profile import HardwareProfile
from engine.values import BYTES_PER_ELEMENT

Seconds = dict[str, float]

_OPERATIONS_PER_TENSOR = 15
"""Started per parameter tensor in forward and backward; residuals, activations and norms are among them."""

_UPDATES_PER_TENSOR = 2

_SELECTIVE_LAUNCHES = 15
"""Selective checkpointing sees each operator in Python, in forward and recomputation, for so many times as long."""

_HOOK_LAUNCHES = 6
"""A gradient's hook runs in Python, and takes the time of so many operations."""

_LAUNCH_SECONDS = 3e-6
"""The host's, per operation, where it was not measured."""

_HOST_BYTES_PER_SECOND = 10e9
"""Between an accelerator and its host, and of an optimizer step on the host, where nothing was measured."""

_BLOCK_EXCHANGES = 4
"""All-reduces of tensor parallelism per block: two in forward, two in backward (arXiv 1909.08053, figure 4)."""

_OUTER_EXCHANGES = 2
"""Those outside of blocks: of the embedding, and of the gradient that enters the last block."""

_EXPOSED_ON_CPU = 0.5
"""As `Constants.exposed_share`: ranks on a CPU compute and communicate with the same cores."""

_ALIGNED_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class _Point:
    """What is to be timed."""

    situation: Situation
    hardware: HardwareProfile
    config: TrainConfig
    constants: Constants
    flops_per_second: float

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.config.micro_batch_size * self.situation.whole.tokens_per_sample

    @property
    def width(self) -> int:
        """Bytes of an element in compute."""
        return BYTES_PER_ELEMENT[self.config.precision]

    @property
    def traffic_rate(self) -> float:
        """Bytes per second, read or written."""
        return 2 * self.hardware.copy_bytes_per_second

    @property
    def launch_seconds(self) -> float:
        measured = self.hardware.launch_seconds
        return _LAUNCH_SECONDS if measured is None else measured

    def product(self, operations: float, *, sizes: tuple[float, float, float]) -> float:
        """Seconds of matrix products of these three dimensions: of m k n multiplications with m k + k n + m n elements
        read or written once, the traffic is 1/m + 1/k + 1/n elements each."""
        traffic = operations / 2 * self.width * sum(1 / size for size in sizes)
        return operations / self.flops_per_second + traffic / self.traffic_rate

    def moved(self, saved_per_sample: float) -> float:
        """Seconds of all that is not a product, forward and backward, where so many bytes of activations are saved."""
        moved = self.constants.activation_traffic * self.config.micro_batch_size * saved_per_sample
        return moved / self.traffic_rate

    def started(self, products: float, traffic: float, operations: float) -> float:
        """Seconds of a device's work and of the host that starts so many operations: beside each other, but on a CPU
        one after the other."""
        host = operations * self.launch_seconds
        if self.situation.device_is_host:
            return products + traffic + host
        order, share = self.constants.host_norm, self.constants.product_launches
        return float((products**order + (share * host)**order) ** (1 / order)
                     + (traffic**order + ((1 - share) * host)**order) ** (1 / order))


@dataclass(frozen=True, kw_only=True)
class _MicroBatch:
    """Seconds of one micro-batch on one device.

    Attributes:
        blocks: forward and backward pass of a pipeline stage's blocks.
        recompute: in its backward pass.
        head: forward and backward pass of what comes after the blocks, at the last stage; where operators were counted,
            it is among the blocks.
        gradients: taking them over, in its backward pass.
        exchange: all-reduces of tensor parallelism in the stage's blocks.
        head_exchange: those outside of blocks.
        transfer: to the next pipeline stage and back.
    """

    blocks: float
    recompute: float
    head: float
    gradients: float
    exchange: float
    head_exchange: float
    transfer: float

    @property
    def stage(self) -> float:
        """Of a pipeline stage that is not the last."""
        return self.blocks + self.recompute + self.gradients + self.exchange + self.transfer


def step_terms(situation: Situation, hardware: HardwareProfile, config: TrainConfig,
               constants: Constants) -> Seconds | None:
    """Seconds of one optimizer step over the whole global batch; None where the precision's rate is unknown.

    The last pipeline stage sets the pace; before its first micro-batch arrives and after its last one, the others take
    one turn each (1F1B; arXiv 2104.04473, section 2.2).
    """
    rate = hardware.matmul_flops_per_second.get(config.precision)
    if not rate:
        return None
    point = _Point(situation=situation, hardware=hardware, config=config, constants=constants, flops_per_second=rate)
    micro, steps = _micro_batch(point), config.gradient_accumulation_steps
    passes, recompute = steps * (micro.blocks + micro.head), steps * micro.recompute
    forward = constants.forward_share * passes
    backward = passes - forward + steps * micro.gradients
    beside = backward + recompute + (forward if config.zero_stage == 3 else 0.0)
    update, host = _update_seconds(point)
    return {
        "forward": forward,
        "backward": backward,
        "recompute": recompute,
        "tensor_exchange": steps * (micro.exchange + micro.head_exchange),
        "pipeline_bubble": (situation.parallel.pipeline - 1) * micro.stage,
        "pipeline_transfer": steps * micro.transfer,
        "data_exchange": _exposed_seconds(point, beside),
        "optimizer": update,
        "host_transfer": host,
    }


def _micro_batch(point: _Point) -> _MicroBatch:
    model, tensor, config = point.situation.whole, point.situation.parallel.tensor, point.config
    blocks = max(model.block_count, 1)
    counted = _counted_seconds(point)
    both, again, launches = counted or _block_passes(point)
    exchanges = _BLOCK_EXCHANGES + (_BLOCK_EXCHANGES / 2 if config.activation_checkpointing == "full" else 0)
    message = point.tokens * hidden_size(model) * point.width
    exchange = ring(point.hardware, ranks=tensor, stride=1).allreduce(message) if tensor > 1 else 0.0
    share = stage_share(model, point.situation.parallel)
    return _MicroBatch(
        blocks=share * both, recompute=share * again,
        head=0.0 if counted else _head_seconds(point, launches / blocks),
        gradients=_gradient_seconds(point) if counted else 0.0,
        exchange=share * model.block_count * exchanges * exchange, head_exchange=_OUTER_EXCHANGES * exchange,
        transfer=_transfer_seconds(point, message))


def _counted_seconds(point: _Point) -> tuple[float, float, float] | None:
    """(forward and backward, recompute, operators) of all that the model does, as counted; None where it was not,
    or where operators of this precision were not calibrated: the constants were found without counting."""
    model, config, tensor = point.situation.whole, point.config, point.situation.parallel.tensor
    plain, chosen = (model.counted(choice, config.precision) for choice in (
        _probed_choice(point), config.activation_checkpointing))
    costs = point.hardware.operators.get(config.precision)
    if plain is None or chosen is None or costs is None:
        return None
    whole, cut, logits = saved_bytes(model, config, _probed_choice(point))
    uncut = (whole + (cut + logits) / tensor) / max(whole + cut + logits, 1.0)
    found = []
    for work in (plain, chosen):
        products, traffic, kernels = operator_seconds(work, config.micro_batch_size, costs)
        kernels *= _SELECTIVE_LAUNCHES if work.checkpointing == "selective" else 1
        found.append((point.started(products / tensor, uncut * traffic, kernels), kernels))
    return found[0][0], max(found[1][0] - found[0][0], 0.0), found[0][1]


def _gradient_seconds(point: _Point) -> float:
    """What the engine does with the gradients of a micro-batch: copies them where they are reduced from, or adds them
    to the sums."""
    config, model = point.config, point.situation.model
    own, held = point.width, held_bytes(config)
    moved = own + held if reduces_at_once(config) else own + 2 * held + (2 * held if own != held else 0)
    return (model.trainable_parameters * moved / point.traffic_rate
            + model.parameter_tensors * _HOOK_LAUNCHES * point.launch_seconds)


def _block_passes(point: _Point) -> tuple[float, float, float]:
    """(forward and backward, recompute, operators) of the blocks, from their dimensions."""
    products, scores, traffic = _block_seconds(point)
    launches = point.situation.whole.parameter_tensors * _OPERATIONS_PER_TENSOR
    both = point.started(products + scores, traffic, launches)
    return both, point.constants.forward_share * {
        "none": 0.0, "selective": point.started(0.0, traffic, launches), "full": both,
    }[point.config.activation_checkpointing], launches


def _block_seconds(point: _Point) -> tuple[float, float, float]:
    """(matrix products, attention, other traffic) of all blocks, forward and backward, on one of the devices that
    share them."""
    model, config, tensor = point.situation.whole, point.config, point.situation.parallel.tensor
    hidden, tokens, length = hidden_size(model), point.tokens, model.tokens_per_sample
    attention = 12 * hidden * length * tokens * model.block_count if model.heads else 0
    work = max(config.micro_batch_size * model.flops_per_sample - attention - _head_work(point), 0.0)
    # Cutting leaves one of a product's two other dimensions whole; weighted by the four products of a block.
    products = point.product(work / tensor, sizes=(tokens, hidden, 3 * hidden / tensor))
    if model.attention == "fused":
        scores = attention / tensor / (point.flops_per_second * point.constants.fused_attention_rate)
    else:
        scores = point.product(attention / tensor, sizes=(length, length, hidden / max(model.heads, 1)))
    whole, cut, _ = saved_bytes(model, config, _probed_choice(point))
    return products, scores, point.moved(whole + cut / tensor)


def _head_work(point: _Point) -> float:
    """Operations of the product with the vocabulary, forward and backward."""
    return 6.0 * point.situation.whole.vocab * hidden_size(point.situation.whole) * point.tokens


def _head_seconds(point: _Point, launches: float) -> float:
    """Logits and loss, forward and backward, which start about as many operations as a block does."""
    model, tensor = point.situation.whole, point.situation.parallel.tensor
    if not model.vocab:
        return 0.0
    outputs = -(-model.vocab // tensor)
    product = point.product(_head_work(point) / tensor, sizes=(point.tokens, hidden_size(model), outputs))
    if outputs * point.width % _ALIGNED_BYTES and not point.situation.device_is_host:
        product /= point.constants.unaligned_rate
    _, _, logits = saved_bytes(model, point.config, _probed_choice(point))
    return point.started(product, point.moved(logits / tensor), launches)


def _probed_choice(point: _Point) -> Checkpointing:
    """Traffic follows from what is saved without checkpointing, where that was probed."""
    choices = {entry.checkpointing for entry in point.situation.whole.activations
               if entry.precision == point.config.precision}
    return "none" if "none" in choices else point.config.activation_checkpointing


def _transfer_seconds(point: _Point, message: float) -> float:
    """Activations to the next pipeline stage and their gradients back."""
    parallel = point.situation.parallel
    if parallel.pipeline == 1:
        return 0.0
    return 2 * ring(point.hardware, ranks=2, stride=parallel.tensor * point.situation.world_size).send(message)


def _exposed_seconds(point: _Point, beside: float) -> float:
    """Communication between the ranks that hold the same part, as far as computing for so long does not hide it."""
    if point.situation.world_size == 1:
        return 0.0
    group = data_group(point.hardware, ranks=point.situation.world_size, stride=point.situation.parallel.tensor,
                       precision=point.config.reduce_dtype)
    seconds = _data_seconds(point, group)
    if not point.config.overlap_comm or group.by_computing:
        return seconds
    least = _EXPOSED_ON_CPU if point.situation.device_is_host else point.constants.exposed_share
    return max(least * seconds, seconds - point.constants.hidden_share * beside)


def _data_seconds(point: _Point, group: Group) -> float:
    """Stages 0 and 1 communicate once per step, 2 and 3 once per micro-batch; an all-reduce is a reduce-scatter and
    an all-gather (arXiv 1910.02054, section 7)."""
    model, config = point.situation.model, point.config
    gradients = model.trainable_parameters * BYTES_PER_ELEMENT[config.reduce_dtype]
    buckets = _pieces(model.trainable_parameters, config.reduce_bucket_size)
    reductions = 1 if config.zero_stage < 2 else config.gradient_accumulation_steps
    if config.zero_stage == 0:
        return group.allreduce(gradients, pieces=buckets)
    reduced = reductions * group.reduce(gradients, pieces=buckets)
    if config.zero_stage < 3:
        gathers = _pieces(model.trainable_parameters, config.allgather_bucket_size)
        return reduced + group.gather(model.trainable_parameters * point.width, pieces=gathers)
    if group.reads_in_place:
        return reduced
    gathers = max(model.block_count, 1) + 1
    return reduced + 2 * config.gradient_accumulation_steps * group.gather(
        model.parameters * point.width, pieces=gathers)


def _pieces(elements: int, bucket: int) -> int:
    return -(-elements // bucket)


def _update_seconds(point: _Point) -> tuple[float, float]:
    """(optimizer, transfers): parameters, gradients and states are read and written; offloaded ones cross to the host
    and back."""
    situation, config, ratio = point.situation, point.config, point.config.offload_optimizer_ratio
    elements = owned(situation.model, config, situation.world_size)
    state_bytes = 4 if config.optimizer_precision == "fp32" else point.width
    traffic = elements * state_bytes * (3 + 2 * states_per_parameter(situation.optimizer))
    device_rate = point.hardware.update_bytes_per_second or point.traffic_rate
    host_rate = device_rate if situation.device_is_host else (
        point.hardware.host_update_bytes_per_second or _HOST_BYTES_PER_SECOND)
    update = traffic * ((1 - ratio) / device_rate + ratio / host_rate)
    if state_bytes != point.width:
        update += elements * (held_bytes(config) + 2 * state_bytes + point.width) / point.traffic_rate
    update += situation.model.parameter_tensors * _UPDATES_PER_TENSOR * point.launch_seconds
    crossing = 2 * elements * point.width * ratio
    if config.offload_param:
        shard_bytes = situation.model.parameters * point.width / situation.world_size
        crossing += (2 * config.gradient_accumulation_steps + 1) * shard_bytes
    link_rate = point.hardware.host_bytes_per_second or _HOST_BYTES_PER_SECOND
    return update, crossing / (point.traffic_rate if situation.device_is_host else link_rate)
