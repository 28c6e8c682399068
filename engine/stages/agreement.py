"""How ranks that gather together find out that one of them needs more, or does something else."""

import datetime
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.collectives import Ranks

_TIMEOUT = datetime.timedelta(hours=24)
"""A slow rank is no failure; deadlines are the launcher's affair."""


class Point(IntEnum):
    """Where a rank stands."""

    FORWARD = 0
    BACKWARD = 1
    STEP = 2
    END = 3
    """Of a forward or backward."""


@dataclass(frozen=True)
class Votes:
    """What the ranks said.

    Attributes:
        points: for each `Point`, the ranks that stand there.
        asked: the units that ranks ask for, ascending.
        flags: which some rank has raised.
    """

    points: list[int]
    asked: list[int]
    flags: list[bool]

    def differ(self) -> RuntimeError:
        """The error for ranks that do different things."""
        stand = " and ".join(f"{count} in {point.name.lower()}" for point, count in zip(Point, self.points, strict=True)
                             if count)
        return RuntimeError(f"at zero_stage 3 all ranks work together, and now they do different things: of "
                            f"{sum(self.points)} ranks, {stand}; call backward and step as often on every rank")


class Agreement:
    """Votes of all ranks, through host memory: the device is not stopped.

    Args:
        units: that may be asked for.
        flags: that are counted.
    """

    def __init__(self, ranks: Ranks, *, units: int, flags: int) -> None:
        self._ranks, self._units, self._flags = ranks, units, flags
        self._own: dist.ProcessGroup | None = None
        if ranks.size > 1 and not ranks.has_host_transport and dist.is_gloo_available():
            own = dist.new_group(backend="gloo", timeout=_TIMEOUT)  # of all processes, as `ranks` are
            assert isinstance(own, dist.ProcessGroup)
            self._own = own

    def vote(self, choice: Point | int, *, is_unit: bool = False, flags: list[bool] | None = None) -> Votes:
        """Say where this rank stands, or which unit it asks for, and hear the same of all. Collective."""
        votes = torch.zeros(len(Point) + self._units + self._flags)
        votes[len(Point) + choice if is_unit else choice] = 1
        if flags is not None:
            votes[len(Point) + self._units:] = torch.tensor(flags)
        votes = self._sum(votes)
        points, asked, raised = torch.split(votes, [len(Point), self._units, self._flags])
        return Votes([int(count) for count in points.tolist()], asked.nonzero().flatten().tolist(),
                     [count > 0 for count in raised.tolist()])

    def is_same(self, value: Any) -> bool:
        """Whether all ranks have an equal value. Collective."""
        if self._ranks.size == 1:
            return True
        values: list[Any] = [None] * self._ranks.size
        dist.all_gather_object(values, value, group=self._own or self._ranks.group)
        return all(other == value for other in values)

    def close(self) -> None:
        if self._own is not None and dist.is_initialized():
            dist.destroy_process_group(self._own)
        self._own = None

    def _sum(self, votes: Tensor) -> Tensor:
        if self._ranks.size == 1:
            return votes
        if self._own is not None:
            dist.all_reduce(votes, group=self._own)
            return votes
        return self._ranks.sum_small(votes if self._ranks.has_host_transport else votes.to(self._ranks.device))
