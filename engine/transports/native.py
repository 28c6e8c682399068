"""The backend's own collectives (NCCL and others).

They run on the backend's own stream: waiting orders the current stream after them and does not stop the host.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.transports.base import Pending, PendingSum, Unstage, stage

# torch 2.13 renamed the flat variants and warns at the old names; both names take (output, input).
_reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_all_gather_flat: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class NativeTransport:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def reduce_scatter(self, full: Tensor, *, dtype: torch.dtype) -> PendingSum:
        result = full.new_empty(full.numel() // self._size)
        return _Sum(_reduce_scatter_flat(result, full, group=self._group, async_op=True), result, dtype, keep=full)

    def all_reduce(self, full: Tensor, *, dtype: torch.dtype) -> PendingSum:
        return _Sum(dist.all_reduce(full, group=self._group, async_op=True), full, dtype, keep=full)

    def all_gather(self, rows: Sequence[Tensor]) -> Pending:
        if len(rows) > 1:
            staged = stage(rows, self._rank)
            return Unstage(self.all_gather([staged]), staged, rows)
        (row,) = rows
        if row.is_contiguous():
            return _Work(_all_gather_flat(row.view(-1), row[self._rank], group=self._group, async_op=True))
        return _Work(dist.all_gather(list(row), row[self._rank], group=self._group, async_op=True))

    def sum_small(self, values: Tensor) -> None:
        dist.all_reduce(values, group=self._group)


class _Work:
    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


class _Sum:
    """Keeps the tensor that is sent until it was."""

    def __init__(self, work: dist.Work | None, result: Tensor, dtype: torch.dtype, *, keep: Tensor) -> None:
        self._work, self._result, self._dtype, self._keep = work, result, dtype, keep

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._result.to(self._dtype)
