"""What was measured of a trial over all its runs."""

from autotune.domain.study import Trial
from autotune.domain.throughput import shown_throughput


def peak_device_bytes(trial: Trial) -> int | None:
    """Largest device bytes per rank over all runs."""
    return max((run.peak_device_bytes for run in trial.measurements), default=None)


def peak_host_bytes(trial: Trial) -> int | None:
    """Largest host bytes per rank (offload) over all runs."""
    return max((run.peak_host_bytes for run in trial.measurements), default=None)


def fastest(trials: tuple[Trial, ...]) -> Trial | None:
    """The trial with the highest rate; None where none ended well."""
    rated = [(rate.tokens_per_second, -trial.number, trial) for trial in trials if (rate := shown_throughput(trial))]
    return max(rated, key=lambda entry: entry[:2])[2] if rated else None
