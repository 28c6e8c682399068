"""What moves tensors between ranks, behind one protocol."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A collective on its way."""

    def wait(self) -> None:
        """Return once the result may be read on the current stream."""


class PendingSum(Protocol):
    """A reduction on its way."""

    def wait(self) -> Tensor:
        """The sum, once it may be read on the current stream. Call once."""


class Transport(Protocol):
    """The collectives of at least two ranks. They sum and never average: averaging is not right on every backend."""

    def reduce_scatter(self, full: Tensor, *, dtype: torch.dtype) -> PendingSum:
        """Start summing `full` (size * n,); the result (n,) is of every rank's slice number `rank`, in `dtype`."""

    def all_reduce(self, full: Tensor, *, dtype: torch.dtype) -> PendingSum:
        """Start summing `full` (size * n,); in place where the result's `dtype` is its own."""

    def all_gather(self, rows: Sequence[Tensor]) -> Pending:
        """Start completing tensors (size, n_i) of which row `rank` is there, in one go."""

    def sum_small(self, values: Tensor) -> None:
        """Sum a few numbers over the ranks, at once and in place."""


class Nothing:
    """What is done already."""

    def wait(self) -> None:
        pass


class Done:
    """A sum that is there already."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result


class Unstage:
    """Copies a gathered contiguous buffer out to the tensors it was staged for."""

    def __init__(self, gathered: Pending, staged: Tensor, rows: Sequence[Tensor]) -> None:
        self._gathered, self._staged, self._rows = gathered, staged, rows

    def wait(self) -> None:
        self._gathered.wait()
        pieces = torch.split(self._staged, [row.shape[1] for row in self._rows], dim=1)
        for row, piece in zip(self._rows, pieces, strict=True):
            row.copy_(piece)
        self._rows = ()


def stage(rows: Sequence[Tensor], rank: int) -> Tensor:
    """One contiguous buffer (size, sum of n_i) for several rows to gather, filled at row `rank`."""
    own = [row[rank] for row in rows]
    staged = own[0].new_empty((rows[0].shape[0], sum(part.numel() for part in own)))
    torch.cat(own, out=staged[rank])
    return staged
