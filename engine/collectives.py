"""The data-parallel ranks and every collective between them.

Collectives are issued in one total order that is the same on all ranks (the callers see to it) and return a `Pending`;
they sum and never average, because averaging is not right on every backend. Two transports stand behind one protocol:

- pairwise (gloo): slices go straight to their owner by send and receive and are added there in rank order. gloo's own
  reduce-scatter moves as much as an all-reduce and takes twice its time. Adding in rank order makes a sum independent
  of how parameters were put into buckets.
- native (NCCL and others): the backend's collectives, which run on the backend's own stream; waiting orders the
  current stream after them and does not stop the host.

With one rank nothing is sent and results are the arguments themselves.
"""

import atexit
import functools
import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A collective on its way."""

    def wait(self) -> None:
        """Return once the result may be read on the current stream."""


class PendingSum(Protocol):
    """A reduction on its way."""

    def wait(self) -> Tensor:
        """The sum, once it may be read on the current stream. Call once."""


_open: "weakref.WeakSet[Ranks]" = weakref.WeakSet()
"""On gloo, for those whose trainer is never closed."""

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

    def __init__(self, group: dist.ProcessGroup | None, *, device: torch.device, owned: bool = False) -> None:
        self.group = group
        self.device = device
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.counts: Counter[str] = Counter()
        self.sent_bytes = 0
        self._owned = owned
        self._tag = 0
        self.has_host_transport = group is not None and "cpu:gloo" in dist.get_backend_config(group)
        self._pairwise = self.has_host_transport and device.type == "cpu"
        if self._pairwise:
            _open.add(self)
            _leave_gloo_at_exit()

    def reduce_scatter(self, full: Tensor, *, wire: torch.dtype, dtype: torch.dtype) -> PendingSum:
        """Sum `full` over the ranks; each gets its own slice.

        Args:
            full: (size * n,). Left to the collective until waited for; contents then undefined.
            wire: dtype to send in.
            dtype: of the result.

        Returns:
            Pending (n,) sum of every rank's slice number `rank`.
        """
        if self.size == 1:
            return _Done(full.to(dtype))
        full = full.to(wire)
        self._count("reduce_scatter", full.numel() // self.size * (self.size - 1) * full.element_size())
        slices = full.view(self.size, -1)
        if self._pairwise:
            received = full.new_empty((self.size - 1, slices.shape[1]))
            parts = [slices[self.rank], *received]
            works = self._exchange([slices[peer] for peer in self._peers()], list(received))
            order = [self.rank, *self._sources()]
            return _OrderedSum(works, [parts[order.index(rank)] for rank in range(self.size)], dtype)
        result = full.new_empty(slices.shape[1])
        work = _reduce_scatter_flat(result, full, group=self.group, async_op=True)
        return _NativeSum(work, result, dtype, keep=full)

    def all_reduce(self, full: Tensor, *, wire: torch.dtype, dtype: torch.dtype) -> PendingSum:
        """Sum `full` (n,) over the ranks, sent in `wire`; in place where all dtypes agree. The result has `dtype`."""
        if self.size == 1:
            return _Done(full.to(dtype))
        full = full.to(wire)
        self._count("all_reduce", 2 * full.numel() * (self.size - 1) // self.size * full.element_size())
        work = dist.all_reduce(full, group=self.group, async_op=True)
        return _NativeSum(work, full, dtype, keep=full)

    def all_gather(self, rows: Sequence[Tensor]) -> Pending:
        """Complete tensors of which each rank holds one row, in place, in one collective.

        Args:
            rows: each (size, n_i), rows contiguous; row `rank` is filled, the others are overwritten. One dtype.
        """
        if self.size == 1:
            return _NOTHING
        own = [row[self.rank] for row in rows]
        self._count("all_gather", sum(part.numel() for part in own) * (self.size - 1) * own[0].element_size())
        if len(rows) == 1:
            return self._gather(rows[0])
        # Several tensors in one message: through one contiguous buffer.
        staged = own[0].new_empty((self.size, sum(part.numel() for part in own)))
        torch.cat(own, out=staged[self.rank])
        return _Unstage(self._gather(staged), staged, rows, self.rank)

    def sum_small(self, values: Tensor) -> Tensor:
        """Sum of a small tensor over the ranks, at once."""
        if self.size > 1:
            self.counts["small"] += 1
            dist.all_reduce(values, group=self.group)
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
        """Let go of the process group, and destroy it where `connect` made it.

        gloo's threads are joined with the last reference. Left to the interpreter's end, one that still frees a tensor
        there aborts the process ("terminate called without an active exception").
        """
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
        self._owned = False
        self.group = None

    def _gather(self, rows: Tensor) -> Pending:
        if self._pairwise:
            own = rows[self.rank]
            return _Works(self._exchange([own] * (self.size - 1), [rows[peer] for peer in self._sources()]))
        if rows.is_contiguous():
            work = _all_gather_flat(rows.view(-1), rows[self.rank], group=self.group, async_op=True)
        else:
            work = dist.all_gather(list(rows), rows[self.rank], group=self.group, async_op=True)
        return _Works([work])

    def _peers(self) -> list[int]:
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _sources(self) -> list[int]:
        return [(self.rank - step) % self.size for step in range(1, self.size)]

    def _exchange(self, to_peers: Sequence[Tensor], from_sources: Sequence[Tensor]) -> list[dist.Work]:
        """Send the k-th tensor to the k-th peer, receive the k-th from the k-th source."""
        self._tag = (self._tag + 1) % 2**24
        works: list[dist.Work | None] = []
        for sent, peer, received, source in zip(to_peers, self._peers(), from_sources, self._sources(), strict=True):
            works.append(dist.isend(sent, group=self.group, group_dst=peer, tag=self._tag))
            works.append(dist.irecv(received, group=self.group, group_src=source, tag=self._tag))
        return [work for work in works if work is not None]

    def _count(self, kind: str, sent_bytes: int) -> None:
        self.counts[kind] += 1
        self.sent_bytes += sent_bytes


def connect(device: torch.device, group: dist.ProcessGroup | None = None) -> Ranks:
    """The caller's process group, else one made from torchrun's environment variables, else a single rank."""
    if not dist.is_available():
        return Ranks(None, device=device)
    if group is not None or dist.is_initialized():
        return Ranks(group or dist.group.WORLD, device=device)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks(None, device=device)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return Ranks(dist.group.WORLD, device=device, owned=True)


@functools.cache
def _leave_gloo_at_exit() -> None:
    atexit.register(_leave_gloo)


def _leave_gloo() -> None:
    for ranks in list(_open):
        ranks.close()
    # A thread of gloo's may still hold a tensor of the last collective, and wait for the interpreter's lock to free it.
    time.sleep(_LOCK_SECONDS)


# torch 2.13 renamed the flat variants and warns at the old names; both names take (output, input).
_reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_all_gather_flat: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class _Nothing:
    def wait(self) -> None:
        pass


_NOTHING = _Nothing()


class _Done:
    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result


class _Works:
    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class _Unstage:
    """Copies a gathered contiguous buffer out to the tensors it was staged for."""

    def __init__(self, gathered: Pending, staged: Tensor, rows: Sequence[Tensor], rank: int) -> None:
        self._gathered, self._staged, self._rows, self._rank = gathered, staged, rows, rank

    def wait(self) -> None:
        self._gathered.wait()
        pieces = torch.split(self._staged, [row.shape[1] for row in self._rows], dim=1)
        for row, piece in zip(self._rows, pieces, strict=True):
            row.copy_(piece)
        self._rows = ()


class _NativeSum:
    def __init__(self, work: dist.Work | None, result: Tensor, dtype: torch.dtype, *, keep: Tensor) -> None:
        self._work, self._result, self._dtype, self._keep = work, result, dtype, keep

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._result.to(self._dtype)


class _OrderedSum:
    """The sum of parts in rank order, in fp32 inside where a result in 16 bit would round more than once."""

    def __init__(self, works: list[dist.Work], parts: list[Tensor], dtype: torch.dtype) -> None:
        self._works, self._parts, self._dtype = works, parts, dtype

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        first, second, *others = self._parts
        self._works, self._parts = [], []
        if first.dtype == self._dtype and (not others or first.dtype == torch.float32):
            total = torch.add(first, second)
        else:
            # Converting first and adding in fp32 is several times faster on CPU than adding mixed dtypes.
            total = first.to(torch.float32, copy=True).add_(second.to(torch.float32))
        for part in others:
            total.add_(part.to(torch.float32))
        return total.to(self._dtype)
