"""The guided sampler: few trials, few of them out of memory, and how it learns what predictions are off by."""

import math
import random

import numpy as np
import optuna
import pytest
from optuna.samplers import BaseSampler
from optuna.trial import TrialState, create_trial

from autotune.domain.request import SearchRequest
from autotune.search.guided import POINT, GuidedSampler, GuidedSpace, guided_space
from autotune.search.plan import Plan
from engine.config import TrainConfig
from engine.report import Outcome
from tests.search.support import MIB, search_with, study_plan, study_request

GUIDED = SearchRequest(sampler="guided")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return study_plan(study_request(memory_limit_bytes=400 * MIB))


class Surface:
    """True step seconds: the prediction, off by a factor for every value of some knobs."""

    def __init__(self, plan: Plan, seed: int) -> None:
        rng = random.Random(seed)
        self.plan = plan
        self.bias = rng.uniform(0.3, 2)
        self.stage = [math.exp(rng.gauss(0, 0.25)) for _ in range(4)]
        self.checkpointing = {name: math.exp(rng.gauss(0, 0.25)) for name in ("none", "selective", "full")}
        self.precision = {name: math.exp(rng.gauss(0, 0.4)) for name in ("fp32", "bf16")}
        self.micro_batch = rng.gauss(0, 0.15)

    def __call__(self, config: TrainConfig) -> float:
        predicted = self.plan.predict(config).step_seconds
        assert predicted is not None
        return (predicted * self.bias * self.stage[config.zero_stage] * self.precision[config.precision]
                * self.checkpointing[config.activation_checkpointing] * config.micro_batch_size**self.micro_batch)


def test_it_comes_close_to_the_best_of_thousands_in_ten_trials(plan: Plan) -> None:
    assert len(plan.candidates) > 3000
    regrets = []
    for seed in range(5):
        surface = Surface(plan, seed)
        best = min(surface(candidate.config) for candidate in plan.candidates)
        trials = search_with(plan, surface, trials=10, search=GUIDED)
        regrets.append(min(surface(trial.config) for trial in trials) / best - 1)
    assert sorted(regrets)[2] < 0.05


def test_it_learns_that_memory_is_underestimated(plan: Plan) -> None:
    """Real memory is 1.5 times the predicted: after the first surprises it keeps its distance."""
    def oracle(config: TrainConfig) -> float | Outcome:
        if 1.5 * plan.predict(config).peak_device_bytes > plan.limits.device_bytes:
            return Outcome.OOM_DEVICE
        return plan.predict(config).step_seconds or 1.0

    trials = search_with(plan, oracle, trials=20, search=GUIDED)
    lost = [trial.number for trial in trials if trial.outcome is Outcome.OOM_DEVICE]
    assert len(lost) <= 8
    assert not [number for number in lost if number >= 12]


def space(**changes: object) -> GuidedSpace:
    fields = {"features": np.array([[0.0], [0.1], [1.0]]), "groups": ((slice(0, 1), 1.0),),
              "log_rate": np.log([100.0, 99.0, 90.0]), "load": np.array([0.5, 0.5, 0.5]),
              "open": np.array([True, True, True]), **changes}
    return GuidedSpace(**fields)  # type: ignore[arg-type]


def asked(space_: GuidedSpace, *told: tuple[int, float | None]) -> int:
    """The next point after trials (point, tokens per second; None: running)."""
    study = optuna.create_study(direction="maximize", sampler=GuidedSampler(space_))
    distribution = optuna.distributions.IntDistribution(0, 2)
    for point, value in told:
        state = TrialState.RUNNING if value is None else TrialState.COMPLETE
        constraints = {} if value is None else {"memory": -0.5, "failure": 0.0}
        study.add_trial(create_trial(state=state, value=value, params={POINT: point},
                                     distributions={POINT: distribution}, constraints=constraints))
    return int(study.ask({POINT: distribution}).params[POINT])


class TestSampler:
    def test_it_is_an_optuna_sampler_that_starts_at_the_best_prediction(self) -> None:
        assert isinstance(GuidedSampler(space()), BaseSampler)
        assert asked(space()) == 0

    def test_candidates_that_are_not_open_are_never_asked(self) -> None:
        assert asked(space(open=np.array([False, False, True]))) == 2

    def test_a_candidate_that_hardly_fits_gives_way(self) -> None:
        assert asked(space(load=np.array([0.999, 0.5, 0.5]))) == 1

    def test_a_disappointment_counts_for_its_neighbours(self) -> None:
        """Half of the predicted at point 0 speaks against point 1 beside it, not against point 2 far away."""
        left = np.array([False, True, True])
        assert asked(space(open=left), (0, 50.0)) == 2

    def test_parallel_suggestions_keep_apart(self) -> None:
        assert asked(space(), (0, None)) != 0


def test_inactive_knobs_and_categories_are_encoded(plan: Plan) -> None:
    arrays = guided_space(plan, {})
    assert arrays.features.shape[0] == len(plan.candidates)
    assert arrays.features.min() == 0
    assert arrays.features.max() == 1
    assert not arrays.open.any()
    assert len(arrays.groups) < arrays.features.shape[1]  # a category has a column per value


def test_a_suggestion_is_quick_after_many_trials(plan: Plan) -> None:
    """Only the latest of a thousand trials are fitted."""
    from time import process_time

    from autotune.search.suggest import suggest
    from tests.search.support import finished, measurement

    surface = Surface(plan, 1)
    trials = [finished(number, candidate.config, measurement(surface(candidate.config), surface(candidate.config)))
              for number, candidate in enumerate(plan.candidates[:1000])]
    begun = process_time()
    assert suggest(plan, trials, GUIDED) is not None
    assert process_time() - begun < 10
