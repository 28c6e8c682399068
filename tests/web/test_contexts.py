"""View values: what the study's and the trial's page say."""

from datetime import timedelta

import pytest

from autotune.domain.study import Progress, StudyPhase, StudyState
from autotune.domain.throughput import shown_throughput
from engine.config import TrainConfig
from engine.report import Outcome
from tests.support.samples import START, sample_best, sample_hardware_profile
from tests.web.story import MIB, measurement, prediction, request
from tests.web.values import study, trial
from web.contexts import (
    NotToldApart,
    best_view,
    compare,
    config_diff,
    memory_bar,
    memory_limit,
    phase_segments,
    phase_steps,
    progress_view,
    study_page,
    study_row,
    trial_page,
)
from web.trials_view import TableView, trials_table

BASE = trial(0, 0.4, peak_mib=400)
FASTER = trial(1, 0.2, peak_mib=500, config=TrainConfig(zero_stage=2, precision="bf16"))


class TestBest:
    def test_while_nothing_is_stored_it_is_the_fastest_so_far(self) -> None:
        best = best_view(study(), [BASE, FASTER])
        assert best is not None
        assert (best.trial_number, best.standing, best.baseline_number) == (1, "so far", 0)
        assert best.speedup == pytest.approx(2.0, rel=0.03)
        assert best.memory_change == pytest.approx(1.25)
        assert not best.is_baseline

    def test_the_stored_winner_counts_even_where_another_is_faster(self) -> None:
        stored = sample_best(trial_number=0, baseline_trial_number=0, confirmed=True, tie_with=(1,), speedup=1.0)
        best = best_view(study(StudyState.SUCCEEDED, best=stored), [BASE, FASTER])
        assert best is not None
        assert (best.trial_number, best.standing, best.is_baseline) == (0, "confirmed", True)
        faster = shown_throughput(FASTER)
        assert faster is not None
        assert best.ties == (NotToldApart(number=1, tokens_per_second=faster.tokens_per_second, runs=1),)

    @pytest.mark.parametrize(("paired", "of_rounds"), [(1.03, True), (None, False)])
    def test_the_gain_stands_beside_the_baseline_s_own_rate(self, paired: float | None, of_rounds: bool) -> None:
        """Whether it is from rounds is told from the two rates."""
        base, faster = shown_throughput(BASE), shown_throughput(FASTER)
        assert base is not None
        assert faster is not None
        ratio = faster.tokens_per_second / base.tokens_per_second
        stored = sample_best(trial_number=1, tokens_per_second=faster.tokens_per_second,
                             baseline_tokens_per_second=1.0, speedup=ratio * (paired or 1.0))
        best = best_view(study(StudyState.SUCCEEDED, best=stored), [BASE, FASTER])
        assert best is not None
        assert (best.baseline_tokens_per_second, best.of_rounds) == (base.tokens_per_second, of_rounds)
        assert best.speedup == stored.speedup

    def test_a_study_that_stopped_says_that_its_best_was_not_confirmed(self) -> None:
        best = best_view(study(StudyState.CANCELLED), [BASE])
        assert best is not None
        assert best.standing == "not confirmed"

    def test_there_is_none_where_nothing_ended_well(self) -> None:
        assert best_view(study(), [trial(0, None, outcome=Outcome.OOM_DEVICE)]) is None

    def test_a_baseline_that_failed_leaves_the_gain_open(self) -> None:
        best = best_view(study(), [trial(0, None, outcome=Outcome.OOM_DEVICE), FASTER])
        assert best is not None
        assert best.speedup is None

    def test_the_difference_lists_changed_knobs_first(self) -> None:
        rows = config_diff(BASE.config, FASTER.config)
        changed = [(row.knob, row.baseline, row.best) for row in rows if row.changed]
        assert changed == [("zero_stage", 0, 2), ("precision", "fp32", "bf16"), ("reduce_dtype", "fp32", "bf16")]
        assert [row.changed for row in rows] == sorted((row.changed for row in rows), reverse=True)


class TestProgress:
    def test_repeats_are_part_of_the_work(self) -> None:
        progress = Progress(trials_finished=10, trials_total=10, repeats_finished=2, repeats_total=6)
        assert progress_view(study(progress=progress)).fraction == pytest.approx(12 / 16)

    def test_an_unknown_total_is_no_fraction(self) -> None:
        assert progress_view(study()).fraction is None

    def test_a_finished_study_is_whole_and_its_time_stands(self) -> None:
        ended = study(StudyState.SUCCEEDED, progress=Progress(trials_finished=3, trials_total=20),
                      finished_at=START + timedelta(seconds=90))
        view = progress_view(ended)
        assert (view.fraction, view.elapsed_seconds) == (1.0, 90.0)

    @pytest.mark.parametrize(("state", "phase", "steps"), [
        (StudyState.QUEUED, None, ["next", "next", "next", "next"]),
        (StudyState.RUNNING, StudyPhase.SEARCHING, ["done", "done", "now", "next"]),
        (StudyState.CANCELLED, StudyPhase.CALIBRATING, ["done", "stopped", "next", "next"]),
        (StudyState.SUCCEEDED, None, ["done", "done", "done", "done"])])
    def test_phases(self, state: StudyState, phase: StudyPhase | None, steps: list[str]) -> None:
        assert [step.state for step in phase_steps(study(state, phase=phase))] == steps


class TestStudyPage:
    def test_outcomes_are_counted_and_the_running_trial_found(self) -> None:
        trials = [BASE, trial(1, None, outcome=Outcome.OOM_DEVICE), FASTER.model_copy(update={"number": 2}),
                  trial(3, None, outcome=None)]
        page = study_page(study(), trials)
        assert [(cue.label, count) for cue, count in page.outcomes] == [("ok", 2), ("out of device memory", 1)]
        assert page.current is not None
        assert page.current.number == 3
        assert page.live

    def test_a_study_asked_to_stop_says_so_until_it_has(self) -> None:
        assert study_page(study(cancel_requested=True), []).cue.label == "cancelling"
        assert study_page(study(StudyState.CANCELLED, cancel_requested=True), []).cue.label == "cancelled"

    def test_the_limit_is_the_request_s_else_an_accelerator_s_memory(self) -> None:
        assert memory_limit(study()) == 600 * MIB
        unlimited = request(hardware={"device": "auto", "devices": 2})
        assert memory_limit(study(request=unlimited)) is None
        on_gpu = sample_best(hardware_profile=sample_hardware_profile(device_type="cuda", memory_bytes=80 * 2**30))
        assert memory_limit(study(request=unlimited, best=on_gpu)) == 80 * 2**30

    def test_the_list_s_line(self) -> None:
        row = study_row(study(best=sample_best(tie_with=(4,))))
        assert (row.gain, row.tokens_per_second, row.tie) == (1.25, 1000.0, True)
        assert row.model == "GPT · 4 layers · hidden 256 · 4 heads · vocabulary 4,096 · 128 tokens"


class TestTrialPage:
    def test_the_winner_has_one_gain_wherever_it_is_shown(self) -> None:
        winner = sample_best(trial_number=1, speedup=1.9)
        assert trial_page(study(best=winner), FASTER, [BASE, FASTER]).gain == 1.9
        gains = {row.number: row.gain for row in trials_table([BASE, FASTER], TableView(), winner=winner).rows}
        assert gains == {0: 1.0, 1: 1.9}

    def test_neighbours_and_gain(self) -> None:
        page = trial_page(study(), FASTER, [BASE, FASTER])
        assert (page.previous, page.next) == (0, None)
        assert page.gain == pytest.approx(2.0, rel=0.03)

    def test_the_error_of_a_prediction_is_relative_to_the_measurement(self) -> None:
        predicted = trial(0, 0.4, peak_mib=400, prediction=prediction(440, 0.3))
        memory, host, step = compare(predicted)
        assert memory.error == pytest.approx(0.1, abs=1e-3)
        assert host.error is None
        assert step.error == pytest.approx(-0.25, abs=0.02)

    def test_phases_fill_the_bar(self) -> None:
        segments = phase_segments(FASTER)
        assert sum(segment.length for segment in segments) == pytest.approx(100)
        assert segments[1].start == pytest.approx(segments[0].length)

    def test_phases_are_of_the_runs_that_the_step_time_is_of(self) -> None:
        runs = (measurement(0.3, peak_mib=1), measurement(0.9, peak_mib=1, contended=True))
        page = trial_page(study(), FASTER.model_copy(update={"repeats": runs}), [BASE])
        assert page.rate is not None
        assert 0.21 < page.rate.step_seconds < 0.29
        assert sum(phase.value for phase in page.phases) == pytest.approx(page.rate.step_seconds, rel=1e-3)

    def test_the_memory_bar_holds_terms_measured_peak_and_a_near_limit(self) -> None:
        bar = memory_bar(prediction(400), 450 * MIB, 600 * MIB)
        assert bar is not None
        assert bar.limit is not None
        assert bar.limit == pytest.approx(100 / 1.04)
        assert bar.measured == pytest.approx(100 * 450 / (600 * 1.04))
        assert sum(segment.length for segment in bar.segments) == pytest.approx(100 * 400 / (600 * 1.04), rel=1e-3)

    def test_a_far_limit_does_not_shrink_the_bar(self) -> None:
        bar = memory_bar(prediction(400), None, 80 * 2**30)
        assert bar is not None
        assert bar.limit is None
        assert sum(segment.length for segment in bar.segments) > 90
