"""Decisions about a study, from its trials alone."""

import pytest

from autotune.domain.study import Trial, TrialRole, TrialState
from autotune.scheduler.fingerprints import calibration_key, probe_key, training_fingerprint
from autotune.scheduler.verdict import (
    budget_spent,
    contenders,
    hopeless_step_seconds,
    next_repeat,
    progress_of,
    why_hopeless,
)
from autotune.search.choose import choose
from engine.config import TrainConfig
from engine.report import Measurement, Outcome
from engine.spec import GptSpec, PythonSpec
from tests.support.launcher import FakeLauncher
from tests.support.samples import START, FakeClock, sample_measurement, sample_request


def trial(number: int, step_seconds: float | None = 0.1, *, outcome: Outcome = Outcome.OK, detail: str = "",
          repeats: tuple[Measurement, ...] = (), seconds: float = 10.0) -> Trial:
    clock = FakeClock()
    clock.advance(seconds)
    return Trial(
        study_id="s", number=number, role=TrialRole.BASELINE if number == 0 else TrialRole.SUGGESTED,
        state=TrialState.FINISHED, config=TrainConfig(micro_batch_size=number + 1), outcome=outcome, detail=detail,
        measurement=None if step_seconds is None else sample_measurement(step_seconds), repeats=repeats,
        started_at=START, finished_at=clock.now)


def failed(number: int, detail: str, outcome: Outcome = Outcome.CRASHED) -> Trial:
    return trial(number, None, outcome=outcome, detail=detail)


def test_three_failures_alike_are_hopeless_and_the_first_is_told() -> None:
    trials = [failed(number, f"rank 0: ValueError: boom\n\nlog {number}") for number in range(3)]
    assert why_hopeless(trials[:2]) is None
    assert why_hopeless(trials) == (
        "the first 3 trials failed alike (crashed); trial 0: rank 0: ValueError: boom\n\nlog 0")


def test_a_baseline_that_ran_out_of_memory_does_not_hide_that_all_others_fail_alike() -> None:
    trials = [failed(0, "out of memory", Outcome.OOM_DEVICE), *(failed(number, "boom") for number in range(1, 4))]
    assert why_hopeless(trials[:3]) is None
    assert why_hopeless(trials) == "the first 3 trials failed alike (crashed); trial 1: boom"


@pytest.mark.parametrize("trials", [
    [failed(0, "a"), failed(1, "a"), failed(2, "b")],
    [failed(0, "a"), failed(1, "a"), failed(2, "a", Outcome.TIMEOUT)],
    [trial(0), failed(1, "a"), failed(2, "a"), failed(3, "a"), failed(4, "a")],
    [failed(number, "out of memory", Outcome.OOM_DEVICE) for number in range(5)],
])
def test_other_beginnings_are_not(trials: list[Trial]) -> None:
    assert why_hopeless(trials) is None


def test_timeouts_are_alike_wherever_they_happened() -> None:
    trials = [failed(number, f"not finished after 5 s: rank 0 is in step {number}", Outcome.TIMEOUT)
              for number in range(3)]
    assert why_hopeless(trials) is not None


def test_the_search_leaves_seconds_for_measuring_again() -> None:
    request = sample_request(budget={"max_trials": 20, "max_seconds": 1000})
    trials = [trial(0, seconds=10.0)]
    assert budget_spent(request, trials, 1000 - 2 * 4 * 10 - 1) is None
    assert budget_spent(request, trials, 1000 - 2 * 4 * 10) == "budget of 1000 seconds spent"
    slow = [trial(0, seconds=500.0)]
    assert budget_spent(request, slow, 749.0) is None, "at most a quarter"
    assert budget_spent(request, slow, 750.0) is not None
    assert budget_spent(request, [], 5000.0) is None, "the first one always runs"
    assert budget_spent(sample_request(budget={"max_trials": 1}), trials, 0.0) == "budget of 1 trials spent"


def test_device_seconds_are_elapsed_seconds_times_devices() -> None:
    request = sample_request(hardware={"device": "cpu", "devices": 4},
                             budget={"max_seconds": 1000, "max_device_seconds": 1_600_000})
    assert budget_spent(request, [trial(0, seconds=10.0)], 1000 - 80) == "budget of 1000 seconds spent"
    request = sample_request(hardware={"device": "cpu", "devices": 4},
                             budget={"max_seconds": 500_000, "max_device_seconds": 1_600_000})
    trials = [trial(0, seconds=10.0)]
    assert budget_spent(request, trials, 400_000 - 2 * 4 * 10 - 1) is None
    assert budget_spent(request, trials, 400_000 - 2 * 4 * 10) == "budget of 1600000 device-seconds spent"
    assert budget_spent(request, [trial(0, seconds=200_000.0)], 300_000 - 1) is None, "a quarter for the finalists"
    late = progress_of(request, trials, trials_total=10, elapsed_seconds=399_990.0, measured_again=None)
    assert late.predicted_rest_seconds == pytest.approx(10 + 2 * 4 * 10)


def test_only_a_suggestion_can_be_too_slow_to_measure_on() -> None:
    request = sample_request(search={"sampler": "guided", "finalists": 2})
    trials = [trial(0, 0.4), trial(1, 0.2), trial(2, None, outcome=Outcome.OOM_DEVICE), trial(3, 0.21)]
    suggested = trial(4).model_copy(update={"state": TrialState.RUNNING, "outcome": None})
    assert hopeless_step_seconds(request, suggested, trials) == pytest.approx(0.22)
    assert hopeless_step_seconds(request, suggested, trials[:3]) == pytest.approx(0.4), "the slower finalist"
    assert hopeless_step_seconds(request, suggested, trials[1:3]) is None, "too few finalists"
    assert hopeless_step_seconds(request, trials[1], trials) is None, "measured again to be compared"
    default = suggested.model_copy(update={"role": TrialRole.DEFAULT})
    assert hopeless_step_seconds(request, default, trials) is None
    grid = sample_request(search={"sampler": "grid", "finalists": 2})
    assert hopeless_step_seconds(grid, suggested, trials) is None


def test_contenders_do_not_change_while_repeats_arrive() -> None:
    request = sample_request()
    trials = [trial(0, 0.9), trial(1, 0.1), trial(2, 0.2), trial(3, 0.3), trial(4, 0.4)]
    assert contenders(request, trials) == [1, 2, 3, 0]
    slower = sample_measurement(5.0)
    trials[1] = trials[1].model_copy(update={"repeats": (slower,)})
    assert contenders(request, trials) == [1, 2, 3, 0]


def test_repeats_go_round_after_round_there_and_back() -> None:
    request = sample_request(search={"confirm_rounds": 3, "finalists": 2})
    trials = [trial(0, 0.9), trial(1, 0.1), trial(2, 0.2)]
    order = []
    while (chosen := next_repeat(request, trials)) is not None:
        order.append(chosen.number)
        trials[chosen.number] = chosen.model_copy(update={"repeats": (*chosen.repeats, sample_measurement())})
    assert order == [1, 2, 0, 0, 2, 1, 1, 2, 0]


def test_rounds_end_once_the_winner_is_told_from_all_others() -> None:
    request = sample_request(search={"confirm_rounds": 5, "finalists": 2})
    trials = [trial(0, 0.9), trial(1, 0.1), trial(2, 0.2)]
    seconds = {0: 0.9, 1: 0.1, 2: 0.2}
    order = []
    while (chosen := next_repeat(request, trials)) is not None:
        order.append(chosen.number)
        again = sample_measurement(seconds[chosen.number])
        trials[chosen.number] = chosen.model_copy(update={"repeats": (*chosen.repeats, again)})
    assert order == [1, 2, 0, 0, 2, 1]


def test_rounds_do_not_go_on_for_a_tie_with_one_that_they_do_not_measure() -> None:
    """All took 1.25 times as long at first. Trial 3 was measured only then, and may be as fast as trial 1."""
    request = sample_request(search={"confirm_rounds": 5, "finalists": 2})
    later = {0: 0.72, 1: 0.08, 2: 0.088}
    trials = [trial(number, 1.25 * seconds, repeats=(sample_measurement(seconds),) * 2)
              for number, seconds in later.items()]
    trials.append(trial(3, 0.115))
    choice = choose(trials, among=[1, 2, 0])
    assert choice is not None
    assert (choice.trial_number, choice.tie_with) == (1, (3,))
    assert next_repeat(request, trials) is None


def test_a_single_contender_needs_no_comparison() -> None:
    assert next_repeat(sample_request(), [trial(0), failed(1, "a")]) is None


def test_the_rest_is_predicted_from_what_trials_took() -> None:
    request = sample_request(budget={"max_trials": 10, "max_seconds": 10_000})
    none_yet = progress_of(request, [], trials_total=10, elapsed_seconds=1.0, measured_again=None)
    assert (none_yet.trials_finished, none_yet.trials_total, none_yet.predicted_rest_seconds) == (0, 10, None)
    two = progress_of(request, [trial(0), trial(1)], trials_total=10, elapsed_seconds=20.0, measured_again=None)
    assert two.predicted_rest_seconds == pytest.approx(8 * 10 + 2 * 4 * 10)
    late = progress_of(request, [trial(0), trial(1)], trials_total=10, elapsed_seconds=9_990.0, measured_again=None)
    assert late.predicted_rest_seconds == pytest.approx(10 + 2 * 4 * 10), "never more than the budget"
    again = [trial(0, repeats=(sample_measurement(),)), trial(1)]
    confirming = progress_of(request, again, trials_total=0, elapsed_seconds=20.0, measured_again=[0, 1])
    assert (confirming.trials_total, confirming.repeats_finished, confirming.repeats_total) == (2, 1, 4)
    assert confirming.predicted_rest_seconds == pytest.approx(3 * 10)


def test_winners_stand_for_each_other_only_under_the_same_training_and_memory_limit() -> None:
    first = training_fingerprint(sample_request())
    assert training_fingerprint(sample_request("another name", budget={"max_trials": 3})) == first
    assert training_fingerprint(sample_request(training={"global_batch_size": 16})) != first
    assert training_fingerprint(sample_request(
        hardware={"device": "cpu", "devices": 1, "memory_limit_bytes": 10**6})) != first


def test_profiles_are_kept_by_what_they_depend_on() -> None:
    assert probe_key(GptSpec(kind="gpt")) == probe_key(GptSpec(kind="gpt", layers=4))
    assert probe_key(GptSpec(kind="gpt")) != probe_key(GptSpec(kind="gpt", layers=5))
    assert probe_key(PythonSpec(kind="python", entry_point="mine:task")) is None, "its code may change"
    assert calibration_key(FakeLauncher(), 1) != calibration_key(FakeLauncher(), 2)
    assert calibration_key(FakeLauncher(), 1) != calibration_key(FakeLauncher(device_name="new"), 1)
    assert calibration_key(FakeLauncher(), 1) == calibration_key(FakeLauncher(count=8), 1)
