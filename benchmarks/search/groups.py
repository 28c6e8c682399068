"""Published measurements as search problems: inside a group of `benchmarks.replay` only the configuration differs.

Degrees of tensor, data and pipeline parallelism vary beside the micro-batch, which the engine's own configurations do
not have; so samplers are asked here as `suggest` asks them, but over the group's runs.
"""

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from autotune.domain.request import Sampler
from autotune.search.arrays import Levels, make_arrays
from autotune.search.guided import POINT, GuidedSampler
from autotune.search.history import DEVICE_MEMORY, FAILURE, HOST_MEMORY
from autotune.search.knobs import positions
from benchmarks.replay import Group, Run

LEAST_RUNS = 10
TRIALS = 5
_SEEDS: dict[Sampler, int] = {"random": 10, "tpe": 10, "gp": 2}
_STARTUP_TRIALS = 2

Values = Sequence[tuple[int, ...]]


def regrets(group: Group, sampler: Sampler) -> list[float]:
    """By number of trials less 1, up to `TRIALS`: how much longer the best step tried takes than the group's best; for
    samplers that draw, the mean over some seeds."""
    seconds = [run.measured_seconds for run in group.runs]
    orders = [_order(group, sampler, seed) for seed in range(_SEEDS.get(sampler, 1))]
    return [fmean(min(seconds[point] for point in order[:count]) for order in orders) / min(seconds) - 1
            for count in range(1, len(orders[0]) + 1)]


def rule_regret(group: Group) -> float:
    """Of the one run that the rule "most data parallelism, then the largest micro-batch" picks."""
    picked = max(group.runs, key=lambda run: (_data(run), run.config.micro_batch_size))
    return picked.measured_seconds / min(run.measured_seconds for run in group.runs) - 1


def _order(group: Group, sampler: Sampler, seed: int) -> list[int]:
    """The first of the group's runs that a sampler tries."""
    seconds = [run.measured_seconds for run in group.runs]
    order: list[int] = []
    while len(order) < min(TRIALS, len(seconds)):
        match sampler:
            case "guided":
                order.append(_guided_next(group, order))
            case "grid":
                order.append(len(order))
            case _:
                order.append(_next(_values(group), seconds, order, _sampler(sampler, seed * 1000 + len(order))))
    return order


def _guided_next(group: Group, order: Sequence[int]) -> int:
    runs = group.runs
    knobs = []
    for name, column in zip(_NAMES, zip(*_values(group), strict=True), strict=True):
        levels = sorted(set(column))
        if len(levels) > 1:
            knobs.append(Levels(name=name, at=positions(levels), count=len(levels),
                                level=np.array([levels.index(value) for value in column], dtype=np.intp)))
    arrays = make_arrays(knobs, [run.predict().seconds for run in runs])
    is_open = np.array([point not in order for point in range(len(runs))])
    study = optuna.create_study(direction="maximize", sampler=GuidedSampler(arrays, is_open, 1.0))
    distributions: dict[str, BaseDistribution] = {POINT: IntDistribution(0, len(runs) - 1)}
    for point in order:
        study.add_trial(create_trial(
            state=TrialState.COMPLETE, value=1 / runs[point].measured_seconds, params={POINT: point},
            distributions=distributions, constraints={DEVICE_MEMORY: -0.5, HOST_MEMORY: -0.5, FAILURE: 0.0}))
    return int(study.ask(distributions).params[POINT])


def _next(values: Values, seconds: Sequence[float], order: Sequence[int], sampler: BaseSampler) -> int:
    """What one of Optuna's samplers proposes, or the nearest run that was not tried."""
    distributions: dict[str, BaseDistribution] = {
        name: IntDistribution(0, max(column)) for name, column in zip(_NAMES, zip(*values, strict=True), strict=True)}
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for point in order:
        study.add_trial(create_trial(state=TrialState.COMPLETE, value=1 / seconds[point], distributions=distributions,
                                     params=dict(zip(_NAMES, values[point], strict=True))))
    asked = study.ask(distributions).params
    left = [point for point in range(len(values)) if point not in order]
    return min(left, key=lambda point: sum(abs(asked[name] - value)
                                           for name, value in zip(_NAMES, values[point], strict=True)))


_NAMES = ("tensor_parallel", "data_parallel", "pipeline_parallel", "micro_batch_size")


def _values(group: Group) -> Values:
    """Of every run, logarithms to base 2 of what `_NAMES` says."""
    return [tuple(round(math.log2(value)) for value in
                  (run.parallel.tensor, _data(run), run.parallel.pipeline, run.config.micro_batch_size))
            for run in group.runs]


def _data(run: Run) -> int:
    return run.parallel.data(run.hardware.world_size)


def _sampler(name: Sampler, seed: int) -> BaseSampler:
    match name:
        case "tpe":
            return TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
        case "gp":
            return GPSampler(seed=seed, n_startup_trials=_STARTUP_TRIALS, warn_independent_sampling=False)
        case _:
            return RandomSampler(seed=seed)
