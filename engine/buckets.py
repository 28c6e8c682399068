"""How parameters are laid out: flat, padded buckets, the same on every rank.

A bucket of `size` elements is cut into one equal shard per rank, so that a shard may begin or end inside a parameter.
What a rank keeps of a bucket (parameters, gradients, optimizer states) is the stage's choice.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

ALIGNMENT = 16
"""Parameters and shards begin at multiples of this many elements: a cache line in fp32.

So wherever a parameter is cut, each element meets the same vector or scalar path of a fused fp32 optimizer kernel, and
weights do not depend on bucket sizes in any bit.
"""

SMALLEST_CUT = 4096
"""Elements below which cutting a bucket into several all-gathers costs latency and saves nothing."""


@dataclass(frozen=True, eq=False)
class ManagedParameter:
    """A parameter that the engine lays out.

    Attributes:
        index: position among all managed parameters, in the module's order.
        name: as in the module's state dict; the first one where it is tied.
        dtype: in compute.
    """

    index: int
    name: str
    parameter: nn.Parameter
    dtype: torch.dtype

    @property
    def trainable(self) -> bool:
        return self.parameter.requires_grad


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter's place in its bucket."""

    managed: ManagedParameter
    shape: torch.Size
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's shape over its elements of a full bucket (size,)."""
        return flat[self.offset:self.end].view(self.shape)


@dataclass(frozen=True, eq=False)
class Run:
    """Elements [start, stop) of a flattened parameter, and their place in the range of a bucket that was asked for."""

    managed: ManagedParameter
    start: int
    stop: int
    place: slice


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters of one dtype that are reduced together; all trainable or all frozen."""

    index: int
    slots: tuple[Slot, ...]
    size: int
    world_size: int
    dtype: torch.dtype
    trainable: bool

    @property
    def shard_size(self) -> int:
        return self.size // self.world_size

    def shard(self, rank: int) -> slice:
        return slice(rank * self.shard_size, (rank + 1) * self.shard_size)

    @cached_property
    def gaps(self) -> tuple[slice, ...]:
        """Elements that belong to no parameter."""
        edges = [0, *(edge for slot in self.slots for edge in (slot.offset, slot.end)), self.size]
        return tuple(slice(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)

    def runs(self, first: int, last: int) -> list["Run"]:
        """What elements [first, last) of the bucket are of its parameters; padding left out."""
        runs = []
        for slot in self.slots:
            start, stop = max(slot.offset, first), min(slot.end, last)
            if start < stop:
                place = slice(start - first, stop - first)
                runs.append(Run(slot.managed, start - slot.offset, stop - slot.offset, place))
        return runs

    def fill(self, flat: Tensor) -> None:
        """Copy the parameters' present values into `flat` (size,), zeros between them."""
        for gap in self.gaps:
            flat[gap].zero_()
        for slot in self.slots:
            slot.view(flat).copy_(slot.managed.parameter.detach())

    def bind(self, flat: Tensor) -> None:
        """Make the parameters views of `flat` (size,)."""
        for slot in self.slots:
            slot.managed.parameter.data = slot.view(flat)


def lay_out(parameters: Iterable[ManagedParameter], *, bucket_size: int, world_size: int,
            first_index: int = 0) -> list[Bucket]:
    """Put parameters into buckets of at most `bucket_size` elements, in the order given.

    A parameter larger than that has a bucket of its own. Dtypes, and trainable and frozen parameters, do not mix;
    buckets come in the order in which they are complete.
    """
    groups: list[list[ManagedParameter]] = []
    open_: dict[tuple[torch.dtype, bool], list[ManagedParameter]] = {}
    filled: dict[tuple[torch.dtype, bool], int] = {}
    for managed in parameters:
        key, numel = (managed.dtype, managed.trainable), managed.parameter.numel()
        if key in open_ and filled[key] + numel > bucket_size:
            groups.append(open_.pop(key))
        if key not in open_:
            open_[key], filled[key] = [], 0
        open_[key].append(managed)
        filled[key] += numel
    groups += open_.values()
    return [_bucket(group, index=first_index + position, world_size=world_size)
            for position, group in enumerate(groups)]


def _bucket(members: Sequence[ManagedParameter], *, index: int, world_size: int) -> Bucket:
    slots, offset = [], 0
    for managed in members:
        numel = managed.parameter.numel()
        slots.append(Slot(managed, managed.parameter.shape, offset, numel))
        offset += _round_up(numel, ALIGNMENT)
    size = _round_up(max(offset, 1), ALIGNMENT * world_size)
    return Bucket(index=index, slots=tuple(slots), size=size, world_size=world_size, dtype=members[0].dtype,
                  trainable=members[0].trainable)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, eq=False)
class GatherBatch:
    """What one all-gather completes: columns [start, stop) of the shards of each of its buckets."""

    pieces: tuple[tuple[Bucket, int, int], ...]

    def rows(self, fulls: dict[int, Tensor]) -> list[Tensor]:
        """The pieces as (world_size, n_i) views of the full buckets, given by bucket index."""
        return [fulls[bucket.index].view(bucket.world_size, -1)[:, start:stop] for bucket, start, stop in self.pieces]

    @property
    def last(self) -> Bucket:
        return self.pieces[-1][0]


def gather_batches(buckets: Sequence[Bucket], *, limit: int) -> tuple[GatherBatch, ...]:
    """Group buckets, in order, into all-gathers of at most `limit` elements; larger buckets are cut into several.

    A limit below `SMALLEST_CUT` groups as asked but cuts no finer than that.
    """
    return tuple(_batches(buckets, limit))


def _batches(buckets: Sequence[Bucket], limit: int) -> Iterator[GatherBatch]:
    together: list[Bucket] = []
    for bucket in buckets:
        size = sum(other.size for other in together)
        if together and (size + bucket.size > limit or bucket.dtype != together[0].dtype):
            yield GatherBatch(tuple((other, 0, other.shard_size) for other in together))
            together = []
        if bucket.size > limit:
            width = max(limit, SMALLEST_CUT) // bucket.world_size
            for start in range(0, bucket.shard_size, width):
                yield GatherBatch(((bucket, start, min(start + width, bucket.shard_size)),))
        else:
            together.append(bucket)
    if together:
        yield GatherBatch(tuple((other, 0, other.shard_size) for other in together))
