"""One study from claim to winner."""

from collections import Counter
from collections.abc import Callable

import pytest

from autotune.domain.study import EventKind, Study, StudyPhase, StudyState, TrialRole, TrialState
from autotune.store import Database
from engine.config import TrainConfig
from engine.report import MAYBE_FROM_OUTSIDE, FailureReport, Outcome, TrialReport, TrialRequest
from tests.support.launcher import FakeLauncher, by_micro_batch
from tests.support.samples import sample_failure, sample_measurement, sample_report
from tests.support.scheduling import finished, in_loop, scheduler, study_of, submit, trials_of

TWO_DEVICES = {"device": "cpu", "devices": 2}
WIDE_SPACE = {"sampler": "random", "space": {
    "zero_stage": [0, 1, 2, 3], "offload_optimizer_ratio": [0.0, 1.0], "micro_batch_size": [1, 2, 4]}}


async def run(database: Database, launcher: FakeLauncher, **changes: object) -> Study:
    study = submit(database, **changes)
    async with scheduler(database, launcher):
        return await finished(database, study)


@in_loop
async def test_a_study_ends_with_its_fastest_configuration(any_database: Database) -> None:
    launcher = FakeLauncher()
    study = await run(any_database, launcher)
    assert (study.state, study.error, study.note) == (StudyState.SUCCEEDED, None, "space exhausted")
    assert study.best is not None
    assert study.best.config.micro_batch_size == 4
    assert study.best.config.zero_stage == 0
    assert study.best.confirmed
    assert (study.model_fingerprint, study.hardware_fingerprint) == ("model-1", "hardware-1")
    assert study.plan is not None
    assert study.plan.feasible == 6
    with any_database.read() as tx:
        assert tx.best.for_model("gpt-tiny") == (study.best,)
        assert tx.leases.live() == ()
    assert launcher.open_groups == set()


@in_loop
async def test_the_baseline_is_trial_0_and_the_gain_is_measured_against_it(database: Database) -> None:
    study = await run(database, FakeLauncher(), search={
        "sampler": "random", "baseline": {"zero_stage": 1, "micro_batch_size": 1},
        "space": {"zero_stage": [0, 1], "micro_batch_size": [1, 2, 4]}})
    trials = trials_of(database, study)
    assert [(trial.role, trial.config.zero_stage, trial.config.micro_batch_size) for trial in trials[:2]] == [
        (TrialRole.BASELINE, 1, 1), (TrialRole.DEFAULT, 0, 4)]
    assert {trial.role for trial in trials[2:]} == {TrialRole.SUGGESTED}
    assert study.best is not None
    assert study.best.baseline_trial_number == 0
    assert study.best.speedup == pytest.approx(0.11 / 0.025)
    assert len(trials[0].repeats) == 2, "the baseline is measured again beside the finalists"


@in_loop
async def test_what_won_before_is_tried_first(any_database: Database) -> None:
    space = {"zero_stage": [0, 1, 2, 3], "micro_batch_size": [1, 2, 4, 8], "activation_checkpointing": ["none", "full"]}
    first = await run(any_database, FakeLauncher(script=_odd_one_is_fastest), budget={"max_trials": 40},
                      search={"sampler": "grid", "space": space})
    assert first.best is not None
    assert first.best.config.activation_checkpointing == "full"
    second = await run(any_database, FakeLauncher(script=_odd_one_is_fastest), budget={"max_trials": 4},
                       search={"sampler": "guided", "space": space})
    trials = trials_of(any_database, second)
    assert (trials[1].role, trials[1].config) == (TrialRole.SUGGESTED, first.best.config)
    assert second.note is not None
    assert f"tried first what won in study {first.id[:8]}" in second.note
    assert (f"predictions began corrected by what was measured in 16 trials of study {first.id[:8]} (the same model on "
            "this hardware)") in second.note


def _odd_one_is_fastest(request: TrialRequest) -> TrialReport:
    config = request.config
    odd = (config.zero_stage, config.micro_batch_size, config.activation_checkpointing) == (3, 2, "full")
    return sample_report(0.02 if odd else 0.1)


@in_loop
async def test_a_plan_probes_on_one_device_and_measures_nothing(any_database: Database) -> None:
    launcher = FakeLauncher(count=1)
    study = await run(any_database, launcher, mode="plan", training={"global_batch_size": 64}, search={},
                      hardware={"device": "cuda", "devices": 8, "cluster": "a100-80gb"})
    assert (study.state, study.error, study.best) == (StudyState.SUCCEEDED, None, None)
    assert study.note is not None
    assert study.note.startswith("predicted for 8 x NVIDIA A100")
    assert [run.request.kind for run in launcher.runs] == ["probe"]
    assert {len(run.devices) for run in launcher.runs} == {1}
    assert trials_of(any_database, study) == ()
    assert study.plan is not None
    fastest = [point.prediction.step_seconds for point in study.plan.fastest]
    assert fastest == sorted(fastest, key=lambda seconds: seconds or 0.0)
    assert fastest[0] == min(point.prediction.step_seconds or 0.0 for point in study.plan.predictions)
    with any_database.read() as tx:
        assert tx.best.for_model("gpt-tiny") == ()
        assert tx.profiles.list_hardware() == (), "described, not measured"
        assert tx.leases.live() == ()


@in_loop
async def test_without_a_baseline_the_default_is_trial_0(database: Database) -> None:
    study = await run(database, FakeLauncher())
    first, *others = trials_of(database, study)
    assert (first.number, first.role, first.config.micro_batch_size) == (0, TrialRole.BASELINE, 4)
    assert {trial.role for trial in others} == {TrialRole.SUGGESTED}


@in_loop
async def test_every_configuration_is_run_once_until_the_space_is_exhausted(database: Database) -> None:
    study = await run(database, FakeLauncher(), hardware=TWO_DEVICES, search=WIDE_SPACE,
                      budget={"max_trials": 100, "max_seconds": 600})
    trials = trials_of(database, study)
    assert study.note == "space exhausted"
    assert study.plan is not None
    assert len(trials) == study.plan.points == 21, "24 combinations, of which offload does nothing at stage 0"
    assert max(Counter(trial.config for trial in trials).values()) == 1
    assert study.progress.trials_finished == 21


@in_loop
async def test_the_budget_of_trials_is_kept(database: Database) -> None:
    study = await run(database, FakeLauncher(), hardware=TWO_DEVICES, search=WIDE_SPACE,
                      budget={"max_trials": 5, "max_seconds": 600})
    assert len(trials_of(database, study)) == 5
    assert study.note == "budget of 5 trials spent"
    assert study.progress.trials_total == 5


@in_loop
async def test_the_budget_of_seconds_is_kept_and_the_baseline_always_runs(database: Database) -> None:
    study = await run(database, FakeLauncher(seconds=0.05), budget={"max_trials": 20, "max_seconds": 0.01})
    assert (study.state, study.note) == (StudyState.SUCCEEDED, "budget of 0.01 seconds spent")
    assert [trial.role for trial in trials_of(database, study)] == [TrialRole.BASELINE]
    assert study.best is not None
    assert not study.best.confirmed


@in_loop
async def test_finalists_are_not_measured_again_once_the_device_seconds_are_spent(database: Database) -> None:
    def then_slowly(request: TrialRequest) -> TrialReport:
        launcher.seconds = 0.8
        return by_micro_batch(request)

    launcher = FakeLauncher(script=then_slowly)
    study = await run(database, launcher, hardware=TWO_DEVICES, search=WIDE_SPACE,
                      budget={"max_trials": 2, "max_device_seconds": 1.4})
    assert (study.request.budget.max_device_seconds, study.note) == (1.4, "budget of 2 trials spent")
    assert [len(trial.repeats) for trial in trials_of(database, study)] == [0, 0]
    assert study.best is not None
    assert not study.best.confirmed


@in_loop
async def test_only_the_knobs_in_the_space_vary(database: Database) -> None:
    study = await run(database, FakeLauncher(), hardware=TWO_DEVICES, budget={"max_trials": 12, "max_seconds": 600},
                      search={"sampler": "random", "baseline": {"zero_stage": 2, "precision": "fp32",
                                                                "reduce_bucket_size": 12345},
                              "space": {"zero_stage": [1, 2], "precision": ["fp32"], "micro_batch_size": [1, 2, 4]}})
    trials = trials_of(database, study)
    assert {trial.config.zero_stage for trial in trials} == {1, 2}
    searched = {"zero_stage", "precision", "micro_batch_size", "gradient_accumulation_steps"}
    assert len({trial.config.model_dump_json(exclude=searched) for trial in trials}) == 1
    assert all(trial.config.reduce_bucket_size == 12345 for trial in trials)
    assert all(trial.config.global_batch_size(2) == 8 for trial in trials)


@in_loop
async def test_finalists_are_measured_again_in_turns(database: Database) -> None:
    launcher = FakeLauncher()
    study = await run(database, launcher)
    trials = trials_of(database, study)
    repeats = [run.request for run in launcher.trials[len(trials):]]
    order = sorted(trials, key=lambda trial: -(trial.measurement.tokens_per_second if trial.measurement else 0))[:3]
    assert [request.config for request in repeats if isinstance(request, TrialRequest)] == [
        trial.config for trial in [*order, *reversed(order)]]
    assert study.progress.repeats_finished == study.progress.repeats_total == 6
    assert study.progress.predicted_rest_seconds == 0


def scripted(answers: dict[int, list[TrialReport]]) -> Callable[[TrialRequest], TrialReport]:
    """Answers by micro-batch size, the last one for ever."""
    def script(request: TrialRequest) -> TrialReport:
        waiting = answers[request.config.micro_batch_size]
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    return script


MICRO_BATCHES = {"sampler": "random", "space": {"micro_batch_size": [1, 2, 4, 8]}}


@in_loop
async def test_a_finalist_that_was_only_lucky_loses(database: Database) -> None:
    launcher = FakeLauncher(script=scripted({
        1: [sample_report(0.9)], 2: [sample_report(0.5)], 4: [sample_report(0.45)],
        8: [sample_report(0.4), sample_report(0.6)]}))
    study = await run(database, launcher, search=MICRO_BATCHES)
    assert study.best is not None
    assert study.best.config.micro_batch_size == 4


@in_loop
async def test_a_finalist_that_fails_when_repeated_cannot_win(database: Database) -> None:
    launcher = FakeLauncher(script=scripted({
        1: [sample_report(0.9)], 2: [sample_report(0.5)], 4: [sample_report(0.45)],
        8: [sample_report(0.1), sample_failure(Outcome.OOM_DEVICE, "too much")]}))
    study = await run(database, launcher, search=MICRO_BATCHES)
    assert study.best is not None
    assert study.best.config.micro_batch_size == 4
    failed = next(trial for trial in trials_of(database, study) if trial.config.micro_batch_size == 8)
    assert failed.outcome is Outcome.OOM_DEVICE
    assert failed.detail == "when measured again: too much"


@in_loop
async def test_trials_that_all_fail_alike_end_the_study_with_the_first_cause(database: Database) -> None:
    numbers = iter(range(100))

    def script(request: TrialRequest) -> TrialReport:
        return sample_failure(Outcome.CRASHED, f"rank 0: ValueError: bad arg\n\nEnd of the log:\nrun {next(numbers)}")

    study = await run(database, FakeLauncher(script=script), hardware=TWO_DEVICES, search=WIDE_SPACE)
    assert study.state is StudyState.FAILED
    assert study.error is not None
    assert "ValueError: bad arg" in study.error
    assert "run 0" in study.error
    assert len(trials_of(database, study)) == 3
    assert study.best is None


@in_loop
async def test_different_failures_do_not_end_the_study_early(database: Database) -> None:
    numbers = iter(range(100))

    def script(request: TrialRequest) -> TrialReport:
        return sample_failure(Outcome.CRASHED, f"rank 0: ValueError: {next(numbers)}")

    study = await run(database, FakeLauncher(script=script), search=MICRO_BATCHES)
    assert study.state is StudyState.FAILED
    assert len(trials_of(database, study)) == 4
    assert study.error is not None
    assert "4 x crashed" in study.error
    assert "ValueError: 0" in study.error


@in_loop
async def test_running_out_of_memory_everywhere_says_so(database: Database) -> None:
    launcher = FakeLauncher(script=lambda request: sample_failure(Outcome.OOM_DEVICE, "out of memory"))
    study = await run(database, launcher, search=MICRO_BATCHES)
    assert study.state is StudyState.FAILED
    assert study.error is not None
    assert "no feasible micro-batch" in study.error or "no feasible configuration" in study.error
    assert "oom_device" in study.error
    trials = trials_of(database, study)
    assert {trial.outcome for trial in trials} == {Outcome.OOM_DEVICE}
    assert min(trial.config.micro_batch_size for trial in trials) == 1
    assert launcher.started >= len(trials), "each retry is a fresh group"


@in_loop
async def test_a_late_lack_of_memory_leaves_the_largest_micro_batch_that_fits(database: Database) -> None:
    def script(request: TrialRequest) -> TrialReport:
        if request.config.micro_batch_size > 2:
            return sample_failure(Outcome.OOM_DEVICE, "out of memory in step 1").model_copy(update={"failed_step": 1})
        return by_micro_batch(request)

    launcher = FakeLauncher(script=script)
    study = await run(database, launcher, search=MICRO_BATCHES)
    assert study.state is StudyState.SUCCEEDED
    assert study.best is not None
    assert study.best.config.micro_batch_size == 2
    groups = [run.group for run in launcher.trials]
    for position, trial in enumerate(launcher.trials[:-1]):
        assert isinstance(trial.request, TrialRequest)
        fresh = groups[position + 1] != groups[position]
        assert fresh == (trial.request.config.micro_batch_size > 2), "warm after success, fresh after failure"


@in_loop
async def test_a_model_that_cannot_fit_fails_before_any_trial(database: Database) -> None:
    launcher = FakeLauncher()
    study = await run(database, launcher, hardware={"device": "cpu", "devices": 1, "memory_limit_bytes": 1000})
    assert study.state is StudyState.FAILED
    assert study.error is not None
    assert "no feasible micro-batch" in study.error
    assert launcher.trials == []


@pytest.mark.parametrize(("trial_seconds", "expected"), [(30.0, 120.0), (600.0, 600.0)])
def test_what_hangs_before_the_first_trial_does_not_hold_devices_for_the_whole_budget(
        database: Database, trial_seconds: float, expected: float) -> None:
    launcher = FakeLauncher()

    @in_loop
    async def whole_study() -> None:
        await run(database, launcher, search=MICRO_BATCHES, budget={
            "max_seconds": 7 * 24 * 3600, "max_trials": 1, "trial_timeout_seconds": trial_seconds})

    whole_study()
    assert [(run.request.kind, run.deadline_seconds) for run in launcher.runs] == [
        ("probe", expected), ("calibrate", expected), ("trial", trial_seconds)]


@in_loop
async def test_a_probe_that_fails_fails_the_study_with_its_cause(database: Database) -> None:
    launcher = FakeLauncher(probe_failure=FailureReport(detail="TaskError: no such layer", log_tail="line\n"))
    study = await run(database, launcher)
    assert study.state is StudyState.FAILED
    assert study.error == "the model could not be probed: TaskError: no such layer\n\nEnd of the log:\nline\n"


@in_loop
async def test_workers_that_cannot_start_fail_the_study_after_a_second_try(database: Database) -> None:
    launcher = FakeLauncher(starts_that_fail=1)
    study = await run(database, launcher)
    assert study.state is StudyState.SUCCEEDED
    launcher = FakeLauncher(starts_that_fail=100, device_name="another")
    study = await run(database, launcher)
    assert (study.state, study.error) == (StudyState.FAILED, "no room for workers")
    assert launcher.starts_that_fail == 98


@in_loop
async def test_a_trial_that_was_killed_for_no_known_cause_is_tried_once_more(database: Database) -> None:
    killed: list[TrainConfig] = []

    def script(request: TrialRequest) -> TrialReport:
        if request.config.micro_batch_size == 4 and not killed:
            killed.append(request.config)
            return TrialReport(outcome=Outcome.OOM_HOST, detail=f"rank 0: killed (signal 9); {MAYBE_FROM_OUTSIDE}")
        return by_micro_batch(request)

    study = await run(database, FakeLauncher(script=script))
    assert (study.state, study.error) == (StudyState.SUCCEEDED, None)
    assert study.best is not None
    assert study.best.config.micro_batch_size == 4
    outcomes = [trial.outcome for trial in trials_of(database, study) if trial.config == killed[0]]
    assert outcomes == [Outcome.OOM_HOST, Outcome.OK]


@in_loop
async def test_profiles_are_used_again(database: Database) -> None:
    launcher = FakeLauncher()
    await run(database, launcher)
    assert [run.request.kind for run in launcher.runs[:3]] == ["probe", "calibrate", "trial"]
    again = FakeLauncher()
    study = await run(database, again)
    assert {run.request.kind for run in again.runs} == {"trial"}
    assert (study.model_fingerprint, study.hardware_fingerprint) == ("model-1", "hardware-1")
    other = FakeLauncher(device_name="another core")
    await run(database, other)
    assert [run.request.kind for run in other.runs[:2]] == ["calibrate", "trial"]


@in_loop
async def test_a_calibration_beside_other_work_is_done_again_by_the_next_study(database: Database) -> None:
    for is_busy, kinds in ((True, {"probe", "calibrate", "trial"}), (False, {"calibrate", "trial"}),
                           (True, {"trial"})):
        launcher = FakeLauncher(is_busy=is_busy)
        await run(database, launcher)
        assert {run.request.kind for run in launcher.runs} == kinds


@in_loop
async def test_a_contended_measurement_is_repeated_once(database: Database) -> None:
    contended = sample_report(0.1, contended=True)
    launcher = FakeLauncher(script=scripted({
        1: [sample_report(0.9)], 2: [contended, sample_report(0.5)], 4: [sample_report(0.6)], 8: [contended]}))
    study = await run(database, launcher, search=MICRO_BATCHES)
    trials = {trial.config.micro_batch_size: trial for trial in trials_of(database, study)}
    assert trials[2].measurement is not None
    assert not trials[2].measurement.contended
    assert trials[8].measurement is not None
    assert trials[8].measurement.contended, "the second measurement stands, marked"
    assert study.best is not None
    assert study.best.config.micro_batch_size == 2, "a contended measurement cannot win"
    first_runs = [run.request.config.micro_batch_size for run in launcher.trials
                  if isinstance(run.request, TrialRequest)][:6]
    assert Counter(first_runs) == {1: 1, 2: 2, 4: 1, 8: 2}


@in_loop
async def test_a_contended_measurement_stays_where_its_repeat_fails(database: Database) -> None:
    launcher = FakeLauncher(script=scripted({
        1: [sample_report(0.9)], 2: [sample_report(0.8)], 4: [sample_report(0.7)],
        8: [sample_report(0.1, contended=True), sample_failure(Outcome.TIMEOUT, "no answer"), sample_report(0.1)]}))
    study = await run(database, launcher, search={**MICRO_BATCHES, "finalists": 4})
    kept = next(trial for trial in trials_of(database, study) if trial.config.micro_batch_size == 8)
    assert kept.outcome is Outcome.OK
    assert kept.measurement is not None
    assert kept.measurement.contended
    assert study.best is not None
    assert study.best.config.micro_batch_size == 8, "measured again among the finalists, undisturbed"


@in_loop
async def test_results_under_contention_alone_are_shown_but_not_stored_as_best(database: Database) -> None:
    launcher = FakeLauncher(script=lambda request: TrialReport(
        outcome=Outcome.OK, measurement=sample_measurement(1 / request.config.micro_batch_size, contended=True)))
    study = await run(database, launcher, search=MICRO_BATCHES)
    assert study.state is StudyState.SUCCEEDED
    assert study.note is not None
    assert "other processes" in study.note
    assert study.best is not None
    assert study.best.config.micro_batch_size == 8
    with database.read() as tx:
        assert tx.best.for_model("gpt-tiny") == ()


@in_loop
async def test_trials_keep_prediction_log_and_events(database: Database) -> None:
    study = await run(database, FakeLauncher(seconds=0.02), search=MICRO_BATCHES)
    trials = trials_of(database, study)
    assert all(trial.state is TrialState.FINISHED and trial.prediction is not None for trial in trials)
    with database.read() as tx:
        assert "served trial in group" in tx.trials.log(study.id, 0)
        events = tx.events.after(0, study_id=study.id, limit=1000)
    kinds = [event.kind for event in events]
    phases = [event.data["phase"] for event in events if event.kind is EventKind.STUDY_PHASE]
    assert phases == [StudyPhase.PROBING, StudyPhase.CALIBRATING, StudyPhase.SEARCHING, StudyPhase.CONFIRMING]
    assert kinds.count(EventKind.TRIAL_STARTED) == kinds.count(EventKind.TRIAL_FINISHED) == 4 + 6
    assert EventKind.BEST_CHANGED in kinds
    assert [event.data["state"] for event in events if event.kind is EventKind.STUDY_STATE] == [
        "queued", "running", "succeeded"]
    assert kinds[-1] is EventKind.STUDY_STATE


@in_loop
async def test_the_best_so_far_is_known_while_the_search_goes_on(database: Database) -> None:
    seen = []

    def script(request: TrialRequest) -> TrialReport:
        found = study_of(database, study)
        seen.append(found.best and found.best.tokens_per_second)
        return by_micro_batch(request)

    study = submit(database, search={**MICRO_BATCHES, "baseline": {"micro_batch_size": 1}})
    async with scheduler(database, FakeLauncher(script=script)):
        study = await finished(database, study)
    assert seen[0] is None
    assert seen[1] == pytest.approx(8 * 16 / 0.1)
    assert [rate for rate in seen[1:4] if rate] == sorted(rate for rate in seen[1:4] if rate)
    assert study.progress.elapsed_seconds > 0
