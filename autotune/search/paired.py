"""How much faster one trial is than another, from rounds in which both were measured. Pure.

A machine drifts by more than good configurations differ, so finalists are measured again in interleaved rounds. What
slows a whole round cancels where the trials of that round are compared: the logarithm of a mean step time is the sum of
an effect of the trial, an effect of the round and a rest (a randomised block design; Montgomery, Design and Analysis of
Experiments, chapter 4). The rest is estimated over all trials and rounds together, since two rounds alone say nothing
of how far they scatter.
"""

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np

from autotune.domain.study import Trial
from autotune.domain.throughput import is_valid, may_win
from engine.report import Measurement
from engine.statistics import robust_error, robust_mean, t_quantile


class Gain(NamedTuple):
    """Throughput of one trial over another's, with its 95 % confidence interval."""

    ratio: float
    interval: tuple[float, float]

    @property
    def is_shown(self) -> bool:
        """Whether the two differ for sure."""
        return not self.interval[0] <= 1 <= self.interval[1]


class Rounds:
    """The repeats of several trials: the k-th of each was measured in the k-th round."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        runs = [(trial.number, number, run) for trial in trials if may_win(trial)
                for number, run in enumerate(trial.repeats) if is_valid(run)]
        self._trials = sorted({number for number, _, _ in runs})
        self._rounds = {number: {place for each, place, _ in runs if each == number} for number in self._trials}
        if not runs:
            return
        rounds = sorted({place for _, place, _ in runs})
        design = np.zeros((len(runs), len(self._trials) + len(rounds)))
        for row, (number, place, _) in enumerate(runs):
            design[row, self._trials.index(number)] = 1
            design[row, len(self._trials) + rounds.index(place)] = 1
        logs = np.array([math.log(robust_mean(run.step_seconds)) for _, _, run in runs])
        self._spread = np.linalg.pinv(design.T @ design)
        self._effects = self._spread @ design.T @ logs
        self._freedom = len(runs) - int(np.linalg.matrix_rank(design))
        if self._freedom > 0:
            rest = float(((logs - design @ self._effects) ** 2).sum()) / self._freedom
            self._variance = max(rest, fmean(_within(run) for _, _, run in runs))

    def gain(self, number: int, other: int) -> Gain | None:
        """Throughput of the first trial over the second's; None where they share fewer than two rounds."""
        if len(self._rounds.get(number, set()) & self._rounds.get(other, set())) < 2:
            return None
        contrast = np.zeros(len(self._effects))
        contrast[self._trials.index(other)] += 1
        contrast[self._trials.index(number)] -= 1
        log = float(contrast @ self._effects)
        error = math.sqrt(self._variance * float(contrast @ self._spread @ contrast))
        half = t_quantile(0.975, self._freedom) * error
        return Gain(math.exp(log), (math.exp(log - half), math.exp(log + half)))


class Scatter(NamedTuple):
    """How far measurements of one trial lie apart.

    Attributes:
        deviation: of the logarithm of a measurement's mean step time.
        freedom: degrees of freedom of that estimate; 0: nothing is known.
    """

    deviation: float
    freedom: int

    def error(self, count: int, other: int) -> float:
        """Half the 95 % confidence interval of the logarithm of a ratio of two trials with so many measurements."""
        if not self.freedom:
            return 0.0
        return t_quantile(0.975, self.freedom) * self.deviation * math.sqrt(1 / count + 1 / other)


def scatter(trials: Sequence[Trial]) -> Scatter:
    """Over all trials that were measured again: a machine drifts, so that one measurement, however even its steps,
    says less of the next."""
    squares, freedom = 0.0, 0
    for trial in trials:
        logs = [math.log(robust_mean(run.step_seconds)) for run in trial.measurements if is_valid(run)]
        if may_win(trial) and len(logs) > 1:
            squares += variance(logs) * (len(logs) - 1)
            freedom += len(logs) - 1
    return Scatter(math.sqrt(squares / freedom) if freedom else 0.0, freedom)


def _within(run: Measurement) -> float:
    """Variance of the logarithm of a run's mean step time, from the scatter of its steps."""
    steps = run.step_seconds
    return (robust_error(steps) / robust_mean(steps)) ** 2 if len(steps) > 1 else 0.0
