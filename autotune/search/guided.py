"""`GuidedSampler`: the prediction corrected by what was measured.

The candidates are few enough to look at all of them. For each, `surrogate` says what time and memory it should need,
from the predicted terms and the trials so far, and how sure that is. Next is the candidate with the largest expected
improvement (Jones, Schonlau and Welch 1998), times the chance that a trial of it ends well, among those that all but
surely fit into memory.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna import Study
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState
from scipy.special import log_ndtr, ndtr

from autotune.search.arrays import Arrays, Place
from autotune.search.failures import log_chance_to_end_well
from autotune.search.history import DEVICE_MEMORY, FAILURE, HOST_MEMORY
from autotune.search.surrogate import Array, Posterior, learn

POINT = "point"
"""The one parameter of the sampler's study: a candidate's position."""

_PLACES = (DEVICE_MEMORY, HOST_MEMORY)
"""In the order of `Arrays.places`."""

_MARGIN = 0.01
"""In logarithms: improvements count beyond this, so that trials are not spent on trifles while more may be won."""
_SAFE = 0.95
"""A candidate's chance to fit into memory from which on it counts as safe."""
_AMPLE = 0.2
"""Share of a limit: where nothing is predicted or was measured to need more, everything fits."""
_AS_LIKELY = 0.5
"""A candidate's chance to end well, as a share of the best one's, below which it is left alone: one that fails is worth
nothing, however fast."""
_LEAST_EXCESS = 0.03
"""By how much, in logarithms, a trial that ran out of memory is held to have exceeded it."""


class GuidedSampler(BaseSampler):
    """Suggests the parameter `POINT`; everything it knows is in the study's trials and in the arrays.

    Trials carry their throughput as value and the constraints of `autotune.search.history`: ``device_memory`` and
    ``host_memory`` (bytes over limit, less 1), and ``failure``.
    """

    def __init__(self, arrays: Arrays, is_open: NDArray[np.bool_], tokens_per_step: float) -> None:
        """
        Args:
            is_open: (n,) whether a candidate may be suggested.
            tokens_per_step: throughput times step seconds.
        """
        self._arrays, self._is_open, self._tokens = arrays, is_open, tokens_per_step
        self.expected_gain = np.inf
        """Of the last suggestion: the largest gain over the best so far that any open candidate is expected to bring,
        in logarithms; infinite before anything was measured."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {POINT: IntDistribution(0, len(self._arrays) - 1)}

    def sample_relative(self, study: Study, trial: FrozenTrial,
                        search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """The most promising open candidate."""
        others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        done = [other for other in others if other.state is TrialState.COMPLETE]
        running = [int(other.params[POINT]) for other in others
                   if other.state is TrialState.RUNNING and POINT in other.params]
        allowed = self._is_open.copy()
        allowed[running] = False
        fits, ends_well = self._log_chance_to_fit(done), self._log_chance_to_end_well(done)
        learnt, best = self._learn(done, running)
        gain, promise = np.full(len(learnt.mean), np.inf), ends_well - learnt.mean
        if best is not None:
            gain = expected_improvement(learnt, best)
            promise = expected_improvement(learnt, best - _MARGIN) * np.exp(ends_well)
        allowed &= ends_well >= ends_well[allowed].max(initial=-np.inf) + np.log(_AS_LIKELY)
        self.expected_gain = float((gain * np.exp(fits + ends_well))[allowed].max(initial=0.0))
        safe = allowed & (fits >= np.log(_SAFE))
        score = np.where(safe, promise, -np.inf) if safe.any() else np.where(allowed, fits, -np.inf)
        return {POINT: int(np.argmax(score))}

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str,
                           param_distribution: BaseDistribution) -> Any:
        """The first open candidate; only asked for parameters other than `POINT`, of which there are none."""
        return int(np.argmax(self._is_open))

    def _learn(self, done: Sequence[FrozenTrial], running: Sequence[int]) -> tuple[Posterior, float | None]:
        """What is known of step seconds, and the logarithm of the best of those measured, None where none was.

        Running trials count as measured at their expected value, so that parallel suggestions keep apart.
        """
        measured = [(int(other.params[POINT]), self._tokens / other.value) for other in done
                    if other.value and not _lacked_memory(other) and not _failed(other)]
        points = [point for point, _ in measured]
        values = np.log(np.array([seconds for _, seconds in measured]))
        learnt = learn(self._arrays.time, points, values)
        if running:
            learnt = learn(self._arrays.time, [*points, *running], np.concatenate([values, learnt.mean[running]]))
        return learnt, float(learnt.mean[points].min()) if points else None

    def _log_chance_to_fit(self, done: Sequence[FrozenTrial]) -> Array:
        """Logarithm of every candidate's chance to fit, from what others needed."""
        chance = np.zeros(len(self._arrays))
        told = [other for other in done if not _failed(other)]
        for place, name in zip(self._arrays.places, _PLACES, strict=False):  # none where everything fits
            # what ran out of the other memory says nothing of this one, nor does what needs none
            here = [other for other in told if (other.constraints[name] > 0 or not _lacked_memory(other))
                    and place.memory.terms[other.params[POINT]].any() and other.constraints[name] > -1]
            if max([place.fullest, *(1 + other.constraints[name] for other in here)]) > _AMPLE:
                chance += _log_chance(place, np.array([other.params[POINT] for other in here], dtype=np.intp),
                                      np.array([other.constraints[name] for other in here]))
        return chance

    def _log_chance_to_end_well(self, done: Sequence[FrozenTrial]) -> Array:
        """Logarithm of every candidate's chance not to fail otherwise."""
        told = [other for other in done if not _lacked_memory(other)]
        return log_chance_to_end_well(
            self._arrays.knobs, np.array([other.params[POINT] for other in told], dtype=np.intp),
            np.array([_failed(other) for other in told], dtype=np.bool_), count=len(self._arrays))


def _lacked_memory(trial: FrozenTrial) -> bool:
    return any(trial.constraints[name] > 0 for name in _PLACES)


def _failed(trial: FrozenTrial) -> bool:
    return trial.constraints[FAILURE] > 0


def _log_chance(place: Place, points: NDArray[np.intp], excess: Array) -> Array:
    """Of every candidate, from trials that used 1 + `excess` of the limit. One that ran out of memory says only that
    it needed more: it counts as what the others make one expect, and as more than the limit."""
    lost = excess > 0
    values = place.limit + np.log(np.maximum(1 + excess, 1e-6))
    if lost.any():
        expected = learn(place.memory, points[~lost], values[~lost]).mean[points]
        values = np.where(lost, np.maximum(expected, place.limit + _LEAST_EXCESS), values)
    learnt = learn(place.memory, points, values)
    chance: Array = log_ndtr((place.limit - learnt.mean) / learnt.deviation)
    return chance


def expected_improvement(learnt: Posterior, best: float) -> Array:
    """(n,) by how much each value is expected to lie below the best one, in logarithms."""
    scaled = (best - learnt.mean) / learnt.deviation
    density = np.exp(-scaled**2 / 2) / np.sqrt(2 * np.pi)
    gain: Array = learnt.deviation * (scaled * ndtr(scaled) + density)
    return gain
