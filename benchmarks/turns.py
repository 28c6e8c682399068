"""Engines that are all alive and take turns, so that all see the same machine."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch.distributed as dist


class Seconds(NamedTuple):
    """Of one step in a turn. CPU time is user and system time of the process with all of its threads."""

    wall: float
    cpu: float


def take_turns(steps: Mapping[str, Callable[[], object]], *, rounds: int, steps_per_turn: int
               ) -> dict[str, list[Seconds]]:
    """Every engine's seconds per step, by round; each round begins with another one. Collective.

    Args:
        steps: takes one step, by engine; called once before anything is measured.
    """
    names = list(steps)
    for step in steps.values():
        step()
    seconds: dict[str, list[Seconds]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps_per_turn):
                steps[name]()
            seconds[name].append(Seconds((time.perf_counter() - wall) / steps_per_turn,
                                         (time.process_time() - cpu) / steps_per_turn))
    return seconds


def middle(rounds: Sequence[Seconds]) -> Seconds:
    """Medians over the rounds."""
    return Seconds(median(turn.wall for turn in rounds), median(turn.cpu for turn in rounds))


def ratio(rounds: Sequence[Seconds], base: Sequence[Seconds]) -> Seconds:
    """Medians of the ratios within a round, which a machine that slows down for a while hardly moves."""
    return middle([Seconds(mine.wall / theirs.wall, mine.cpu / theirs.cpu)
                   for mine, theirs in zip(rounds, base, strict=True)])


def mean_over_ranks(results: Sequence[Mapping[str, Sequence[Seconds]]]) -> dict[str, list[Seconds]]:
    """One list of rounds for each engine, from every rank's."""
    return {name: [Seconds(sum(turn.wall for turn in turns) / len(turns), sum(turn.cpu for turn in turns) / len(turns))
                   for turns in zip(*(result[name] for result in results), strict=True)]
            for name in results[0]}
