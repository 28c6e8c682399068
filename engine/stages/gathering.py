"""Stage 3's gathering: whole parameters while something reads them, and the same collectives on every rank.

A forward or backward is a pass. It follows a schedule. A rank that needs a unit whose turns are over asks for it, and
those that stand before the next pass or the step gather it too. The first pass, and those after one in which ranks
asked, end together: no rank goes on while another needs more, and where all used the same units in the same order, that
becomes the schedule.

What autograd saves of gathered memory for backward is replaced by a note of which unit it is part of, so that nothing
gathered survives its use. The memory itself lives as long as any tensor refers to it: releasing early is never wrong,
only slower.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.collectives import Ranks
from engine.errors import RANK_FAILURES
from engine.stages.agreement import Agreement, Point, Votes
from engine.stages.on_demand import OnDemand
from engine.stages.schedule import Schedule
from engine.stages.units import Unit
from engine.transports.base import Pending

_KEPT = 2
"""Units that stay gathered outside of forward: the one being differentiated, and the one used before, which may share
parameters with it. In forward it is one."""


@dataclass(frozen=True)
class _Saved:
    """In place of a tensor that autograd would save: where to find it again."""

    unit: Unit
    bucket: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Gathered:
    """A unit's buckets (size,) by index, and what fills them.

    Not to be dropped before it was waited for: what fills them may run on streams that the allocator does not know of.
    """

    def __init__(self, fulls: dict[int, Tensor], arriving: Sequence[Pending]) -> None:
        self.fulls, self._arriving = fulls, arriving

    def wait(self) -> dict[int, Tensor]:
        for pending in self._arriving:
            pending.wait()
        self._arriving = ()
        return self.fulls


class _Upload:
    """Copies from the host on a stream of their own, and what was issued to follow them."""

    def __init__(self, device: torch.device, done: torch.Event) -> None:
        self._device, self._done = device, done

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._done)


class Gathering:
    """Gathers units for those that read their parameters.

    Args:
        shards: this rank's part of each bucket, by index.
        ahead: elements to gather before they are needed.
        flags: that are agreed on before a step.
    """

    def __init__(self, units: Sequence[Unit], shards: dict[int, Tensor], *, ranks: Ranks, ahead: int,
                 flags: int) -> None:
        self._units, self._shards, self._ranks, self._ahead = units, shards, ranks, ahead
        self._unit_of = {parameter: unit for unit in units for parameter in unit.parameters}
        root, *blocks = units
        self._orders = {Point.FORWARD: [root, *blocks], Point.BACKWARD: [root, *reversed(blocks)]}
        self._pass: Point | None = None
        self._schedule: Schedule | None = None
        self._history: list[int] = []  # units that this pass needed gathered
        self._asked = False  # whether some rank asked in this pass
        self._ends_together = True  # whether the next pass does
        self._gathered: dict[int, _Gathered] = {}
        self._used: OrderedDict[int, Unit] = OrderedDict()  # and still gathered, least recently used first
        self._holders = dict.fromkeys(range(len(units)), 0)
        self._live: dict[int, tuple[Unit, int]] = {}  # unit and bucket by the address of gathered memory
        uploads = ranks.device.type != "cpu" and any(shard.device != ranks.device for shard in shards.values())
        self._uploads = torch.Stream(ranks.device) if uploads else None
        self._agreement = Agreement(ranks, units=len(units), flags=flags)
        self._placeholders = [unit.placeholders(ranks.device) for unit in units]
        self._bound = set(range(len(units)))
        for unit in units:
            self._unbind(unit)
        self._on_demand = OnDemand(self._unit_of, self._reading)

    @property
    def in_pass(self) -> bool:
        return self._pass is not None

    @property
    def bytes(self) -> int:
        """Of gathered memory."""
        return sum(full.nbytes for gathered in self._gathered.values() for full in gathered.fulls.values())

    def is_last_turn_of(self, unit: Unit) -> bool:
        """Whether nothing but this unit's own collectives is issued now, and it has no turn after this one."""
        return self._schedule is not None and self._schedule.is_last_turn_of(unit)

    # Passes

    @contextmanager
    def running(self, point: Point, *, leave: Callable[[Unit, bool], None] = lambda unit, is_last: None,
                finish: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Surrounds a forward or backward. Collective.

        A pass that fails on one rank still does its part for the others before the error goes on.

        Args:
            leave: called when a unit's turn is over, with whether it was the last.
            finish: called when all turns are over.
        """
        alone = self.meet(point) is None
        ends_together = self._ends_together and not alone

        def left(unit: Unit, is_last: bool) -> None:
            leave(unit, is_last)
            if unit.index not in self._used:
                self.release(unit)

        self._pass, self._history, self._asked = point, [], False
        try:
            self._schedule = Schedule(() if alone else self._orders[point], issue=self._issue, leave=left,
                                      finish=finish, ahead=self._ahead)
            try:
                yield
            except BaseException:
                with suppress(*RANK_FAILURES):  # as where others failed too: this rank's own error tells more
                    self._end(together=ends_together)
                raise
            self._end(together=ends_together)
        finally:
            self._pass = self._schedule = None

    def meet(self, point: Point, flags: list[bool] | None = None) -> Votes | None:
        """Wait until all ranks stand at this point, and meanwhile gather what others ask for. Collective.

        Returns:
            The ranks' flags with it; None where only some begin a forward, which the others wait for.

        Raises:
            RuntimeError: the ranks do different things. On every rank.
        """
        while True:
            votes = self._agreement.vote(point, flags=flags)
            self._bring(votes.asked)
            if votes.asked:
                continue
            if votes.points[point] == self._ranks.size:
                if point is not Point.END:
                    self.release_all()
                return votes
            if point is Point.FORWARD:
                return None
            if not votes.points[Point.FORWARD]:
                raise votes.differ()

    def _end(self, *, together: bool) -> None:
        assert self._schedule is not None
        assert self._pass is not None
        self._schedule.finish()
        if together:
            self.meet(Point.END)
            if self._asked and self._agreement.is_same(self._history):
                self._learn(self._orders[self._pass])
            self._ends_together = self._asked
        self.release_all()

    def _learn(self, order: list[Unit]) -> None:
        """What this pass used becomes the order, in place; units that it did not use come last, as they were."""
        rest = [unit for unit in dict.fromkeys(order) if unit.index not in self._history]
        order[:] = [*(self._units[index] for index in self._history), *rest]

    # Reading

    @contextmanager
    def holding(self, units: Iterable[Unit]) -> Iterator[None]:
        """Inside, parameters of the units have values, and autograd saves notes in place of them."""
        held = list(units)
        for unit in held:
            self._holders[unit.index] += 1
        try:
            for unit in held:
                fulls = self._use(unit)
                if self._holders[unit.index] == 1:
                    self._on_demand.unwatch(unit.parameters)
                if unit.index not in self._bound:
                    unit.bind(fulls)
                    self._bound.add(unit.index)
            with self._saving():
                yield
        finally:
            for unit in held:
                self._holders[unit.index] -= 1
                if not self._holders[unit.index]:
                    self._on_demand.watch(unit.parameters)

    def _reading(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        return self.holding(dict.fromkeys(self._unit_of[parameter] for parameter in parameters))

    def _use(self, unit: Unit) -> dict[int, Tensor]:
        if unit.index not in self._used:
            self._make_room()
            if self._pass is not None:
                self._history.append(unit.index)
            if self._schedule is None or not self._schedule.reach(unit):
                self._ask(unit)
            self._used[unit.index] = unit
        self._used.move_to_end(unit.index)
        return self._gathered[unit.index].wait()

    def _make_room(self) -> None:
        """For one more."""
        kept = 1 if self._pass is Point.FORWARD else _KEPT
        idle = [unit for unit in self._used.values() if not self._holders[unit.index]]
        for unit in idle[:max(len(self._used) + 1 - kept, 0)]:
            self.release(unit)

    def _ask(self, unit: Unit) -> None:
        """Have all ranks gather a unit that this one has no turn for."""
        if self._schedule is not None:
            self._schedule.finish()
        self._bring(self._agreement.vote(unit.index, is_unit=True).asked, keep=unit)

    # Gathering

    def _bring(self, asked: Iterable[int], keep: Unit | None = None) -> None:
        """Gather units that ranks asked for; only one of them is for this rank to keep."""
        for index in asked:
            self._asked = self._ends_together = True
            if self._units[index] is keep:
                self._issue(keep)
            else:
                self._gather(self._units[index]).wait()

    def _issue(self, unit: Unit) -> None:
        gathered = self._gather(unit)
        if not self._ahead or unit.index in self._gathered:
            gathered.wait()
        if unit.index not in self._gathered:  # else it is for the others
            self._gathered[unit.index] = gathered
            for index, full in gathered.fulls.items():
                self._live[full.untyped_storage().data_ptr()] = (unit, index)

    def _gather(self, unit: Unit) -> _Gathered:
        if self._ranks.size == 1 and self._uploads is None:
            return _Gathered({bucket.index: self._shards[bucket.index] for bucket in unit.buckets}, ())
        fulls = {bucket.index: torch.empty(bucket.size, dtype=bucket.dtype, device=self._ranks.device)
                 for bucket in unit.buckets}
        if self._uploads is None:
            return _Gathered(fulls, self._fill(unit, fulls))
        # The memory may have been used until now by what is queued on the current stream.
        self._uploads.wait_stream(torch.accelerator.current_stream(self._ranks.device))
        with self._uploads:
            arriving = self._fill(unit, fulls)
            return _Gathered(fulls, [*arriving, _Upload(self._ranks.device, self._uploads.record_event())])

    def _fill(self, unit: Unit, fulls: dict[int, Tensor]) -> list[Pending]:
        """Put this rank's shards in their places and start gathering the others', from the current stream on."""
        for bucket in unit.buckets:
            fulls[bucket.index][bucket.shard(self._ranks.rank)].copy_(self._shards[bucket.index], non_blocking=True)
        return [self._ranks.all_gather(batch.rows(fulls)) for batch in unit.batches]

    def release(self, unit: Unit) -> None:
        """Drop the gathered buckets; their memory goes when the last tensor that refers to it does."""
        if self._holders[unit.index] or unit.index not in self._gathered:
            return
        for full in self._gathered.pop(unit.index).wait().values():
            self._live.pop(full.untyped_storage().data_ptr(), None)
        self._used.pop(unit.index, None)
        self._unbind(unit)

    def _unbind(self, unit: Unit) -> None:
        if unit.index in self._bound:
            self._bound.remove(unit.index)
            with torch._C.DisableTorchFunctionSubclass():
                for parameter, placeholder in zip(unit.parameters, self._placeholders[unit.index], strict=True):
                    parameter.data = placeholder

    def release_all(self) -> None:
        for unit in self._units:
            self.release(unit)

    def close(self) -> None:
        if self._uploads is not None:  # their memory is given back, which may be used at once
            torch.accelerator.current_stream(self._ranks.device).wait_stream(self._uploads)
        self._on_demand.close()
        for unit in self._units:
            self._unbind(unit)
        self._gathered.clear()
        self._live.clear()
        self._used.clear()
        self._agreement.close()

    # What autograd saves

    def _saving(self) -> AbstractContextManager[Any]:
        """Hooks that save notes, unless they are there from around.

        Inside of others' hooks, a checkpoint's or such as copy to the host, those get a view of each parameter: what
        they keep of a frozen one would be the parameter itself, which loses its values.
        """
        if not torch.is_grad_enabled():
            return nullcontext()
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if around is None:
            return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        pack, unpack = around
        if getattr(pack, "__self__", None) is self or getattr(pack, "engine_detaches", False):
            return nullcontext()

        def detach_and_pack(tensor: Tensor) -> Any:
            return pack(tensor.detach() if tensor.untyped_storage().data_ptr() in self._live else tensor)

        detach_and_pack.engine_detaches = True  # type: ignore[attr-defined]
        return torch.autograd.graph.saved_tensors_hooks(detach_and_pack, unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        found = self._live.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        unit, index = found
        if tensor.dtype != self._gathered[unit.index].fulls[index].dtype:
            return tensor
        return _Saved(unit, index, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return self._use(saved.unit)[saved.bucket].as_strided(saved.size, saved.stride, saved.offset)
