"""The data-parallel ranks and every collective between them.

Collectives are issued in one total order that is the same on all ranks (the callers see to it) and return a `Pending`;
they sum and never average. How they move bytes is the transport's: the backend's own collectives (NCCL and others),
or on the CPU messages from rank to rank, through sockets or, where all ranks are on one host, through shared memory.

With one rank nothing is sent and results are the arguments themselves.
"""

import atexit
import functools
import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.failure import tell_at_exit
from engine.shared_memory import share_memory
from engine.transports.base import Done, Nothing, Pending, PendingSum, Transport
from engine.transports.native import NativeTransport
from engine.transports.pairwise import PairwiseTransport
from engine.transports.shared import SharedCarrier
from engine.transports.sockets import SocketCarrier

SOCKETS = "ENGINE_SOCKETS"
"""Environment variable: set, ranks of one host talk through sockets too, as ranks of several do."""

_open: "weakref.WeakSet[Ranks]" = weakref.WeakSet()
"""Of trainers; those of closed ones have no group."""

_made: set[dist.ProcessGroup] = set()
"""Groups that `connect` made, and the last trainer closed destroys."""

_LOCK_SECONDS = 0.05


class Ranks:
    """The ranks that train one model together.

    Attributes:
        size: how many.
        rank: which of them this process is.
        counts: collectives issued since the start, by kind.
        has_host_transport: whether tensors on the host can be summed, without stopping the device.
        sent_bytes: payload bytes this rank sent since the start (for native collectives, by the ring's formula).
    """

    def __init__(self, group: dist.ProcessGroup | None, *, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.counts: Counter[str] = Counter()
        self.sent_bytes = 0
        self.has_host_transport = group is not None and "cpu:gloo" in dist.get_backend_config(group)
        self._shared: SharedCarrier | None = None
        self._transport: Transport | None = None
        _open.add(self)
        if group is None or self.size == 1:
            return
        if not self.has_host_transport or device.type != "cpu":
            self._transport = NativeTransport(group)
            tell_at_exit()
            return
        memory = share_memory(self.gather_objects, rank=self.rank, allowed=not os.environ.get(SOCKETS))
        self._shared = SharedCarrier(group, memory) if memory else None
        self._transport = PairwiseTransport(self._shared or SocketCarrier(group), size=self.size, rank=self.rank)
        _leave_gloo_at_exit()
        tell_at_exit()

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are processes of one host that read each other's memory."""
        return self._shared is not None

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's own segments, and its part of common ones."""
        return self._shared.bytes if self._shared else 0

    def mirrored(self, sizes: Sequence[int]) -> list[Tensor]:
        """Tensors of so many bytes, best for what is gathered in place. Collective, sizes equal everywhere."""
        if self._shared is None:
            return [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        return self._shared.mirrored(sizes)

    def common(self, sizes: Sequence[int]) -> list[Tensor]:
        """Tensors of so many bytes that are the same memory on all ranks.

        Collective, sizes equal everywhere; only where ranks share memory.
        """
        assert self._shared is not None
        return self._shared.common(sizes)

    def finish_reading(self) -> None:
        """Afterwards no rank still reads what this rank has gathered in memory of `mirrored`. Collective."""
        if self._shared is not None:
            self.barrier()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make rooms of so many bytes for what is being reduced. Collective, equal everywhere."""
        if self._shared is not None:
            self._shared.reserve(sizes)

    def empty(self, numel: int, dtype: torch.dtype, *, room: int) -> Tensor:
        """(numel,) memory to fill and give to a reduction, or back by `discard`: a room of `reserve` if it is free."""
        place = self._shared.room(room, numel, dtype) if self._shared else None
        return torch.empty(numel, dtype=dtype, device=self.device) if place is None else place

    def placed(self, values: Tensor, dtype: torch.dtype, *, room: int) -> Tensor:
        """The values in `dtype` where they are best reduced from. Those given are used up."""
        if self._transport is None or (values.dtype == dtype and self.is_room(values)):
            return values
        place = self._shared.room(room, values.numel(), dtype) if self._shared else None
        if place is None:
            return values.to(dtype)
        place.copy_(values)
        self.discard(values)
        return place

    def is_room(self, values: Tensor) -> bool:
        """Whether they lie in a room, which others may wait for."""
        return self._shared is not None and self._shared.sends_in_place(values)

    def trim(self) -> None:
        """Give memory of `empty` back to the host until it is used again. After a barrier, nothing on its way."""
        if self._shared is not None:
            self._shared.trim()

    def discard(self, memory: Tensor) -> None:
        """Give back memory of `empty`."""
        if self._shared is not None:
            self._shared.discard(memory)

    def reduce_scatter(self, full: Tensor, *, dtype: torch.dtype) -> PendingSum:
        """Sum `full` over the ranks; each gets its own slice.

        Args:
            full: (size * n,), sent as it is. Left to the collective until waited for; contents then undefined.
            dtype: of the result.

        Returns:
            Pending (n,) sum of every rank's slice number `rank`.
        """
        if self._transport is None:
            return Done(full.to(dtype))
        self._count("reduce_scatter", full.numel() // self.size * (self.size - 1) * full.element_size())
        return self._transport.reduce_scatter(full, dtype=dtype)

    def all_reduce(self, full: Tensor, *, dtype: torch.dtype) -> PendingSum:
        """Sum `full` (size * n,) over the ranks; in place where the result's `dtype` is its own."""
        if self._transport is None:
            return Done(full.to(dtype))
        self._count("all_reduce", 2 * full.numel() * (self.size - 1) // self.size * full.element_size())
        return self._transport.all_reduce(full, dtype=dtype)

    def all_gather(self, rows: Sequence[Tensor]) -> Pending:
        """Complete tensors of which each rank holds one row, in place, in one collective.

        Args:
            rows: each (size, n_i), rows contiguous; row `rank` is filled, the others are overwritten. One dtype.
        """
        if self._transport is None:
            return Nothing()
        own = sum(row[self.rank].nbytes for row in rows)
        self._count("all_gather", own * (self.size - 1))
        return self._transport.all_gather(rows)

    def sum_small(self, values: Tensor) -> Tensor:
        """Sum a small tensor over the ranks, at once and in place."""
        if self._transport is not None:
            self.counts["small"] += 1
            self._transport.sum_small(values)
        return values

    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank the first rank's values, in place, at once.

        Args:
            tensor: contiguous, as backends take its memory for that; of any dtype, as bytes are sent.
        """
        if self.size > 1:
            assert tensor.is_contiguous()
            dist.broadcast(tensor.detach().view(-1).view(torch.uint8), group=self.group, group_src=0)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            self.sum_small(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Let go of the process group, and destroy it where `connect` made it and no other trainer has it.

        gloo's threads are joined with the last reference. Left to the interpreter's end, one that still frees a tensor
        there aborts the process ("terminate called without an active exception").
        """
        if self._shared is not None:
            self._shared.leave()
        group, self.group = self.group, None
        self._transport = self._shared = None
        if group in _made and not any(other.group is group for other in _open):
            _made.remove(group)
            if dist.is_initialized():
                dist.destroy_process_group()

    def _count(self, kind: str, sent_bytes: int) -> None:
        self.counts[kind] += 1
        self.sent_bytes += sent_bytes


def connect(device: torch.device, group: dist.ProcessGroup | None = None) -> Ranks:
    """The caller's process group, else one made from torchrun's environment variables, else a single rank."""
    if group is not None or dist.is_initialized():
        return Ranks(group or dist.group.WORLD, device=device)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks(None, device=device)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    group = dist.group.WORLD
    assert group is not None
    _made.add(group)
    return Ranks(group, device=device)


@functools.cache
def _leave_gloo_at_exit() -> None:
    atexit.register(_leave_gloo, os.getpid())


def _leave_gloo(owner: int) -> None:
    if os.getpid() != owner:  # a forked child, which has not the parent's place among the ranks
        return
    for ranks in list(_open):
        ranks.close()
    # A thread of gloo's may still hold a tensor of the last collective, and wait for the interpreter's lock to free it.
    time.sleep(_LOCK_SECONDS)
