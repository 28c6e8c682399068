"""How fast a trial is, over all its measurements: one number, the same wherever it is shown or used."""

import math
from typing import Protocol

from autotune.domain.study import Trial, TrialState
from engine.report import Measurement, Outcome
from engine.statistics import measured_interval, robust_interval, robust_mean
from engine.values import Value


class Throughput(Value):
    """Tokens per second over measurements of one trial.

    Attributes:
        interval: 95 % confidence interval of steps and, where there are several measurements, of their means: a
            machine drifts, so that steps of one measurement resemble each other more than those of another.
        relative_error: half the interval of the mean step time over that mean.
    """

    tokens_per_second: float
    interval: tuple[float, float]
    relative_error: float
    step_seconds: float
    samples_per_second: float


class Rate(Protocol):
    """What a `Throughput`, a measurement and a best configuration have in common."""

    @property
    def tokens_per_second(self) -> float: ...
    @property
    def samples_per_second(self) -> float: ...


class Compared(Protocol):
    """What a best configuration and its views have in common."""

    @property
    def tokens_per_second(self) -> float: ...
    @property
    def baseline_tokens_per_second(self) -> float | None: ...
    @property
    def speedup(self) -> float | None: ...


def is_of_rounds(best: Compared) -> bool:
    """Whether the gain is from rounds that measured both trials, so that it is not the ratio of their two rates."""
    if best.speedup is None or best.baseline_tokens_per_second is None:
        return False
    return not math.isclose(best.speedup, best.tokens_per_second / best.baseline_tokens_per_second)


def rate_unit(rate: Rate) -> str:
    """In which unit to tell it: ``samples/s`` where a sample is one token, as in tasks that have no tokens."""
    same = math.isclose(rate.tokens_per_second, rate.samples_per_second, rel_tol=1e-6)
    return "samples/s" if same else "tok/s"


def may_win(trial: Trial) -> bool:
    """Whether a trial ended well and was measured."""
    return trial.state is TrialState.FINISHED and trial.outcome is Outcome.OK and trial.measurement is not None


def is_measured(measurement: Measurement) -> bool:
    """Whether a measurement has steps and numbers to go by."""
    return (len(measurement.step_seconds) > 0 and min(measurement.step_seconds) > 0
            and measurement.tokens_per_second > 0)


def valid_runs(trial: Trial) -> int:
    """How many of its measurements count."""
    return sum(is_valid(run) for run in trial.measurements)


def is_valid(measurement: Measurement) -> bool:
    """Whether a measurement counts: taken without contention."""
    return is_measured(measurement) and not measurement.contended


def throughput(trial: Trial) -> Throughput | None:
    """Pooled over the trial's uncontended measurements; None where nothing valid was measured."""
    return _pooled(trial, [measurement for measurement in trial.measurements if is_valid(measurement)])


def shown_throughput(trial: Trial) -> Throughput | None:
    """As `throughput`; where all measurements were taken under contention, these, for the record only."""
    return _pooled(trial, shown_runs(trial))


def shown_runs(trial: Trial) -> list[Measurement]:
    """Those that a trial is shown by: its valid measurements, else all that have steps."""
    measured = [run for run in trial.measurements if is_measured(run)]
    return [run for run in measured if is_valid(run)] or measured


def told_throughput(trial: Trial) -> Throughput | None:
    """As `shown_throughput`; of a trial that was stopped early what it measured, which nothing is compared with."""
    runs = [run for run in trial.measurements if is_measured(run)]
    stopped = trial.outcome is Outcome.PRUNED and runs
    return shown_throughput(trial) or (_rate_over(runs) if stopped else None)


def shown_gain(trial: Trial, baseline: Trial | None) -> float | None:
    """Throughput over the baseline's; None where only one of the two was measured without contention."""
    if baseline is None or (throughput(trial) is None) != (throughput(baseline) is None):
        return None
    rate, reference = shown_throughput(trial), shown_throughput(baseline)
    return rate.tokens_per_second / reference.tokens_per_second if rate and reference else None


def _pooled(trial: Trial, runs: list[Measurement]) -> Throughput | None:
    return _rate_over(runs) if may_win(trial) and runs else None


def _rate_over(runs: list[Measurement]) -> Throughput:
    samples = [seconds for run in runs for seconds in run.step_seconds]
    mean = robust_mean(samples)
    # tokens of a step are the same for every configuration, so any measurement tells them
    of_first = robust_mean(runs[0].step_seconds) / mean
    rate = runs[0].tokens_per_second * of_first
    half_width = measured_interval(samples)[1] - mean
    if len(runs) > 1:
        means = [robust_mean(run.step_seconds) for run in runs]
        half_width = max(half_width, robust_interval(means)[1] - robust_mean(means))
    if math.isfinite(half_width):
        error = half_width / mean
        interval = (rate / (1 + error), rate * (1 + error))
    else:
        interval = runs[0].tokens_per_second_interval
        error = max(interval[1] - rate, rate - interval[0], 0.0) / rate
    return Throughput(tokens_per_second=rate, interval=interval, relative_error=error, step_seconds=mean,
                      samples_per_second=runs[0].samples_per_second * of_first)
