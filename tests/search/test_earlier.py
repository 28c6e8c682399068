"""What trials of earlier studies tell of a plan's candidates."""

from typing import Any

import numpy as np
import pytest

from autotune.domain.earlier import EarlierRecord, EarlierStudy, Relation
from autotune.domain.request import SearchRequest
from autotune.domain.study import Trial
from autotune.search.arrays import plan_arrays
from autotune.search.earlier import earlier_note, predicted_anew, told, with_earlier
from autotune.search.plan import Plan
from autotune.search.suggest import suggest
from autotune.search.surrogate import learn
from engine.config import TrainConfig
from tests.search.support import finished, hardware_profile, measurement, study_plan, study_request

SPACE = {"zero_stage": [0, 1, 2], "micro_batch_size": [1, 2, 4], "precision": ["fp32", "bf16"]}
SEARCH = SearchRequest(sampler="guided", min_expected_gain=0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return study_plan(study_request(space=SPACE))


@pytest.fixture(scope="module")
def elsewhere() -> Plan:
    """On one device, twice as fast."""
    hardware = hardware_profile(world_size=1, fingerprint="other", matmul_flops_per_second={"fp32": 1e11, "bf16": 2e11})
    return study_plan(study_request(space=SPACE, devices=1), hardware=hardware)


def trial(plan: Plan, number: int, *, off: float = 1.0, memory: float = 1.0, contended: bool = False,
          **fields: Any) -> Trial:
    """One that took `off` times the predicted seconds and `memory` times the predicted bytes."""
    size, world = fields.get("micro_batch_size", 1), plan.hardware.world_size
    config = TrainConfig.model_validate({"gradient_accumulation_steps": 32 // (size * world), **fields})
    prediction = plan.predict(config)
    seconds = off * (prediction.step_seconds or 0.0)
    run = measurement(seconds, seconds, contended=contended,
                      peak_device_bytes=round(memory * prediction.peak_device_bytes))
    return finished(number, config, run).model_copy(update={"prediction": prediction})


def study(*trials: Trial, number: int = 1, relation: Relation = Relation.ELSEWHERE,
          hardware: str = "1 x test") -> EarlierStudy:
    return EarlierStudy(study_id=f"{number}" * 32, relation=relation, hardware=hardware, trials=trials)


def bf16_is_slow(plan: Plan) -> EarlierStudy:
    return study(*(trial(plan, number, off=6.0 if precision == "bf16" else 1.0, precision=precision,
                         micro_batch_size=size)
                   for number, (precision, size) in enumerate((precision, size) for precision in ("fp32", "bf16")
                                                              for size in (1, 2, 4))))


def test_no_earlier_study_changes_nothing(plan: Plan, elsewhere: Plan) -> None:
    """Nor does one of which nothing can be told."""
    silent = study(trial(elsewhere, 0, contended=True))
    arrays = plan_arrays(plan)
    assert with_earlier(arrays, plan, []) is arrays
    assert with_earlier(arrays, plan, [silent]) is arrays
    trials = [trial(plan, 0)]
    for _ in range(5):
        config = suggest(plan, trials, SEARCH)
        assert config is not None
        assert suggest(plan, trials, SEARCH, []) == suggest(plan, trials, SEARCH, [silent]) == config
        trials.append(trial(plan, len(trials), off=1.3, **config.model_dump()))


def test_what_was_slow_elsewhere_is_expected_to_be_slow_here(plan: Plan, elsewhere: Plan) -> None:
    """Six times as slow as predicted there; here, with one trial in fp32 that says nothing of it, maybe so."""
    arrays = plan_arrays(plan)
    own = plan.index[trial(plan, 0).config]
    predicted = np.log(arrays.time.terms.sum(1))
    is_bf16 = np.array([candidate.config.precision == "bf16" for candidate in plan.candidates])
    found = learn(with_earlier(arrays, plan, [bf16_is_slow(elsewhere)]).time, [own], predicted[[own]])
    alone = learn(arrays.time, [own], predicted[[own]])
    factor = np.exp(found.mean - predicted)
    assert 1.5 < factor[is_bf16].min() < factor[is_bf16].max() < 6
    assert factor[~is_bf16] == pytest.approx(1, abs=0.15)
    assert np.exp(alone.mean - predicted) == pytest.approx(1, abs=0.15)


def test_a_few_trials_of_this_study_outweigh_what_was_found_elsewhere(plan: Plan, elsewhere: Plan) -> None:
    """Here predictions are right, and bf16 is faster: it is found although an earlier study says the opposite."""
    trials = [trial(plan, 0)]
    for _ in range(4):
        config = suggest(plan, trials, SEARCH, [bf16_is_slow(elsewhere)])
        assert config is not None
        trials.append(trial(plan, len(trials), **config.model_dump()))
    best = min(candidate.prediction.step_seconds or np.inf for candidate in plan.candidates)
    assert min(plan.predict(each.config).step_seconds or np.inf for each in trials) == best


def test_memory_that_was_larger_elsewhere_should_be_larger_here(plan: Plan, elsewhere: Plan) -> None:
    arrays = plan_arrays(plan)
    needs = with_earlier(arrays, plan, [study(*(trial(elsewhere, size, memory=1.5, micro_batch_size=size)
                                                for size in (1, 2, 4)))])
    expected = [learn(each.places[0].memory, [], np.array([])).mean for each in (arrays, needs)]
    largest = int(np.argmax(expected[0]))
    assert 1.05 < np.exp(expected[1] - expected[0])[largest] < 1.6
    assert needs.places[1].memory is arrays.places[1].memory, "nothing was measured on the host"


def test_seconds_that_only_the_earlier_study_had_count_there(plan: Plan, elsewhere: Plan) -> None:
    """Of two devices, one exchanges gradients; of one, nothing. All else is as predicted."""
    found = with_earlier(plan_arrays(elsewhere), elsewhere, [study(trial(plan, 0, zero_stage=2))])
    assert found.time.earlier is not None
    terms = found.time.earlier.terms
    assert terms.shape[1] == found.time.terms.shape[1] == len(found.names) + 1
    exchange = plan.predict(TrainConfig(zero_stage=2, gradient_accumulation_steps=16)).seconds["data_exchange"]
    assert terms[0, -1] == pytest.approx(exchange)
    assert not found.time.terms[:, -1].any()
    posterior = learn(found.time, [], np.array([]))
    assert posterior.mean == pytest.approx(learn(plan_arrays(elsewhere).time, [], np.array([])).mean, abs=0.01)


class TestTold:
    def test_what_is_not_searched_here_tells_nothing(self, plan: Plan, elsewhere: Plan) -> None:
        known = study(trial(elsewhere, 0), trial(elsewhere, 1, precision="bf16", optimizer_precision="compute"),
                      trial(elsewhere, 2, activation_checkpointing="full"), trial(elsewhere, 3, micro_batch_size=4))
        assert [each.config.micro_batch_size for each in told(plan, [known])] == [1, 4]

    def test_a_trial_without_a_prediction_or_measurement_tells_nothing(self, plan: Plan) -> None:
        assert told(plan, [study(finished(0, TrainConfig(), measurement(1.0, 1.0)),
                                 trial(plan, 1).model_copy(update={"measurement": None}))]) == []


class TestNote:
    def test_it_says_what_was_reused(self, plan: Plan, elsewhere: Plan) -> None:
        studies = [study(trial(elsewhere, 0), trial(elsewhere, 1, micro_batch_size=2), hardware="1 x A100"),
                   study(trial(elsewhere, 0, activation_checkpointing="full"), number=2),
                   study(trial(plan, 0), number=3, relation=Relation.FAMILY, hardware="")]
        assert earlier_note(plan, studies) == (
            "predictions began corrected by what was measured in 2 trials of study 11111111 (the same model on other "
            "hardware: 1 x A100) and 1 trial of study 33333333 (the same kind of model on this hardware)")

    def test_nothing_reused_is_not_mentioned(self, plan: Plan, elsewhere: Plan) -> None:
        assert earlier_note(plan, []) is None
        assert earlier_note(plan, [study(trial(elsewhere, 0, contended=True))]) is None


def test_predictions_of_another_release_are_made_anew(plan: Plan, elsewhere: Plan) -> None:
    """Those that were stored were twice too long and too small; a precision without a profile now tells nothing."""
    trials = [trial(elsewhere, 0, off=1.5), trial(elsewhere, 1, off=3.0, precision="bf16", zero_stage=2)]
    then = [each.prediction.model_copy(update={
        "seconds": {name: 2 * value for name, value in each.prediction.seconds.items()},
        "step_seconds": 2 * (each.prediction.step_seconds or 0.0),
        "device_bytes": {name: value // 2 for name, value in each.prediction.device_bytes.items()}})
        for each in trials if each.prediction is not None]
    kept = study(*(each.model_copy(update={"prediction": old}) for each, old in zip(trials, then, strict=True)))

    def anew(**changes: Any) -> EarlierStudy:
        return predicted_anew(EarlierRecord(
            study=kept, model=elsewhere.model.model_copy(update=changes), hardware=elsewhere.hardware,
            optimizer=elsewhere.request.training.optimizer))

    assert anew() == study(*trials)
    bf16 = [each for each in elsewhere.model.activations if each.precision == "bf16"]
    assert [each.number for each in anew(activations=tuple(bf16)).trials] == [1]
