"""Transfers beside the device's computation: nothing is read before it is there, overwritten in use, waited for early.

No device is at hand, so its streams and events are modelled: every operator of a step is an access by the host or by a
stream, ordered after others only by what CUDA orders them by. Two accesses to the same memory, one of them a write,
that nothing orders are a race, whatever values this run computed.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine import OptimizerConfig, TrainConfig
from engine.offload import HostMemory, StreamedTransfers, Transfers
from engine.trainer import Trainer, initialize
from tests.engine.test_optimizers import sign_momentum
from tests.engine.training import FEATURES, Awkward, Optimizer, built, loss_of, samples


@dataclass(frozen=True)
class Access:
    """One actor's use of some memory, at this place among all the actor did."""

    actor: str
    tick: int
    writes: bool
    what: str


@dataclass
class Event:
    after: Counter[str]
    timeline: "Timeline"

    def synchronize(self) -> None:
        self.timeline.host.seen |= self.after


@dataclass
class Actor:
    """The host or a stream.

    Attributes:
        seen: of each actor, how much is known to be done when the next thing here begins.
    """

    name: str
    timeline: "Timeline"
    seen: Counter[str] = field(default_factory=Counter)

    def wait_stream(self, other: "Actor") -> None:
        self.seen |= other.seen

    def wait_event(self, event: Event) -> None:
        self.seen |= event.after

    def record_event(self) -> Event:
        return Event(self.seen.copy(), self.timeline)

    def __enter__(self) -> "Actor":
        self.timeline.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.timeline.entered.pop()


class Timeline(TorchDispatchMode):
    """Sees every operator; `races` are pairs of accesses that nothing orders.

    Memory of `HostMemory`, and what is computed from it alone, is the host's; all that was there before the device's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host, self.main = Actor("host", self), Actor("main", self)
        self.sides: list[Actor] = []
        self.entered = [self.main]
        self.on_host: set[int] = set()
        self.pinned: set[int] = set()
        self.not_pinned_aside: list[Access] = []
        self.unplaced: set[int] = set()  # made from nothing: of either
        self.kept: set[tuple[str, int]] = set()  # for a side stream
        self.read_aside: set[tuple[str, int]] = set()
        self.accesses: dict[int, list[Access]] = {}
        self.races: list[tuple[Access, Access]] = []
        self.updates: list[Counter[str]] = []
        self.transfers: list[tuple[str, Counter[str]]] = []
        self._alive: list[torch.UntypedStorage] = []  # no address is used twice

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = operator(*arguments, **(keywords or {}))
        schema = operator._schema
        named = {argument.name: value for argument, value in zip(schema.arguments, arguments, strict=False)}
        named.update(keywords or {})
        used: list[tuple[Tensor, bool]] = []
        for argument in schema.arguments:
            changes = argument.alias_info is not None and argument.alias_info.is_write
            if changes or argument.alias_info is None:  # else it only makes a view
                used += [(tensor, changes) for tensor in _tensors(named.get(argument.name))]
        made = [tensor for returned, value in zip(schema.returns, _as_list(result), strict=False)
                if returned.alias_info is None for tensor in _tensors(value)]
        self._note(operator, used, made, blocking=not named.get("non_blocking", False))
        return result

    def _note(self, operator: Any, used: Sequence[tuple[Tensor, bool]], made: Sequence[Tensor], *,
              blocking: bool) -> None:
        places = {_place(tensor) for tensor, _ in used} - self.unplaced
        on_host, on_device = bool(places & self.on_host), bool(places - self.on_host)
        results = {_place(tensor) for tensor in (*made, *(tensor for tensor, writes in used if writes))}
        if not places:
            self.unplaced |= results
        elif on_device:
            self.unplaced -= results | {_place(tensor) for tensor, _ in used}
        else:
            self.on_host |= results
            self.unplaced -= results
        self._alive += [tensor.untyped_storage() for tensor in (*made, *(tensor for tensor, _ in used))]
        actor = self.entered[-1] if on_device else self.host
        if actor is not self.host:
            actor.seen |= self.host.seen  # issued by the host
        if actor in self.sides:
            self.transfers.append((actor.name, actor.seen.copy()))
        actor.seen[actor.name] += 1
        for tensor, writes in (*used, *((tensor, True) for tensor in made)):
            self._access(_place(tensor), Access(actor.name, actor.seen[actor.name], writes, str(operator)), actor)
        if on_host and on_device and blocking:
            self.host.seen |= actor.seen
        if on_host and not on_device and "_fused_" in str(operator):
            self.updates.append(self.host.seen.copy())

    def _access(self, place: int, access: Access, actor: Actor) -> None:
        for earlier in self.accesses.setdefault(place, []):
            if (access.writes or earlier.writes) and actor.seen[earlier.actor] < earlier.tick:
                self.races.append((earlier, access))
        self.accesses[place].append(access)
        if actor in self.sides and place not in self.on_host and not access.writes:
            self.read_aside.add((actor.name, place))
        if actor in self.sides and place in self.on_host and place not in self.pinned:
            self.not_pinned_aside.append(access)

    def new_stream(self) -> Actor:
        self.sides.append(Actor(f"side {len(self.sides)}", self))
        return self.sides[-1]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those with memory."""
    if isinstance(value, Tensor):
        if value.untyped_storage().nbytes():
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    """Trainers made now transfer on the modelled streams."""
    timeline = Timeline()
    allocate = HostMemory.empty

    def empty(host: HostMemory, numel: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        tensor = allocate(host, numel, dtype, pinned=pinned)
        (timeline.pinned.add if pinned else timeline.pinned.discard)(_place(tensor))
        timeline.unplaced.discard(_place(tensor))
        timeline.on_host.add(_place(tensor))
        return tensor

    def streamed(device: torch.device, host: HostMemory, **counts: int) -> Transfers:
        return StreamedTransfers(device, host, **counts)

    monkeypatch.setattr(HostMemory, "empty", empty)
    monkeypatch.setattr("engine.update.make_transfers", streamed)
    monkeypatch.setattr(torch, "Stream", lambda device: timeline.new_stream())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: timeline.entered[-1])
    monkeypatch.setattr(Tensor, "record_stream",
                        lambda tensor, stream: timeline.kept.add((stream.name, _place(tensor))))
    return timeline


def _step(trainer: Trainer, timeline: Timeline, number: int) -> None:
    inputs, target = samples(number)
    with timeline:
        trainer.backward(loss_of(trainer(inputs), target))
        trainer.step()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [OptimizerConfig(lr=0.01), sign_momentum], ids=["stock", "own"])
def test_no_transfer_races_with_its_neighbours(timeline: Timeline, stage: int, precision: str,
                                               optimizer: Optimizer) -> None:
    config = TrainConfig.model_validate({"zero_stage": stage, "precision": precision, "offload_optimizer_ratio": 1.0,
                                         "reduce_bucket_size": 50})
    trainer = initialize(built(Awkward), config=config, optimizer=optimizer)
    for number in range(2):
        _step(trainer, timeline, number)
    with timeline:  # as when a checkpoint is loaded
        trainer(samples(3)[0])
        trainer._update.publish()
        trainer(samples(4)[0])
    assert len(trainer._stage.buckets) > 4
    assert timeline.read_aside
    assert timeline.races == []
    # Gradients are freed when they have been used: the allocator must know that the side stream used them.
    assert timeline.read_aside <= timeline.kept
    assert timeline.not_pinned_aside == []
    assert timeline.pinned.isdisjoint(_place(part.master) for part in trainer._update.parts)
    trainer.close()


def _chain() -> nn.Module:
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(6)))


def test_a_bucket_is_updated_while_its_neighbours_are_on_their_way(timeline: Timeline) -> None:
    config = TrainConfig(zero_stage=1, precision="bf16", offload_optimizer_ratio=1.0, reduce_bucket_size=FEATURES**2)
    trainer = initialize(built(_chain), config=config, optimizer=OptimizerConfig(lr=0.01))
    _step(trainer, timeline, 0)
    timeline.updates.clear()
    timeline.transfers.clear()
    to_host, to_device = (side.name for side in timeline.sides)
    fetches, stores = (side.seen[side.name] for side in timeline.sides)
    _step(trainer, timeline, 1)
    buckets = len(trainer._stage.buckets)
    assert buckets == 6
    # In order: fetch 0, fetch 1, update 0, store 0, fetch 2, update 1, store 1, ..., store n - 1.
    for number, seen in enumerate(timeline.updates):
        assert seen[to_host] == fetches + number + 1  # the next gradients may be under way
        assert seen[to_device] == stores + max(number - 2, 0)  # as may the last two buckets' parameters
    assert len(timeline.updates) == buckets
    fetched = [seen for name, seen in timeline.transfers if name == to_host]
    stored = [seen for name, seen in timeline.transfers if name == to_device]
    assert len(fetched) == len(stored) == buckets
    for number, seen in enumerate(fetched):
        assert seen[to_device] == stores + max(number - 3, 0)  # of number - 1 that were issued
    for number, seen in enumerate(stored):
        assert seen[to_host] == fetches + number + 1  # of number + 2 that were issued
    trainer.close()
