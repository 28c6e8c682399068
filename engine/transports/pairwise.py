"""Collectives on the CPU made of messages from each rank to each other.

Slices go straight to their owner and are added there in rank order. gloo's own reduce-scatter moves as much as an
all-reduce and takes twice its time. Adding in rank order makes a sum independent of how parameters were put into
buckets. How a message travels is the carrier's: see `sockets` and `shared`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.transports.base import Pending, PendingSum, Unstage, stage

_PIECE = 1 << 16
"""Elements that are converted and added at once: their fp32 copies stay in the cache."""


class Message(Protocol):
    """One rank's tensor on its way to this one."""

    def wait(self) -> Tensor:
        """The tensor: in its destination, or where the sender has it and then good until `Carrier.release`."""


class Carrier(Protocol):
    """Takes messages to the other ranks."""

    def staged(self, values: Tensor) -> Tensor:
        """A few numbers, in memory that messages are best sent from and that is theirs alone."""

    def sends_in_place(self, values: Tensor) -> bool:
        """Whether a message from this memory costs no copy."""

    def exchange(self, to_peers: Sequence[Tensor], destinations: Sequence[Tensor] | None = None) -> list[Message]:
        """Send one tensor to each other rank and expect one alike from each.

        Args:
            to_peers: to the ranks after this one, in that order and round.
            destinations: for what comes, in the order of the ranks before this one, backwards and round; fresh memory
                when None.

        Returns:
            Messages in the order of `destinations`.
        """

    def release(self, memory: Tensor, *, keep: bool = False) -> None:
        """This rank has read what it was sent in exchange for what it sends from this memory.

        Args:
            keep: it goes on using the memory itself.
        """


class PairwiseTransport:
    """The collectives, by whichever carrier."""

    def __init__(self, carrier: Carrier, *, size: int, rank: int) -> None:
        self.carrier, self.size, self.rank = carrier, size, rank
        self._peers = [(rank + step) % size for step in range(1, size)]
        self._sources = [(rank - step) % size for step in range(1, size)]

    def reduce_scatter(self, full: Tensor, *, dtype: torch.dtype) -> PendingSum:
        return _SliceSum(self, full, dtype=dtype)

    def all_reduce(self, full: Tensor, *, dtype: torch.dtype) -> PendingSum:
        if full.numel() % self.size:
            raise ValueError(f"{full.numel()} elements cannot be divided among {self.size} ranks")
        return _WholeSum(self, full, dtype=dtype)

    def all_gather(self, rows: Sequence[Tensor]) -> Pending:
        if len(rows) > 1 and not self.carrier.sends_in_place(rows[0]):
            staged = stage(rows, self.rank)
            return Unstage(self.all_gather([staged]), staged, rows)
        return _Gather([(row, self.send_slices([row[self.rank]] * self.size, into=row)) for row in rows])

    def sum_small(self, values: Tensor) -> None:
        staged = self.carrier.staged(values.view(-1))
        self.sum(staged, self.send_slices([staged] * self.size), values.view(-1))
        self.carrier.release(staged)

    def send_slices(self, slices: Sequence[Tensor] | Tensor, into: Tensor | None = None) -> dict[int, Message]:
        """Send slice number p to rank p; messages by the rank they come from, which go to the rows of `into`."""
        messages = self.carrier.exchange([slices[peer] for peer in self._peers],
                                          None if into is None else [into[source] for source in self._sources])
        return dict(zip(self._sources, messages, strict=True))

    def sum(self, own: Tensor, messages: dict[int, Message], out: Tensor) -> Tensor:
        """The sum of this rank's and all others' slices, in rank order; `out` may be `own`."""
        parts = {self.rank: own, **{source: message.wait() for source, message in messages.items()}}
        return sum_in_order([parts[rank] for rank in range(self.size)], out)


class _Sum:
    """Every rank has its slice of everyone's tensor on its way to it."""

    def __init__(self, transport: PairwiseTransport, full: Tensor, *, dtype: torch.dtype) -> None:
        self._transport, self._full, self._dtype = transport, full, dtype
        self._slices = full.view(transport.size, -1)
        self._own = self._slices[transport.rank]
        self._messages = transport.send_slices(self._slices)


class _SliceSum(_Sum):
    def wait(self) -> Tensor:
        total = self._transport.sum(self._own, self._messages, torch.empty_like(self._own, dtype=self._dtype))
        self._transport.carrier.release(self._full)
        return total


class _WholeSum(_Sum):
    """Each rank sums its slice and sends the sum to the others; in place where dtypes agree."""

    def wait(self) -> Tensor:
        transport, own = self._transport, self._own
        transport.sum(own, self._messages, own)
        in_place = own.dtype == self._dtype
        total = self._slices if in_place else torch.empty_like(self._slices, dtype=self._dtype)
        if not in_place:
            total[transport.rank] = own
        sums = transport.send_slices([own] * transport.size, into=total if in_place else None)
        _Gather([(total, sums)]).wait()
        transport.carrier.release(self._full, keep=in_place)
        return total.view(-1)


class _Gather:
    def __init__(self, gathered: Sequence[tuple[Tensor, dict[int, Message]]]) -> None:
        self._gathered = gathered

    def wait(self) -> None:
        for rows, messages in self._gathered:
            for source, message in messages.items():
                came = message.wait()
                if came.data_ptr() != rows[source].data_ptr():
                    rows[source].copy_(came)
        self._gathered = ()


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Sum (n,) tensors of one dtype into `out`, which may be one of them, rounding once."""
    first, second, *others = parts
    if first.dtype == out.dtype and not others:
        return torch.add(first, second, out=out)
    for start in range(0, out.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        # Converting first and adding in fp32 is several times faster on CPU than adding mixed dtypes.
        wide = first[piece].to(torch.float32, copy=True)
        for part in (second, *others):
            wide.add_(part[piece].to(torch.float32))
        out[piece] = wide
    return out
