"""Stored trials as Optuna trials: the study is rebuilt from them at every suggestion.

A trial that ran out of memory is told as complete, with the violated constraint and a plausible value, never as failed:
samplers ignore failed trials and would propose the same again. All complete trials carry the same constraints, which
Optuna's Gaussian process requires.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, create_trial
from optuna.trial import TrialState as OptunaState

from autotune.domain.prediction import Prediction
from autotune.domain.study import Trial, TrialState
from autotune.domain.throughput import throughput
from autotune.search.encoding import Params
from autotune.search.plan import Plan
from engine.config import TrainConfig
from engine.report import Outcome

DEVICE_MEMORY, HOST_MEMORY, FAILURE = "device_memory", "host_memory", "failure"
"""Names of constraints."""

_LEAST_VIOLATION = 0.01
"""Of the memory limit, where a trial ran out of memory although it was predicted to fit."""


def told_trials(plan: Plan, trials: Sequence[Trial], distributions: dict[str, BaseDistribution],
                encode: Callable[[TrainConfig], Params | None]) -> list[FrozenTrial]:
    """What a sampler is to know, in the order of the trials' numbers.

    Left out: cancelled trials, which say nothing, and configurations outside the space, which cannot be encoded.
    """
    values = TrialValues(plan, trials)
    told = []
    for trial in sorted(trials, key=lambda trial: trial.number):
        params = encode(plan.canonical(trial.config))
        if params is None or trial.outcome is Outcome.CANCELLED:
            continue
        if trial.state is TrialState.RUNNING:
            told.append(create_trial(state=OptunaState.RUNNING, params=params, distributions=distributions))
        else:
            told.append(create_trial(state=OptunaState.COMPLETE, params=params, distributions=distributions,
                                     value=values.of(trial), constraints=dict(_constraints(plan, trial))))
    return told


class TrialValues:
    """Tokens per second of finished trials, finite always: measured, else plausible."""

    def __init__(self, plan: Plan, trials: Sequence[Trial]) -> None:
        measured = {trial.number: value for trial in trials if (value := measured_rate(trial)) is not None}
        good = [measured[trial.number] for trial in trials
                if trial.number in measured and trial.outcome in (Outcome.OK, Outcome.PRUNED)]
        ratios = [measured[trial.number] / predicted for trial in trials
                  if trial.number in measured and (predicted := predicted_rate(plan, trial.config))]
        self._plan = plan
        self._measured = measured
        self._median = median(good) if good else 0.0
        self._correction = median(ratios) if ratios else 1.0

    def of(self, trial: Trial) -> float:
        """Measured; else predicted, corrected by what was measured so far; else the median of the good ones."""
        if trial.number in self._measured:
            return self._measured[trial.number]
        predicted = predicted_rate(self._plan, trial.config)
        return predicted * self._correction if predicted is not None else self._median


def measured_rate(trial: Trial) -> float | None:
    """Tokens per second, also of trials that cannot win; None where none was measured."""
    rate = throughput(trial)
    if rate is not None:
        return rate.tokens_per_second
    measurement = trial.measurement
    return measurement.tokens_per_second if measurement is not None and measurement.tokens_per_second > 0 else None


def predicted_rate(plan: Plan, config: TrainConfig) -> float | None:
    """Tokens per second."""
    prediction = plan.predict_or_none(config)
    if prediction is None or not prediction.step_seconds:
        return None
    return plan.tokens_per_step / prediction.step_seconds


def _constraints(plan: Plan, trial: Trial) -> Iterator[tuple[str, float]]:
    """Feasible where not positive: how far use of either memory is from its limit, and whether anything else was
    wrong. Of a trial that ran out of one, what is said of the other is as predicted."""
    device, host = _memory_loads(plan, trial)
    yield DEVICE_MEMORY, device
    yield HOST_MEMORY, host
    yield FAILURE, float(trial.outcome is not None and not trial.ran_out_of_memory
                         and trial.outcome not in (Outcome.OK, Outcome.PRUNED))


def _memory_loads(plan: Plan, trial: Trial) -> tuple[float, float]:
    """(device, host) bytes over their limit, less 1: measured, else predicted."""
    device, host = _expected_loads(plan, trial.prediction or plan.predict_or_none(trial.config))
    if trial.ran_out_of_memory:
        # a CPU's device memory is the host's: what ran out is rather what is closer to its limit
        on_device = trial.outcome is Outcome.OOM_DEVICE or (plan.hardware.device_type == "cpu" and device >= host)
        return ((max(device, _LEAST_VIOLATION), min(host, 0.0)) if on_device
                else (min(device, 0.0), max(host, _LEAST_VIOLATION)))
    if trial.measurement is not None:
        device = trial.measurement.peak_device_bytes / plan.limits.device_bytes - 1
        host = trial.measurement.peak_host_bytes / plan.limits.host_bytes - 1
    return min(device, 0.0), min(host, 0.0)


def _expected_loads(plan: Plan, prediction: Prediction | None) -> tuple[float, float]:
    if prediction is None:
        return 0.0, 0.0
    return (prediction.peak_device_bytes / plan.limits.device_bytes - 1,
            prediction.peak_host_bytes / plan.limits.host_bytes - 1)
