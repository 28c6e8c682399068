"""A search ends when what is left to win is not worth the trials."""

import math
from datetime import timedelta

import pytest

from autotune.domain.request import SearchRequest
from autotune.domain.study import Trial
from autotune.search.plan import Plan
from autotune.search.stopping import is_worth_going_on, trials_left, why_nothing
from autotune.search.suggest import suggest
from engine.config import TrainConfig
from tests.search.support import NOW, finished, measurement, search_with, study_plan, study_request

SPACE = {"zero_stage": [0, 1, 2, 3], "micro_batch_size": [1, 2, 4, 8, 16], "activation_checkpointing": "auto"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return study_plan(study_request(space=SPACE))


def seconds(plan: Plan, config: TrainConfig) -> float:
    """Twice the predicted."""
    return 2 * (plan.predict(config).step_seconds or math.inf)


def test_all_trials_left_together_must_be_worth_it(plan: Plan) -> None:
    """20 trials are allowed; 4 were made."""
    trials = [finished(number, candidate.config, measurement(1.0, 1.0))
              for number, candidate in enumerate(plan.candidates[:4])]
    search = SearchRequest(min_expected_gain=0.01)
    assert is_worth_going_on(plan, trials, search, 0.01 / 16 * 1.01)
    assert not is_worth_going_on(plan, trials, search, 0.01 / 16 * 0.99)
    assert is_worth_going_on(plan, trials, SearchRequest(min_expected_gain=0), 0.0)
    assert is_worth_going_on(plan, [], search, math.inf)


def test_trials_are_left_as_far_as_budgets_and_space_go(plan: Plan) -> None:
    """Of 20 trials, 600 seconds and 60 candidates; those so far took so many seconds each, hours apart."""
    def after(count: int, *, seconds: float) -> list[Trial]:
        return [finished(number, candidate.config, measurement(1.0, 1.0)).model_copy(update={
            "started_at": NOW + timedelta(hours=number), "finished_at": NOW + timedelta(hours=number, seconds=seconds)})
            for number, candidate in enumerate(plan.candidates[:count])]

    assert len(plan.candidates) == 60
    assert trials_left(plan, []) == 20
    assert trials_left(plan, after(4, seconds=1)) == 16
    assert trials_left(plan, after(4, seconds=50)) == 8
    assert trials_left(plan, after(15, seconds=50)) == 1, "one more is always thought of"
    many = study_plan(plan.request.model_copy(update={"budget": plan.request.budget.model_copy(
        update={"max_trials": 10_000})}))
    assert trials_left(many, after(4, seconds=1)) == 56


def test_a_search_ends_before_the_space_does_and_says_why(plan: Plan) -> None:
    search = SearchRequest(min_expected_gain=0.01)
    trials = search_with(plan, lambda config: seconds(plan, config), trials=20, search=search)
    assert 3 <= len(trials) < 20
    best = min(seconds(plan, candidate.config) for candidate in plan.candidates)
    assert min(seconds(plan, trial.config) for trial in trials) <= 1.01 * best
    assert suggest(plan, trials, search) is None
    assert why_nothing(plan, trials, search) == (
        f"{20 - len(trials)} more trials would be expected to gain less than 1 % of throughput")


def test_the_more_gain_is_asked_for_the_sooner_it_ends(plan: Plan) -> None:
    counts = [len(search_with(plan, lambda config: seconds(plan, config), trials=20,
                              search=SearchRequest(min_expected_gain=gain))) for gain in (0.1, 0.01, 0)]
    assert counts == sorted(counts)
    assert counts[0] < counts[2] == 20


def test_other_samplers_go_on() -> None:
    plan = study_plan(study_request(space={"zero_stage": [0, 1, 2], "micro_batch_size": [16]}))
    search = SearchRequest(sampler="grid", min_expected_gain=1)
    trials = search_with(plan, lambda config: 1.0, trials=9, search=search)
    assert len(trials) == 3
    assert why_nothing(plan, trials, search) == "space exhausted"
