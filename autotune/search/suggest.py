"""`suggest`: the next configuration to try."""

from collections.abc import Sequence

from autotune.domain.request import SearchRequest
from autotune.domain.study import Trial
from autotune.search.plan import Plan
from engine.config import TrainConfig


def suggest(plan: Plan, trials: Sequence[Trial], search: SearchRequest) -> TrainConfig | None:
    """The next configuration to try, None when nothing is left.

    Deterministic in the plan, the trials and the seed; no configuration is suggested that was tried, runs, or does the
    same as one of these. The arguments are picklable, so that this can run in a helper process.
    """
    tried = {plan.canonical(trial.config) for trial in trials}
    return next((candidate.config for candidate in plan.candidates if candidate.config not in tried), None)
