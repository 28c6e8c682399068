"""What this rank owns of the optimizer: masters cut into one 1-D slice per parameter.

Each bucket's owned elements form one part on the device and, with offload, one on the host. A part's master is what
the optimizer updates: the parameters themselves where dtype and device agree, else a copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.buckets import ALIGNMENT, Bucket, ManagedParameter
from engine.errors import ConfigurationError
from engine.offload import HostMemory, Transfers
from engine.stages.base import Stage


@dataclass(frozen=True, eq=False)
class Slice:
    """Elements [start, stop) of a flattened parameter, updated as one tensor (stop - start,).

    Attributes:
        place: within its part.
        tensor: view of the part's master.
        group: number of the optimizer's group it is in.
    """

    managed: ManagedParameter
    start: int
    stop: int
    place: slice
    tensor: Tensor
    group: int


class Part:
    """A run of a bucket's owned elements on the device.

    Attributes:
        place: within the owned elements.
        master: (n,) what the optimizer updates.
        slices: of parameters that are in one of the optimizer's groups.
    """

    on_host = False

    def __init__(self, bucket: Bucket, place: slice, master: Tensor, parameters: Tensor) -> None:
        self.bucket, self.place, self.master = bucket, place, master
        self.slices: list[Slice] = []
        self._parameters = parameters
        self._gradient: Callable[[], Tensor] | None = None

    @property
    def is_parameters(self) -> bool:
        """Whether the master is the parameters' own memory."""
        return self.master.data_ptr() == self._parameters.data_ptr()

    def receive(self, gradient: Tensor) -> None:
        """Take the summed gradient (n,) of this part."""
        self._gradient = lambda: gradient

    def take_gradient(self, *, divisor: float) -> Tensor:
        """(n,) the gradient received, divided, in the master's dtype."""
        assert self._gradient is not None
        gradient, self._gradient = self._gradient().to(self.master.dtype), None
        return gradient.mul_(1 / divisor) if divisor != 1 else gradient

    def take_over(self, piece: Slice) -> None:
        """Have the master follow where a parameter has another value than `store` gave it."""
        if not self.is_parameters:
            given = self._parameters[piece.place].to(piece.tensor.device)
            same = piece.tensor.to(given.dtype) == given
            piece.tensor.copy_(torch.where(same, piece.tensor, given.to(piece.tensor.dtype)))

    def store(self) -> None:
        """Write the master to the parameters."""
        if not self.is_parameters:
            # The host never reads offloaded parameters; their next upload follows on the device.
            self._parameters.copy_(self.master, non_blocking=True)


class HostPart(Part):
    """A run whose master and states live on the host and are updated there."""

    on_host = True

    def __init__(self, bucket: Bucket, place: slice, master: Tensor, parameters: Tensor, *,
                 transfers: Transfers) -> None:
        super().__init__(bucket, place, master, parameters)
        self._transfers = transfers

    def receive(self, gradient: Tensor) -> None:
        """Its transfer starts here."""
        self._gradient = self._transfers.fetch(gradient, self.master.dtype)

    def store(self) -> None:
        if not self.is_parameters:
            self._transfers.store(self.master, self._parameters)


@dataclass(frozen=True)
class Offload:
    """What of each bucket's owned elements is on the host, and how it gets there and back.

    Attributes:
        ratio: share of them whose masters and states are there.
        has_parameters: whether the parameters themselves are there.
    """

    ratio: float
    host: HostMemory
    transfers: Transfers
    has_parameters: bool


def make_parts(bucket: Bucket, stage: Stage, groups: dict[nn.Parameter, int], offload: Offload) -> list[Part]:
    """The parts of one bucket, masters filled with the parameters' initial values."""
    masters, parameters = stage.take_masters(bucket), stage.parameters(bucket)
    on_host = round(offload.ratio * masters.numel() / ALIGNMENT) * ALIGNMENT
    cut = masters.numel() - on_host
    parts: list[Part] = []
    if cut:
        own_memory = masters.data_ptr() != parameters.data_ptr()
        # Cloned, so that the memory of the rest is freed.
        master = masters[:cut].clone() if on_host and own_memory else masters[:cut]
        parts.append(Part(bucket, slice(0, cut), master, parameters[:cut]))
    if on_host:
        if offload.has_parameters and parameters.dtype == masters.dtype:
            master = parameters[cut:]
        else:
            master = offload.host.empty(on_host, masters.dtype, pinned=False).copy_(masters[cut:])
        parts.append(HostPart(bucket, slice(cut, masters.numel()), master, parameters[cut:],
                              transfers=offload.transfers))
    for part in parts:
        part.slices = _slices(part, stage.owned(bucket).start, groups)
    return parts


def _slices(part: Part, owned_start: int, groups: dict[nn.Parameter, int]) -> list[Slice]:
    slices = []
    for run in part.bucket.runs(owned_start + part.place.start, owned_start + part.place.stop):
        group = groups.get(run.managed.parameter)
        if group is not None:
            slices.append(Slice(run.managed, run.start, run.stop, run.place, part.master[run.place], group))
    return slices


def groups_of(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> dict[nn.Parameter, int]:
    """The number of the group each trainable parameter is in; frozen ones in groups are passed over.

    Raises:
        ConfigurationError: a group holds something that is not a parameter of the model.
    """
    trainable = {slot.managed.parameter for bucket in buckets for slot in bucket.slots}
    groups: dict[nn.Parameter, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter in trainable:
                groups[parameter] = number
            elif parameter.requires_grad:
                raise ConfigurationError(
                    f"optimizer: group {number} holds a tensor of shape {tuple(parameter.shape)} that is not a "
                    "parameter of the model; build groups from the parameters given to the factory",
                    fields=("optimizer",))
    return groups


def adopt(optimizer: torch.optim.Optimizer, parts: Sequence[Part]) -> None:
    """Put slices in place of whole parameters in the optimizer's groups and in states it made on construction."""
    states = dict(optimizer.state)
    optimizer.state.clear()
    tensors: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    for part in parts:
        for piece in part.slices:
            tensors[piece.group].append(piece.tensor)
            whole = states.get(piece.managed.parameter)
            if whole is not None:
                optimizer.state[piece.tensor] = {key: _sliced(key, value, piece) for key, value in whole.items()}
    for group, members in zip(optimizer.param_groups, tensors, strict=True):
        group["params"] = members
    optimizer.add_param_group = _refuse_group  # type: ignore[assignment,method-assign]


def _refuse_group(*_: Any) -> None:
    raise RuntimeError("the engine has laid out what its optimizer steps: groups are made by the factory given to "
                       "initialize")


def _sliced(key: str, value: Any, piece: Slice) -> Any:
    """A whole parameter's state for one slice of it; scalars are copied, as is the step of a zero-dimensional one."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == piece.managed.parameter.shape and (value.dim() or key != "step"):
        elements = value.detach().reshape(-1)[piece.start:piece.stop]
        return elements.to(piece.tensor.device, piece.tensor.dtype, copy=True)
    return value.detach().clone()
