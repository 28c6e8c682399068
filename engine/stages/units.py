"""What stage 3 gathers and releases together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from engine.buckets import Bucket, GatherBatch, ManagedParameter, gather_batches, lay_out


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered and released together: a block's, or all that lie in no block (the root).

    Attributes:
        index: 0 for the root, then in the order of the blocks.
        batches: the all-gathers that bring it.
    """

    index: int
    trainable: tuple[Bucket, ...]
    frozen: tuple[Bucket, ...]
    batches: tuple[GatherBatch, ...]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.trainable + self.frozen

    @cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(slot.managed.parameter for bucket in self.buckets for slot in bucket.slots)

    @cached_property
    def size(self) -> int:
        """Elements."""
        return sum(bucket.size for bucket in self.buckets)

    def bind(self, fulls: dict[int, Tensor]) -> None:
        """Make the parameters views of the gathered buckets, which are given by bucket index."""
        for bucket in self.buckets:
            bucket.bind(fulls[bucket.index])

    def placeholders(self, device: torch.device) -> list[Tensor]:
        """For each parameter NaN in its shape, which takes no memory."""
        nan = torch.full((), float("nan"), device=device)
        nans = {bucket.dtype: nan.to(bucket.dtype) for bucket in self.buckets}
        return [nans[bucket.dtype].expand(slot.shape) for bucket in self.buckets for slot in bucket.slots]


@dataclass(frozen=True)
class UnitLayout:
    """All units, and which of them each block's forward needs."""

    units: tuple[Unit, ...]
    needs: tuple[tuple[Unit, ...], ...]


def lay_out_units(module: nn.Module, parameters: Sequence[ManagedParameter], blocks: Sequence[nn.Module], *,
                  bucket_size: int, gather_size: int, world_size: int) -> UnitLayout:
    """Assign every parameter to a unit.

    A parameter that several blocks share belongs to the first of them, one that is also used outside of all blocks to
    the root.
    """
    home = _homes(module, blocks)
    members: list[list[ManagedParameter]] = [[] for _ in range(len(blocks) + 1)]
    for managed in parameters:
        members[home[managed.parameter]].append(managed)
    # Trainable buckets are numbered in the order gradients come in: last block first, the root at the end.
    layouts = {}
    next_index = 0
    for number in [*range(len(blocks), 0, -1), 0]:
        layouts[number] = lay_out([managed for managed in reversed(members[number]) if managed.trainable],
                                  bucket_size=bucket_size, world_size=world_size, first_index=next_index)
        next_index += len(layouts[number])
    units = []
    for number, managed_here in enumerate(members):
        frozen = lay_out([managed for managed in managed_here if not managed.trainable], bucket_size=bucket_size,
                         world_size=world_size, first_index=next_index)
        next_index += len(frozen)
        buckets = [*layouts[number], *frozen]
        units.append(Unit(number, tuple(layouts[number]), tuple(frozen), gather_batches(buckets, limit=gather_size)))
    needs = tuple(tuple(units[number] for number in sorted({home[parameter] for parameter in block.parameters()
                                                            if parameter in home}))
                  for block in blocks)
    return UnitLayout(tuple(units), needs)


def _homes(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Parameter, int]:
    """The number of the unit of each parameter: 0 for the root."""
    block_of = {inner: number for number, block in enumerate(blocks, start=1) for inner in block.modules()}
    home: dict[nn.Parameter, int] = {}
    for inner in module.modules():
        number = block_of.get(inner, 0)
        for parameter in inner.parameters(recurse=False):
            home[parameter] = min(home.get(parameter, number), number)
    return home
