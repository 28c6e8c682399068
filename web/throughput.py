"""What was measured of a trial over all its runs, as one number with an interval."""

from dataclasses import dataclass
from statistics import fmean

from autotune.domain.study import Trial
from engine.report import Outcome
from engine.statistics import mean_interval


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Tokens per second over all measured steps of a trial, repeats included, with the 95 % interval.

    Attributes:
        interval: None where a single step was measured and nothing is known of its spread.
    """

    tokens_per_second: float
    interval: tuple[float, float] | None
    step_seconds: float


def throughput(trial: Trial) -> Throughput | None:
    """The trial's rate; None where it did not end well or no step was measured.

    One run keeps its own numbers. Several are pooled: every step trains the same number of tokens, so the rate is
    tokens per step over the mean step time of all runs.
    """
    runs = [run for run in trial.measurements if run.step_seconds]
    if trial.outcome is not Outcome.OK or not runs:
        return None
    first = runs[0]
    if len(runs) == 1:
        return Throughput(tokens_per_second=first.tokens_per_second, interval=first.tokens_per_second_interval,
                          step_seconds=fmean(first.step_seconds))
    samples = [sample for run in runs for sample in run.step_seconds]
    tokens_per_step = first.tokens_per_second * fmean(first.step_seconds)
    mean, (low, high) = fmean(samples), mean_interval(samples)
    interval = (tokens_per_step / high, tokens_per_step / low) if low > 0 else None
    return Throughput(tokens_per_second=tokens_per_step / mean, interval=interval, step_seconds=mean)


def peak_device_bytes(trial: Trial) -> int | None:
    """Largest device bytes per rank over all runs."""
    return max((run.peak_device_bytes for run in trial.measurements), default=None)


def peak_host_bytes(trial: Trial) -> int | None:
    """Largest host bytes per rank (offload) over all runs."""
    return max((run.peak_host_bytes for run in trial.measurements), default=None)


def fastest(trials: tuple[Trial, ...]) -> Trial | None:
    """The trial with the highest rate; None where none ended well."""
    rated = [(rate.tokens_per_second, -trial.number, trial) for trial in trials if (rate := throughput(trial))]
    return max(rated, key=lambda entry: entry[:2])[2] if rated else None
