"""The guided sampler: few trials, few of them out of memory, and how it learns what predictions are off by."""

import dataclasses
import math
import random
from time import process_time

import numpy as np
import optuna
import pytest
from numpy.typing import NDArray
from optuna.samplers import BaseSampler
from optuna.trial import TrialState, create_trial

from autotune.domain.request import SearchRequest
from autotune.search.arrays import Arrays, Levels, Place, make_arrays, plan_arrays, tried_beside
from autotune.search.failures import log_chance_to_end_well
from autotune.search.guided import POINT, GuidedSampler
from autotune.search.history import DEVICE_MEMORY, FAILURE, HOST_MEMORY, told_trials
from autotune.search.plan import Plan
from autotune.search.suggest import suggest
from autotune.search.surrogate import learn
from engine.config import TrainConfig
from engine.report import Outcome
from tests.search.support import MIB, finished, hardware_profile, measurement, search_with, study_plan, study_request

SPACE = {"zero_stage": [0, 1, 2], "precision": ["fp32", "bf16"], "micro_batch_size": [1, 2]}
GUIDED = SearchRequest(sampler="guided", min_expected_gain=0)


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


def levels(name: str, *level: int, ordinal: bool = True) -> Levels:
    count = max(level) + 1
    return Levels(name=name, at=tuple(range(count)) if ordinal else None, count=count,
                  level=np.array(level, dtype=np.intp))


def arrays(*seconds: float, loads: tuple[float, ...] = ()) -> Arrays:
    """Candidates of which the last two resemble each other; loads are predicted bytes over their limit."""
    made = make_arrays([levels("micro_batch_size", 0, 9, 10)], [{"forward": each} for each in seconds])
    if not loads:
        return made
    memory = dataclasses.replace(made.time, terms=np.array(loads)[:, None], bias=0.05)
    return dataclasses.replace(made, places=(Place(memory=memory, names=("load",), limit=0.0),))


def asked(arrays_: Arrays, *told: tuple[int, float | None], is_open: tuple[bool, ...] = (True, True, True),
          memory: float = -0.5) -> int:
    """The next point after trials (point, step seconds; None: running)."""
    study = optuna.create_study(direction="maximize", sampler=GuidedSampler(arrays_, np.array(is_open), 1.0))
    distribution = optuna.distributions.IntDistribution(0, 2)
    for point, seconds in told:
        state = TrialState.RUNNING if seconds is None else TrialState.COMPLETE
        constraints = {} if seconds is None else {DEVICE_MEMORY: memory, HOST_MEMORY: -1.0, FAILURE: 0.0}
        study.add_trial(create_trial(state=state, value=seconds and 1 / seconds, params={POINT: point},
                                     distributions={POINT: distribution}, constraints=constraints))
    return int(study.ask({POINT: distribution}).params[POINT])


def after(arrays_: Arrays, told: dict[int, float]) -> NDArray[np.float64]:
    """What is thought of each candidate's step seconds."""
    return np.exp(learn(arrays_.time, [*told], np.log([*told.values()])).mean)


class TestSampler:
    def test_it_is_an_optuna_sampler_that_starts_at_the_best_prediction(self) -> None:
        assert isinstance(GuidedSampler(arrays(1, 2, 3), np.ones(3, dtype=np.bool_), 1.0), BaseSampler)
        assert asked(arrays(2, 1, 3)) == 1

    def test_candidates_that_are_not_open_are_never_asked(self) -> None:
        assert asked(arrays(1, 2, 3), is_open=(False, False, True)) == 2

    def test_a_candidate_that_hardly_fits_gives_way(self) -> None:
        assert asked(arrays(1, 2, 3, loads=(0.99, 0.5, 0.5))) == 1

    def test_where_nothing_surely_fits_the_likeliest_is_next(self) -> None:
        assert asked(arrays(1, 2, 3, loads=(0.99, 0.98, 0.97))) == 2

    def test_what_a_trial_needed_beyond_the_predicted_counts_for_others(self) -> None:
        """Twice the predicted memory at point 1, and point 0 no longer fits; half of it, and it surely does."""
        surprising = arrays(1, 4, 8, loads=(0.7, 0.4, 0.1))
        left = (True, False, True)
        assert asked(surprising, (1, 4.0), is_open=left, memory=-0.2) == 2
        assert asked(surprising, (1, 4.0), is_open=left, memory=-0.8) == 0

    def test_running_out_of_memory_counts_for_others(self) -> None:
        close = arrays(1, 1.1, 8, loads=(0.5, 0.48, 0.1))
        assert asked(close) == 0
        assert asked(close, (0, 1.0), is_open=(False, True, True), memory=0.01) == 2

    def test_a_disappointment_counts_for_its_neighbours(self) -> None:
        """Point 1 lies beside 2."""
        alike = arrays(1, 1.05, 1.05)
        assert after(alike, {0: 1.0, 2: 1.05})[1] < after(alike, {0: 1.0, 2: 2.0})[1]

    def test_parallel_suggestions_keep_apart(self) -> None:
        assert asked(arrays(1, 1.01, 1.01), (0, None)) != 0


def test_the_expected_gain_shrinks_as_the_best_is_found() -> None:
    gains = []
    for told in ((), ((0, 1.0),), ((0, 1.0), (1, 2.0), (2, 2.0))):
        sampler = GuidedSampler(arrays(1, 2, 2), np.ones(3, dtype=np.bool_), 1.0)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        distribution = optuna.distributions.IntDistribution(0, 2)
        for point, seconds in told:
            study.add_trial(create_trial(value=1 / seconds, params={POINT: point}, distributions={POINT: distribution},
                                         constraints={DEVICE_MEMORY: -0.5, HOST_MEMORY: -1.0, FAILURE: 0.0}))
        study.ask({POINT: distribution})
        gains.append(sampler.expected_gain)
    assert gains[0] == math.inf
    assert gains[0] > gains[1] > gains[2] > 0
    assert gains[2] < 0.02


class TestFailures:
    """Trials that fail, but not by memory."""

    def test_a_precision_that_fails_is_soon_left_alone(self, plan: Plan) -> None:
        """All bf16 candidates, which are predicted to be fastest, drift: after two of them the fastest of fp32 are
        searched, and nothing of bf16 beside."""
        surface = Surface(plan, 0)

        def oracle(config: TrainConfig) -> float | Outcome:
            return Outcome.NUMERICS_DRIFT if config.precision == "bf16" else surface(config)

        trials = search_with(plan, oracle, trials=12, search=GUIDED)
        failed = [trial.number for trial in trials if trial.outcome is Outcome.NUMERICS_DRIFT]
        assert 1 <= len(failed) <= 3
        best = min(surface(candidate.config) for candidate in plan.candidates if candidate.config.precision == "fp32")
        assert min(surface(trial.config) for trial in trials if trial.outcome is Outcome.OK) < 1.05 * best

    def test_what_fails_only_together_is_left_alone_only_together(self, plan: Plan) -> None:
        def crashes(config: TrainConfig) -> bool:
            return config.zero_stage == 3 and config.precision == "bf16"

        knobs, configs = plan_arrays(plan).knobs, [candidate.config for candidate in plan.candidates]
        told = np.array(random.Random(0).sample(range(len(configs)), 60))
        chance = np.exp(log_chance_to_end_well(
            knobs, told, np.array([crashes(configs[point]) for point in told]), count=len(configs)))
        doomed = np.array([crashes(config) for config in configs])
        assert chance[doomed].max() < 0.2
        assert chance[~doomed].min() > 0.8

    def test_without_failures_all_are_alike(self) -> None:
        knobs = [levels("micro_batch_size", 0, 1, 2), levels("precision", 0, 1, 0, ordinal=False)]
        points = np.array([0, 1])
        assert log_chance_to_end_well(knobs, points, np.array([False, False]), count=3).tolist() == [0, 0, 0]
        one_failed = np.exp(log_chance_to_end_well(knobs, points, np.array([False, True]), count=3))
        assert one_failed[1] < 0.3 < one_failed[2] < 0.9 < one_failed[0]

    def test_where_nothing_varies_a_failure_dooms_nothing(self) -> None:
        assert np.exp(log_chance_to_end_well([], np.array([0]), np.array([True]), count=2)) == pytest.approx(0.98)

    def test_they_lower_what_more_trials_are_expected_to_gain(self) -> None:
        assert expected_gain(arrays(1, 0.8, 0.8), (0, 1.0)) > 2 * expected_gain(arrays(1, 0.8, 0.8), (0, 1.0), failed=1)


def expected_gain(arrays_: Arrays, told: tuple[int, float], *, failed: int | None = None) -> float:
    """After one measured trial, and one that failed."""
    sampler = GuidedSampler(arrays_, np.array([False, False, True]), 1.0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distribution = optuna.distributions.IntDistribution(0, 2)
    for point, seconds, failure in (*([(failed, 1.0, 1.0)] if failed is not None else []), (*told, 0.0)):
        study.add_trial(create_trial(value=1 / seconds, params={POINT: point}, distributions={POINT: distribution},
                                     constraints={DEVICE_MEMORY: -0.5, HOST_MEMORY: -1.0, FAILURE: failure}))
    study.ask({POINT: distribution})
    return sampler.expected_gain


class TestArrays:
    def test_every_candidate_of_a_plan_has_its_terms_and_knobs(self, plan: Plan) -> None:
        made = plan_arrays(plan)
        assert made is plan_arrays(plan), "made once for each plan"
        assert len(made) == len(plan.candidates)
        seconds = [candidate.prediction.step_seconds for candidate in plan.candidates]
        assert made.time.terms.sum(1) == pytest.approx(seconds)
        device, host = made.places
        assert device.memory.terms.sum(1) == pytest.approx(
            [candidate.prediction.peak_device_bytes for candidate in plan.candidates])
        assert host.memory.terms.sum(1) == pytest.approx(
            [candidate.prediction.peak_host_bytes for candidate in plan.candidates])
        assert device.limit == pytest.approx(math.log(400 * MIB))

    def test_an_inactive_knob_has_no_effect(self) -> None:
        knob = levels("offload_param", 0, 1, 2, ordinal=False)
        active = Levels(name=knob.name, at=None, count=2, level=knob.level)
        assert active.one_hot().tolist() == [[1, 0], [0, 1], [0, 0]]
        assert covariances(active)[2].tolist() == [0, 0, 0]

    def test_neighbouring_values_of_an_ordinal_knob_have_more_in_common(self) -> None:
        found = covariances(levels("micro_batch_size", 0, 1, 2, 3))
        assert np.diag(found) == pytest.approx(1)
        assert found[0, 1] > found[0, 2] > found[0, 3] > 0

    def test_stages_do_different_things_although_they_have_an_order(self) -> None:
        assert covariances(levels("zero_stage", 0, 1, 2)) == pytest.approx(np.eye(3))

    def test_a_candidate_whose_time_is_not_known_counts_as_one_in_the_middle(self) -> None:
        made = make_arrays([], [{"forward": 1.0}, {}, {"forward": 4.0}, {"forward": 3.0, "optimizer": 2.0}])
        assert made.time.terms.sum(1).tolist() == [1, 4, 4, 5]


def covariances(knob: Levels) -> NDArray[np.float64]:
    coordinates = knob.coordinates()
    return coordinates @ coordinates.T


class TestTrialsBesideThePlan:
    """The user's own configuration need not be in the space."""

    def test_they_tell_as_much_as_a_candidate(self) -> None:
        plan = study_plan(study_request(space=SPACE, baseline={
            "zero_stage": 1, "micro_batch_size": 4, "precision": "bf16"}))
        own = plan.canonical(plan.baseline)
        assert own not in plan.index
        trials = [finished(0, plan.baseline, measurement(3.0, 3.0))]
        (beside,) = tried_beside(plan, [trial.config for trial in trials])
        assert beside == own
        made = plan_arrays(plan, (own,))
        assert len(made) == len(plan.candidates) + 1
        assert made.time.terms.sum(1)[-1] == pytest.approx(plan.predict(own).step_seconds)
        assert made.places[0].memory.terms.sum(1)[-1] == plan.predict(own).peak_device_bytes
        before, later = (learn(made.time, points, np.log(np.array(values)))
                         for points, values in (([], []), ([len(plan.candidates)], [3.0])))
        assert later.deviation.max() < 0.7 * before.deviation.min()
        config = suggest(plan, trials, GUIDED)
        assert config is not None
        assert config in plan.index

    def test_one_that_does_what_no_candidate_does_tells_nothing(self) -> None:
        plan = study_plan(study_request(space={**SPACE, "precision": ["fp32"]}))
        other = plan.candidates[0].config.model_copy(update={"precision": "bf16"})
        assert tried_beside(plan, [other]) == ()


class TestWhichMemoryRanOut:
    """On an accelerator: offloading needs host memory, which is not the device's."""

    @pytest.fixture
    def cuda(self) -> Plan:
        return study_plan(study_request(space={"zero_stage": [1], "offload_optimizer_ratio": [0.0, 0.5, 1.0],
                                               "micro_batch_size": [1, 2]}),
                          hardware=hardware_profile(device_type="cuda", host_memory_bytes=100 * MIB))

    def test_running_out_of_host_memory_says_nothing_of_the_device(self, cuda: Plan) -> None:
        offloaded = [candidate.config for candidate in cuda.candidates
                     if candidate.config.offload_optimizer_ratio == 1]
        lost, sampler = finished(0, offloaded[0], outcome=Outcome.OOM_HOST), GUIDED
        (told,) = told_trials(cuda, [lost], {}, lambda config: {})
        assert told.constraints[HOST_MEMORY] > 0 > told.constraints[DEVICE_MEMORY]
        config = suggest(cuda, [lost], sampler)
        assert config is not None
        assert config.offload_optimizer_ratio < 1

    def test_both_peaks_are_told(self, cuda: Plan) -> None:
        run = measurement(1.0, 1.0, peak_device_bytes=512 * MIB).model_copy(update={"peak_host_bytes": 40 * MIB})
        (told,) = told_trials(cuda, [finished(0, cuda.candidates[0].config, run)], {}, lambda config: {})
        assert told.constraints[DEVICE_MEMORY] == pytest.approx(512 / 2048 - 1)
        assert told.constraints[HOST_MEMORY] == pytest.approx(40 / 50 - 1)


def test_a_suggestion_is_quick_after_many_trials(plan: Plan) -> None:
    """Only the latest of a thousand trials are learnt from."""
    surface = Surface(plan, 1)
    trials = [finished(number, candidate.config, measurement(surface(candidate.config), surface(candidate.config)))
              for number, candidate in enumerate(plan.candidates[:1000])]
    begun = process_time()
    assert suggest(plan, trials, GUIDED) is not None
    assert process_time() - begun < 1, "of both cores together; benchmarks.search holds the rule"
