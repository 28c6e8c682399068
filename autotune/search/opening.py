"""The first suggestions of a study: predicted to be fast, and apart from each other.

A sampler knows nothing before its first trials, and a prediction, however rough, is better than chance.
"""

from collections.abc import Mapping, Sequence

from autotune.domain.study import Trial, TrialRole
from autotune.search.plan import Candidate, Plan
from engine.config import TrainConfig

OPENING_TRIALS = 3


def opening(plan: Plan, trials: Sequence[Trial], left: Mapping[TrainConfig, Candidate]) -> TrainConfig | None:
    """The next of them; None once there were `OPENING_TRIALS`, or where no time can be predicted."""
    suggested = [trial.config for trial in trials if trial.role is TrialRole.SUGGESTED]
    if len(suggested) >= OPENING_TRIALS:
        return None
    timed = [candidate for candidate in left.values() if candidate.prediction.step_seconds is not None]
    apart = [candidate for candidate in timed if all(_far(candidate.config, config) for config in suggested)]
    if not apart:
        return None
    return min(apart, key=lambda candidate: (candidate.prediction.step_seconds or 0.0,
                                             candidate.prediction.peak_device_bytes)).config


def _far(one: TrainConfig, other: TrainConfig) -> bool:
    return one.zero_stage != other.zero_stage or one.precision != other.precision
