"""When a search ends before its budget is spent. Pure."""

from collections.abc import Sequence

from autotune.domain.request import SearchRequest
from autotune.domain.study import Trial
from autotune.search.plan import Plan
from autotune.search.remaining import remaining, untried


def is_worth_going_on(plan: Plan, trials: Sequence[Trial], search: SearchRequest, expected_gain: float) -> bool:
    """Whether what the budget allows may still bring the gain that the request asks for.

    The expected gain of a trial shrinks with every trial, so that of the next one, times the trials left, is more than
    all of them together should bring.

    Args:
        expected_gain: of the next trial, in throughput over the best so far.
    """
    return trials_left(plan, trials) * expected_gain >= search.min_expected_gain


def trials_left(plan: Plan, trials: Sequence[Trial]) -> int:
    """How many more there can be, at least 1: by the budget of trials, by that of seconds if they take as long as those
    so far, and by what is left to try."""
    left = [plan.request.budget.max_trials - len(trials), int(untried(plan, trials).sum())]
    took = [(trial.finished_at - trial.started_at).total_seconds() for trial in trials if trial.finished_at is not None]
    if (spent := sum(took)) > 0:  # the time in between may be that of a service that was down
        left.append(int((plan.request.most_seconds - spent) / spent * len(took)))
    return max(min(left), 1)


def why_nothing(plan: Plan, trials: Sequence[Trial], search: SearchRequest) -> str:
    """In words, once `suggest` had nothing to suggest."""
    if not remaining(plan, trials):
        return "space exhausted"
    left = trials_left(plan, trials)
    return (f"{left} more trial{'s' if left > 1 else ''} would be expected to gain less than "
            f"{100 * search.min_expected_gain:.3g} % of throughput")
