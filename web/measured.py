"""Which trial is the fastest of those shown."""

from autotune.domain.study import Trial
from autotune.domain.throughput import shown_throughput


def fastest(trials: tuple[Trial, ...]) -> Trial | None:
    """The trial with the highest rate; None where none ended well."""
    rated = [(rate.tokens_per_second, -trial.number, trial) for trial in trials if (rate := shown_throughput(trial))]
    return max(rated, key=lambda entry: entry[:2])[2] if rated else None
