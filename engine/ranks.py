"""One rank among the others: who it is, where it computes, and how all ranks come to one decision."""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

_COLLECTIVE_TIMEOUT = datetime.timedelta(hours=24)
"""Deadlines are the launcher's affair; the group itself never gives up on a slow rank."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """One rank of a group.

    Attributes:
        control: a gloo group of its own for decisions, so that they never mix with the training's collectives; None
            at one rank.
        core: the core this rank is pinned to, where it is.
        host_devices: devices of this kind on the host.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    core: int | None = None
    host_devices: int = 1

    def largest(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks, the same on all of them."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, the same on all of them."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def barrier(self) -> None:
        self.largest((0.0,))

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        packed = torch.tensor(values, dtype=torch.float64)
        if self.control is not None and len(packed):
            dist.all_reduce(packed, op=operation, group=self.control)
        result: list[float] = packed.tolist()
        return result


def default_device(device_type: str, index: int) -> torch.device:
    """The device of a rank, made current where devices have an order."""
    if device_type == "cpu":
        return torch.device("cpu")
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


def join_group(*, rank: int, world_size: int, device: torch.device, rendezvous_file: str) -> None:
    """Make the default process group through a file: no port, no host name, nothing that two groups could share."""
    if device.type == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend_for(device), store=FileStore(rendezvous_file, world_size), rank=rank, world_size=world_size,
        timeout=_COLLECTIVE_TIMEOUT, device_id=None if device.type == "cpu" else device)


def control_group(world_size: int) -> dist.ProcessGroup | None:
    """A gloo group over all ranks of the default group."""
    if world_size == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def backend_for(device: torch.device) -> str:
    """The collectives' library for a kind of device."""
    return dist.get_default_backend_for_device(device)


def set_threads(count: int) -> None:
    """Fix the computing threads of this process, whatever its environment says."""
    torch.set_num_threads(count)
