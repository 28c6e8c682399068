"""When a search ends before its budget is spent. Pure."""

from collections.abc import Sequence

from autotune.domain.request import SearchRequest
from autotune.domain.study import Trial
from autotune.search.plan import Plan
from autotune.search.remaining import remaining


def is_worth_going_on(plan: Plan, trials: Sequence[Trial], search: SearchRequest, expected_gain: float) -> bool:
    """Whether what the budget allows may still bring the gain that the request asks for.

    The expected gain of a trial shrinks with every trial, so that of the next one, times the trials left, is more than
    all of them together should bring.

    Args:
        expected_gain: of the next trial, in throughput over the best so far.
    """
    left = max(plan.request.budget.max_trials - len(trials), 1)
    return left * expected_gain >= search.min_expected_gain


def why_nothing(plan: Plan, trials: Sequence[Trial], search: SearchRequest) -> str:
    """In words, once `suggest` had nothing to suggest."""
    if not remaining(plan, trials):
        return "space exhausted"
    left = max(plan.request.budget.max_trials - len(trials), 1)
    return (f"{left} more trial{'s' if left > 1 else ''} would be expected to gain less than "
            f"{100 * search.min_expected_gain:.3g} % of throughput")
