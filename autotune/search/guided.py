"""`GuidedSampler`: the prediction corrected by what was measured.

The candidates are few enough to look at all of them. Each has a predicted throughput; a small Gaussian process over the
encoded knobs learns the logarithm of measured over predicted, and the candidate with the largest expected improvement
(Jones, Schonlau and Welch 1998), times the chance that it fits into memory, is next. Predicted memory is corrected by
the same ratio of measured over predicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna import Study
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState
from scipy.linalg import cho_factor, cho_solve
from scipy.special import ndtr

from autotune.search.encoding import make_encoding
from autotune.search.plan import Candidate, Plan
from engine.config import TrainConfig

Array = NDArray[np.float64]

POINT = "point"
"""The one parameter of the sampler's study: a candidate's position in the plan."""

_MAX_OBSERVATIONS = 200
"""Fitted at once; the latest beyond these, so that a suggestion stays quick."""
_NOISE = 0.02
"""Standard deviation of the logarithm of a measured throughput."""
_BIAS = 1.0
"""Prior standard deviation of the logarithm of what all predictions are off by."""
_LENGTHS = (0.5, 1.0, 2.0)
_AMPLITUDES = (0.1, 0.2, 0.4)
"""Prior standard deviation of the logarithm of one important knob's own effect beyond the predicted."""
_MINOR = {"reduce_bucket_size": 0.2, "allgather_bucket_size": 0.2, "prefetch_bucket_size": 0.2, "overlap_comm": 0.4,
          "offload_param": 0.6, "offload_optimizer_ratio": 0.6}
"""Of it, for knobs that matter less; and `_TOGETHER` for what knobs do to each other's effects."""
_TOGETHER = 0.4
_MEMORY_SPREAD = 0.05
"""Least standard deviation of the logarithm of measured over predicted memory."""


@dataclass(frozen=True, eq=False)
class GuidedSpace:
    """The candidates of a plan as arrays.

    Attributes:
        features: (n, d) encoded knobs, 0 to 1; inactive ones 0.
        groups: which columns belong to one knob, and how much that knob may matter, 0 to 1; in order.
        log_rate: (n,) logarithm of the predicted tokens per second; 0 where no time is predicted.
        load: (n,) predicted bytes over their limit, the larger of device and host.
        open: (n,) whether a candidate may be tried.
    """

    features: Array
    groups: tuple[tuple[slice, float], ...]
    log_rate: Array
    load: Array
    open: NDArray[np.bool_]


def guided_space(plan: Plan, left: Mapping[TrainConfig, Candidate]) -> GuidedSpace:
    """The arrays for a plan.

    Args:
        left: candidates that may be tried.
    """
    seconds = np.array([candidate.prediction.step_seconds or np.nan for candidate in plan.candidates])
    rates = np.log(plan.tokens_per_step / seconds)
    loads = [max(candidate.prediction.peak_device_bytes / plan.limits.device_bytes,
                 candidate.prediction.peak_host_bytes / plan.limits.host_bytes) for candidate in plan.candidates]
    features, groups = _features(plan)
    return GuidedSpace(features=features, groups=groups, log_rate=np.nan_to_num(rates, nan=0.0), load=np.array(loads),
                       open=np.array([candidate.config in left for candidate in plan.candidates]))


def _features(plan: Plan) -> tuple[Array, tuple[tuple[slice, float], ...]]:
    columns: list[list[float]] = []
    groups = []
    for axis in make_encoding(plan).axes:
        knob = plan.space.knob(axis.name)
        assert knob is not None
        values = [getattr(candidate.config, axis.name) if knob.is_active(candidate.config) else None
                  for candidate in plan.candidates]
        start = len(columns)
        if axis.at is not None:
            columns.append([axis.encode(value) / axis.at[-1] if value in axis.values else 0.0 for value in values])
        else:
            columns += [[float(value == choice) for value in values] for choice in axis.values]
        groups.append((slice(start, len(columns)), _MINOR.get(axis.name, 1.0)))
    return np.array(columns, dtype=np.float64).reshape(len(columns), len(plan.candidates)).T, tuple(groups)


class GuidedSampler(BaseSampler):
    """Suggests the parameter `POINT`; everything it knows is in the study's trials and in the space.

    Trials carry their throughput as value and the constraints ``memory`` (bytes over limit, less 1) and ``failure``.
    """

    def __init__(self, space: GuidedSpace) -> None:
        self._space = space

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {POINT: IntDistribution(0, len(self._space.log_rate) - 1)}

    def sample_relative(self, study: Study, trial: FrozenTrial,
                        search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """The most promising open candidate."""
        others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        done = [other for other in others if other.state is TrialState.COMPLETE]
        running = [int(other.params[POINT]) for other in others
                   if other.state is TrialState.RUNNING and POINT in other.params]
        fits = self._chance_to_fit(done)
        measured = [other for other in done if other.constraints["memory"] <= 0 and other.constraints["failure"] <= 0]
        mean, deviation = self._posterior(measured, running)
        best = max((np.log(other.value) for other in measured if other.value), default=None)
        gain = _expected_improvement(mean, deviation, best) if best is not None else np.exp(mean - mean.max())
        score = np.where(self._space.open, gain * fits, -1.0)
        score[running] = -1.0
        # where nothing is expected to gain, the largest mean is still the best guess
        if score.max() <= 1e-12:
            score = np.where(self._space.open, np.exp(mean - mean.max()) * (fits + 1e-9), -1.0)
        return {POINT: int(np.argmax(score))}

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str,
                           param_distribution: BaseDistribution) -> Any:
        """The first open candidate; only asked for parameters other than `POINT`, of which there are none."""
        return int(np.argmax(self._space.open))

    def _posterior(self, measured: Sequence[FrozenTrial], running: Sequence[int]) -> tuple[Array, Array]:
        """Mean and deviation of every candidate's log throughput.

        Running trials count as measured at their expected value, so that parallel suggestions keep apart.
        """
        space, measured = self._space, measured[-_MAX_OBSERVATIONS:]
        points = [int(trial.params[POINT]) for trial in measured]
        values = np.array([np.log(trial.value or 1e-12) for trial in measured])
        residuals = values - space.log_rate[points] if points else np.zeros(0)
        kernel = _likeliest(space.features[points], space.groups, residuals)
        mean, deviation = _regress(kernel, space.features, points, residuals)
        if running:
            expected = np.concatenate([residuals, mean[running]])
            mean, deviation = _regress(kernel, space.features, [*points, *running], expected)
        return space.log_rate + mean, deviation

    def _chance_to_fit(self, done: Sequence[FrozenTrial]) -> Array:
        """Of every candidate: its predicted memory times the measured over predicted of trials so far."""
        load = self._space.load
        ratios = [np.log(max(1 + trial.constraints["memory"], 1e-6) / load[int(trial.params[POINT])])
                  for trial in done if trial.constraints["failure"] <= 0 and load[int(trial.params[POINT])] > 0]
        # the prediction itself counts as one observation
        shift = float(np.sum(ratios)) / (len(ratios) + 1)
        spread = max(float(np.std([0.0, *ratios])), _MEMORY_SPREAD)
        chance: Array = ndtr(-(np.log(np.maximum(load, 1e-12)) + shift) / spread)
        return chance


@dataclass(frozen=True, eq=False)
class Kernel:
    """Covariance of the logarithm of measured over predicted: a common bias, an effect of each knob, and the rest.

    Effects of single knobs multiply a step's time, so they add up here; that is why one trial at stage 2 tells
    something of all others at stage 2.
    """

    groups: tuple[tuple[slice, float], ...]
    length: float
    amplitude: float

    @property
    def variance(self) -> float:
        weights = sum(weight**2 for _, weight in self.groups) + _TOGETHER**2
        return self.amplitude**2 * weights + _BIAS**2

    def across(self, one: Array, other: Array) -> Array:
        """(n, m) covariances of rows of features."""
        total = np.zeros((len(one), len(other)))
        distances = np.zeros_like(total)
        for columns, weight in self.groups:
            squares = _squares(one[:, columns], other[:, columns])
            total += weight**2 * _matern(squares, self.length)
            distances += weight**2 * squares
        total += _TOGETHER**2 * _matern(distances, self.length)
        covariance: Array = self.amplitude**2 * total + _BIAS**2
        return covariance

    def within(self, features: Array) -> Array:
        """(n, n) covariances of measured values."""
        return self.across(features, features) + _NOISE**2 * np.eye(len(features))


def _squares(one: Array, other: Array) -> Array:
    squares: Array = (one**2).sum(1)[:, None] + (other**2).sum(1)[None, :] - 2 * one @ other.T
    return np.maximum(squares, 0.0)


def _matern(squares: Array, length: float) -> Array:
    """Matern 5/2 correlation of squared distances."""
    scaled = np.sqrt(5 * squares) / length
    correlation: Array = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)
    return correlation


def _likeliest(features: Array, groups: tuple[tuple[slice, float], ...], residuals: Array) -> Kernel:
    """The kernel of the largest marginal likelihood, from a small grid; the middle one below 4 observations."""
    if len(residuals) < 4:
        return Kernel(groups, _LENGTHS[1], _AMPLITUDES[1])

    def log_likelihood(kernel: Kernel) -> float:
        factor = cho_factor(kernel.within(features), lower=True)
        return float(-residuals @ cho_solve(factor, residuals) / 2 - np.log(np.diag(factor[0])).sum())

    return max((Kernel(groups, length, amplitude) for length in _LENGTHS for amplitude in _AMPLITUDES),
               key=log_likelihood)


def _regress(kernel: Kernel, features: Array, points: Sequence[int], residuals: Array) -> tuple[Array, Array]:
    """Posterior mean and deviation of the residual at every candidate."""
    if not points:
        return np.zeros(len(features)), np.full(len(features), np.sqrt(kernel.variance))
    seen = features[list(points)]
    factor = cho_factor(kernel.within(seen), lower=True)
    across = kernel.across(features, seen)
    mean: Array = across @ cho_solve(factor, residuals)
    variance = kernel.variance - np.einsum("ij,ji->i", across, cho_solve(factor, across.T))
    return mean, np.sqrt(np.maximum(variance, 1e-12))


def _expected_improvement(mean: Array, deviation: Array, best: float) -> Array:
    """Of log throughput over the best so far."""
    scaled = (mean - best) / deviation
    density = np.exp(-scaled**2 / 2) / np.sqrt(2 * np.pi)
    gain: Array = deviation * (scaled * ndtr(scaled) + density)
    return gain
