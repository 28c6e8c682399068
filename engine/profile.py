"""What is known of a model and of hardware, independent of any configuration: the inputs of prediction."""

from typing import Literal

from pydantic import Field

from engine.config import Checkpointing
from engine.values import Precision, Value


class BackwardPoint(Value):
    """A stretch of the backward pass, the forward pass before it included.

    Attributes:
        gradients: elements of gradients that are there at its end.
        fixed, per_sample: the most bytes of activations and of what is transient, gradients on their way among it.
    """

    gradients: int
    fixed: int
    per_sample: int


class ActivationBytes(Value):
    """Activation bytes of one checkpointing choice in one precision, per sample of a micro-batch.

    Attributes:
        saved_per_sample: held from forward to backward.
        peak_per_sample: largest sum of saved and transient bytes at any point of forward and backward.
        fixed: bytes that do not grow with the micro-batch.
        backward: how they go as gradients come; empty where that was not seen.
    """

    checkpointing: Checkpointing
    precision: Precision
    saved_per_sample: int
    peak_per_sample: int
    fixed: int = 0
    backward: tuple[BackwardPoint, ...] = ()


PROFILE_VERSION = "4"
"""Of what probe and calibration find; stored profiles of another one are not used."""

OperatorClass = Literal["product", "attention", "other"]
"""Matrix products and convolutions; fused attention; everything else that moves memory."""


class OperatorWork(Value):
    """What the operators of one class do in forward and backward of a micro-batch; bytes of operands and results."""

    flops_per_sample: float
    bytes_per_sample: float
    bytes_fixed: float = Field(description="of parameters and their gradients, however large the micro-batch")
    kernels: float = Field(description="operators started")


class PassWork(Value):
    """Of one checkpointing choice in one precision, recomputation included."""

    checkpointing: Checkpointing
    precision: Precision
    operators: dict[OperatorClass, OperatorWork]


class ModelProfile(Value):
    """The probe's result; counts are elements of distinct parameters (tied ones once)."""

    fingerprint: str = Field(description="equal for equal tasks")
    parameters: int
    trainable_parameters: int
    parameter_tensors: int
    largest_parameter: int
    buffer_bytes: int
    block_class: str | None = Field(description="class name of the repeated block, None where nothing repeats")
    block_count: int
    block_parameters: int = Field(description="elements of the largest repeated block, 0 where nothing repeats")
    tokens_per_sample: int
    flops_per_sample: float = Field(description="floating-point operations of forward and backward, without recompute")
    activations: tuple[ActivationBytes, ...]
    hidden: int = Field(0, description="elements of a token between blocks; 0: not seen, guessed from a block's size")
    heads: int = Field(0, description="of a block's attention; 0: none was seen")
    vocab: int = Field(0, description="outputs per token that the loss is computed from; 0: none were seen")
    attention: Literal["fused", "eager"] = Field("fused", description="eager: the matrix of scores is written out")
    loss: Literal["fused", "eager"] = Field("eager", description="eager: from a copy of the logits in fp32")
    largest_block_parameter: int = Field(0, description="elements; 0: not known")
    block_sizes: tuple[int, ...] = Field((), description="elements of each repeated block in turn; none: all equal")
    work: tuple[PassWork, ...] = Field((), description="as counted; none: followed from the dimensions")

    def activation(self, checkpointing: Checkpointing, precision: Precision) -> ActivationBytes:
        """The entry for one choice.

        Raises:
            KeyError: it was not probed.
        """
        for entry in self.activations:
            if (entry.checkpointing, entry.precision) == (checkpointing, precision):
                return entry
        raise KeyError(f"no activation profile for checkpointing {checkpointing}, precision {precision}")

    def counted(self, checkpointing: Checkpointing, precision: Precision) -> PassWork | None:
        """What operators do with one choice, where they were counted."""
        return next((work for work in self.work if (work.checkpointing, work.precision) == (checkpointing, precision)),
                    None)


class OperatorCost(Value):
    """What operators of one class cost on a device: seconds are the sum over operations and bytes."""

    seconds_per_flop: float
    seconds_per_byte: float


class Collective(Value):
    """What a collective of the engine costs among the ranks that were measured."""

    latency_seconds: float
    bytes_per_second: float = Field(description="of the whole tensor, in its dtype")


class Links(Value):
    """How the devices of a cluster are joined. Rates are what a ring of collectives moves through one device (bus
    bandwidth as NCCL's tests count it), in one direction."""

    devices_per_node: int
    intra_bytes_per_second: float = Field(description="per device, between devices of a node")
    inter_bytes_per_second: float = Field(description="per node, through all of its network adapters together")
    intra_latency_seconds: float = Field(description="of a collective, for each doubling of its ranks")
    inter_latency_seconds: float


class HardwareProfile(Value):
    """The calibration's result for one group of devices."""

    fingerprint: str = Field(description="equal for equal devices, device count and software")
    device_type: str = Field(description="cpu, cuda, ... as torch names it")
    device_name: str
    world_size: int
    memory_bytes: int = Field(description="usable bytes per device; on CPU this device's share of the host")
    host_memory_bytes: int = Field(description="usable bytes of the whole host")
    precisions: tuple[Precision, ...] = Field(description="those in which a forward and backward pass really ran")
    matmul_flops_per_second: dict[Precision, float] = Field(description="best achieved, per device")
    copy_bytes_per_second: float
    allreduce_bytes_per_second: float | None = Field(description="message bytes over seconds; None at one rank")
    allreduce_latency_seconds: float | None
    software: dict[str, str] = Field(description="versions measured with, e.g. torch")
    links: Links | None = Field(None, description="None: every group of ranks communicates as measured over all")
    host_bytes_per_second: float | None = Field(None, description="between a device and its host, in one direction")
    launch_seconds: float | None = Field(None, description="the host's time to start one operation")
    operators: dict[Precision, dict[OperatorClass, OperatorCost]] = Field(
        {}, description="as measured; none: followed from the rates")
    reduce_scatter: dict[Precision, Collective] = Field({}, description="by the dtype sent")
    all_reduce: dict[Precision, Collective] = Field({}, description="by the dtype sent")
    all_gather: Collective | None = None
    shares_memory: bool | None = Field(
        None, description="whether ranks read each other's memory where it lies; None: not told, then on a CPU they do")
    update_bytes_per_second: float | None = Field(
        None, description="of AdamW on the device: parameters, gradients and states, read and written")
    host_update_bytes_per_second: float | None = Field(
        None, description="of AdamW on the host, by one rank while all the others do the same; None: not measured")
    host_devices: int | None = Field(None, description="devices that share the host's memory; None: those measured")
    contended: bool = Field(False, description="other work took a noticeable part of a core meanwhile")
