"""The first suggestions where a sampler knows of no predictions: predicted to be fast, and apart from each other.

Such a sampler knows nothing before its first trials, and a prediction, however rough, is better than chance. What
predictions are most often wrong about is how fast a precision really is and what a stage costs, so these differ.
"""

from collections.abc import Callable, Mapping, Sequence

from autotune.domain.study import Trial, TrialRole
from autotune.search.plan import Candidate, Plan
from engine.config import TrainConfig

_APART: tuple[Callable[[TrainConfig], object], ...] = (
    lambda config: None, lambda config: config.precision, lambda config: config.zero_stage)
"""In what the k-th suggestion differs from all before it, where it can."""


def opening(plan: Plan, trials: Sequence[Trial], left: Mapping[TrainConfig, Candidate]) -> TrainConfig | None:
    """The next of them; None once there were three, or where no time can be predicted."""
    suggested = [trial.config for trial in trials if trial.role is TrialRole.SUGGESTED]
    if len(suggested) >= len(_APART):
        return None
    timed = [candidate for candidate in left.values() if candidate.prediction.step_seconds is not None]
    aspect = _APART[len(suggested)]
    seen = {aspect(config) for config in suggested}
    apart = [candidate for candidate in timed if aspect(candidate.config) not in seen] or timed
    if not apart:
        return None
    return min(apart, key=lambda candidate: (candidate.prediction.step_seconds or 0.0,
                                             candidate.prediction.peak_device_bytes)).config
