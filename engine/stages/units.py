"""What stage 3 gathers and releases together, and the one order it does so in on every rank."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.buckets import Bucket, GatherBatch, ManagedParameter, gather_batches, lay_out
from engine.transports.base import Pending


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and released together: a block's, or all that lie in no block (the root).

    Attributes:
        index: 0 for the root, then in the order of the blocks.
        fulls: the gathered buckets (size,) by bucket index, while live.
        arriving: all-gathers that fill them.
        holders: forwards that are running and use it; its parameters are bound meanwhile.
    """

    index: int
    trainable: tuple[Bucket, ...]
    frozen: tuple[Bucket, ...]
    batches: tuple[GatherBatch, ...]
    fulls: dict[int, Tensor] | None = None
    arriving: tuple[Pending, ...] = ()
    holders: int = 0

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.trainable + self.frozen

    @property
    def size(self) -> int:
        """Elements."""
        return sum(bucket.size for bucket in self.buckets)

    def bind(self, fulls: dict[int, Tensor]) -> None:
        """Make the parameters views of the gathered buckets."""
        for bucket in self.buckets:
            bucket.bind(fulls[bucket.index])

    def unbind(self) -> None:
        """Leave the parameters their shape, and NaN in place of values: whoever reads them now finds out."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                parameter = slot.managed.parameter
                nan = torch.full((), float("nan"), dtype=bucket.dtype, device=parameter.device)
                parameter.data = nan.expand(slot.shape)

    def wait(self) -> dict[int, Tensor]:
        """The gathered buckets, filled."""
        assert self.fulls is not None
        for pending in self.arriving:
            pending.wait()
        self.arriving = ()
        return self.fulls


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


class Schedule:
    """The order of gathers and reductions in one pass, which is the same on every rank whatever its graph needs.

    Reaching a unit issues the gathers of all units before it too, so that a rank which does not use them still serves
    the others; and ends with those that were never reached. A rank waits only for collectives that it has issued, and
    all ranks issue the same sequence: none can wait for ever.

    Args:
        order: every unit once.
        issue: starts gathering a unit.
        leave: called for a unit when the next one is reached.
        ahead: elements to issue beyond the unit reached.
    """

    def __init__(self, order: Iterable[Unit], *, issue: Callable[[Unit], None], leave: Callable[[Unit], None],
                 ahead: int) -> None:
        self._order = tuple(order)
        self._position = {unit.index: position for position, unit in enumerate(self._order)}
        self._issue, self._leave, self._ahead = issue, leave, ahead
        self._reached = -1
        self._issued = 0

    @property
    def current(self) -> Unit | None:
        """The unit reached last; between two reaches nothing but its own reductions is issued."""
        return self._order[self._reached] if self._reached >= 0 else None

    def reach(self, unit: Unit) -> None:
        """Issue everything up to this unit; nothing where it was reached before."""
        self._advance(self._position[unit.index])

    def finish(self) -> None:
        """Issue and leave the rest."""
        self._advance(len(self._order) - 1)
        self._leave(self._order[-1])

    def _advance(self, position: int) -> None:
        while self._reached < position:
            if self._reached >= 0:
                self._leave(self._order[self._reached])
            self._reached += 1
            budget = self._ahead
            last = self._reached
            while last + 1 < len(self._order) and self._order[last + 1].size <= budget:
                last += 1
                budget -= self._order[last].size
            while self._issued <= last:
                self._issue(self._order[self._issued])
                self._issued += 1
