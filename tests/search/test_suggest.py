"""Every sampler: no configuration twice, deterministic, learns from running out of memory, ends when all is tried."""

import math

import pytest

from autotune.domain.request import SearchRequest
from autotune.search.encoding import make_encoding
from autotune.search.history import TrialValues, told_trials
from autotune.search.plan import Plan
from autotune.search.remaining import remaining
from autotune.search.suggest import suggest
from engine.config import TrainConfig
from engine.report import Outcome
from tests.search.support import (
    MIB,
    finished,
    hardware_profile,
    measurement,
    running,
    search_with,
    study_plan,
    study_request,
)

SAMPLERS = ("guided", "tpe", "gp", "random", "grid")
SMALL = {"zero_stage": [0, 1, 2, 3], "offload_optimizer_ratio": [0.0, 1.0], "micro_batch_size": [1, 4, 16]}
"""4 stages x 2 x 3, less the 3 points at which stage 0 cannot offload."""


def plan_for(sampler: str, space: dict[str, list[object]] | None = None, **search: object) -> Plan:
    return study_plan(study_request(sampler=sampler, space=space or SMALL, min_expected_gain=0, **search))


def seconds(config: TrainConfig) -> float:
    """A surface on which larger micro-batches and stage 2 are best."""
    return 0.5 + 0.4 / config.micro_batch_size + 0.1 * abs(config.zero_stage - 2) + 0.3 * config.offload_optimizer_ratio


@pytest.mark.parametrize("sampler", SAMPLERS)
class TestEverySampler:
    def test_tries_each_point_once_and_then_says_the_space_is_exhausted(self, sampler: str) -> None:
        plan = plan_for(sampler)
        trials = search_with(plan, seconds, trials=100)
        assert len(trials) == len(plan.candidates) == 21
        assert {trial.config for trial in trials} == {candidate.config for candidate in plan.candidates}
        assert suggest(plan, trials, plan.request.search) is None

    def test_suggests_the_same_for_the_same_seed_and_history(self, sampler: str) -> None:
        plan = plan_for(sampler)
        trials = search_with(plan, seconds, trials=9)
        again = plan_for(sampler)
        assert suggest(again, trials, again.request.search) == suggest(plan, trials, plan.request.search)

    def test_does_not_suggest_what_is_running(self, sampler: str) -> None:
        plan = plan_for(sampler)
        trials = search_with(plan, seconds, trials=8)
        for _ in range(4):
            config = suggest(plan, trials, plan.request.search)
            assert config is not None
            assert config not in {trial.config for trial in trials}
            trials.append(running(len(trials), config))

    def test_survives_every_outcome_and_a_baseline_outside_the_space(self, sampler: str) -> None:
        plan = plan_for(sampler, baseline={"precision": "bf16", "micro_batch_size": 2})
        outcomes = [outcome for outcome in Outcome if not outcome.is_out_of_memory]
        largest = max(plan.candidates, key=lambda candidate: candidate.prediction.peak_device_bytes).config
        trials = [finished(0, plan.baseline, measurement(1.0, 1.0)),
                  finished(1, largest, outcome=Outcome.OOM_DEVICE)]
        for number in range(2, 16):
            config = suggest(plan, trials, plan.request.search)
            assert config is not None
            trials.append(finished(number, config, outcome=outcomes[number % len(outcomes)]))
        assert suggest(plan, trials, plan.request.search) in plan.index

    def test_a_single_point_is_suggested_once(self, sampler: str) -> None:
        plan = plan_for(sampler, {"zero_stage": [1]})
        assert len(search_with(plan, seconds, trials=5)) == 1


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_another_seed_takes_another_path(sampler: str) -> None:
    plan = plan_for(sampler)
    paths = {tuple(trial.config for trial in search_with(plan, seconds, trials=12, search=SearchRequest(
        sampler=sampler, seed=seed))) for seed in range(4)}  # type: ignore[arg-type]
    assert len(paths) == 4


def test_models_find_better_than_chance_on_a_large_space() -> None:
    plan = study_plan(study_request())

    def surface(config: TrainConfig) -> float:
        base = plan.predict(config).step_seconds or math.inf
        return base * (1 + 0.2 * (config.zero_stage - 2) ** 2 + 0.3 * (config.activation_checkpointing == "selective"))

    best = min(surface(candidate.config) for candidate in plan.candidates)

    def regret(sampler: str, seed: int) -> float:
        trials = search_with(plan, surface, trials=15, search=SearchRequest(
            sampler=sampler, seed=seed))  # type: ignore[arg-type]
        return min(surface(trial.config) for trial in trials) / best - 1

    assert sum(regret("tpe", seed) for seed in range(4)) < sum(regret("random", seed) for seed in range(4))
    assert max(regret("tpe", seed) for seed in range(4)) < 0.15


class TestRunningOutOfMemory:
    def test_everywhere_ends_at_the_smallest_micro_batch_instead_of_trying_all(self) -> None:
        plan = plan_for("tpe", {"micro_batch_size": [1, 2, 4, 8, 16], "zero_stage": [0, 1]})
        trials = search_with(plan, lambda config: Outcome.OOM_DEVICE, trials=100)
        assert len(trials) < len(plan.candidates)
        assert min(trial.config.micro_batch_size for trial in trials) == 1
        assert suggest(plan, trials, plan.request.search) is None

    def test_above_a_size_finds_that_size(self) -> None:
        plan = plan_for("tpe", {"micro_batch_size": [1, 2, 4, 8, 16]})
        trials = search_with(plan, lambda config: Outcome.OOM_DEVICE if config.micro_batch_size > 2 else 1.0,
                             trials=100)
        assert {trial.config.micro_batch_size for trial in trials if trial.outcome is Outcome.OK} == {1, 2}

    def test_never_tries_what_needs_more_by_every_term(self) -> None:
        plan = plan_for("tpe", {"micro_batch_size": [1, 4, 8], "zero_stage": [0, 3]})
        lost = next(candidate.config for candidate in plan.candidates
                    if (candidate.config.zero_stage, candidate.config.micro_batch_size) == (3, 4))
        left = remaining(plan, [finished(0, lost, outcome=Outcome.OOM_DEVICE)])
        assert {(config.zero_stage, config.micro_batch_size) for config in left} == {
            (0, 1), (0, 4), (0, 8), (3, 1)}  # stage 0 has no gathered parameters: not dominated

    def test_on_a_cpu_a_killed_rank_does_not_rule_out_smaller_configurations(self) -> None:
        plan = plan_for("tpe", {"micro_batch_size": [1, 4, 16]})
        trial = finished(0, plan.candidates[1].config, outcome=Outcome.OOM_HOST)
        assert [config.micro_batch_size for config in remaining(plan, [trial])] == [1]

    def test_on_an_accelerator_host_memory_rules_out_by_host_terms(self) -> None:
        plan = study_plan(study_request(space={"offload_optimizer_ratio": [0.0, 0.5, 1.0], "zero_stage": [1]}),
                          hardware=hardware_profile(device_type="cuda"))
        trial = finished(0, plan.candidates[1].config, outcome=Outcome.OOM_HOST)
        assert [config.offload_optimizer_ratio for config in remaining(plan, [trial])] == [0.0]


class TestWhatTheSamplerIsTold:
    def test_out_of_memory_is_complete_with_a_graded_constraint_and_a_plausible_value(self) -> None:
        plan = plan_for("gp")
        fine, lost = plan.candidates[0].config, plan.candidates[5].config
        trials = [finished(0, fine, measurement(0.5, 0.5, peak_device_bytes=plan.limits.device_bytes // 2)),
                  finished(1, lost, outcome=Outcome.OOM_DEVICE), running(2, plan.candidates[7].config)]
        encoding = make_encoding(plan)
        told = told_trials(plan, trials, encoding.distributions, encoding.encode)
        assert [trial.state.name for trial in told] == ["COMPLETE", "COMPLETE", "RUNNING"]
        assert told[0].value == pytest.approx(4096 / 0.5)
        assert told[0].constraints["device_memory"] == pytest.approx(-0.5)
        assert told[1].constraints["device_memory"] > 0 >= told[1].constraints["host_memory"]
        assert told[1].value is not None
        assert 0 < told[1].value < math.inf
        assert told[0].constraints.keys() == told[1].constraints.keys()

    def test_a_diverged_trial_keeps_its_speed_and_is_not_feasible(self) -> None:
        plan = plan_for("gp")
        trials = [finished(0, plan.candidates[0].config, measurement(0.1, 0.1), outcome=Outcome.NON_FINITE)]
        encoding = make_encoding(plan)
        told = told_trials(plan, trials, encoding.distributions, encoding.encode)
        assert told[0].value == pytest.approx(40_960)
        assert told[0].constraints["failure"] > 0

    def test_values_are_predictions_corrected_by_what_was_measured(self) -> None:
        plan = plan_for("tpe")
        first, second = plan.candidates[0], plan.candidates[1]
        assert first.prediction.step_seconds is not None
        assert second.prediction.step_seconds is not None
        slow = first.prediction.step_seconds * 2
        trials = [finished(0, first.config, measurement(slow, slow)),
                  finished(1, second.config, outcome=Outcome.TIMEOUT)]
        assert TrialValues(plan, trials).of(trials[1]) == pytest.approx(
            plan.tokens_per_step / second.prediction.step_seconds / 2)

    def test_cancelled_trials_say_nothing(self) -> None:
        plan = plan_for("tpe")
        encoding = make_encoding(plan)
        assert told_trials(plan, [finished(0, plan.candidates[0].config, outcome=Outcome.CANCELLED)],
                           encoding.distributions, encoding.encode) == []


def test_the_first_suggestions_are_predicted_fast_and_apart() -> None:
    plan = study_plan(study_request(memory_limit_bytes=400 * MIB, sampler="tpe"))
    trials = search_with(plan, seconds, trials=3)
    times = sorted(candidate.prediction.step_seconds or 0.0 for candidate in plan.candidates)
    assert plan.predict(trials[0].config).step_seconds == times[0]
    assert trials[0].config.precision != trials[1].config.precision
    assert trials[2].config.zero_stage not in {trials[0].config.zero_stage, trials[1].config.zero_stage}
