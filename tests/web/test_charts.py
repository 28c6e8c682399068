"""Figures: what stands where, in which unit, and nothing a user wrote as markup."""

import json
from typing import Any

import pytest

from autotune.domain.throughput import throughput
from engine.config import TrainConfig
from engine.report import Outcome
from tests.web.story import MIB, measurement
from tests.web.values import trial
from web import charts


def trace(figure: dict[str, Any], name: str) -> dict[str, Any]:
    return next(trace for trace in figure["data"] if trace["name"] == name)


def names(figure: dict[str, Any]) -> list[str]:
    return [trace["name"] for trace in figure["data"]]


def rate(number: int, step_seconds: float) -> float:
    found = throughput(trial(number, step_seconds))
    assert found is not None
    return found.tokens_per_second


OOM = trial(1, None, outcome=Outcome.OOM_DEVICE, detail="rank 0: out of memory", peak_mib=700)
TRIALS = [trial(0, 0.4), OOM, trial(2, 0.5), trial(3, 0.2, config=TrainConfig(zero_stage=2)),
          trial(4, None, outcome=Outcome.CRASHED, detail="boom"), trial(5, None, outcome=None)]


class TestHistory:
    def test_the_best_so_far_only_rises_and_reaches_the_newest_trial(self) -> None:
        line = trace(charts.history(TRIALS), "best so far")
        assert line["x"] == [0, 3, 5]
        assert line["y"] == pytest.approx([rate(0, 0.4), rate(3, 0.2), rate(3, 0.2)])

    def test_out_of_memory_and_other_failures_are_marked_apart_on_the_axis(self) -> None:
        figure = charts.history(TRIALS)
        memory, failed = trace(figure, "out of memory"), trace(figure, "failed")
        assert (memory["x"], memory["y"], failed["x"], failed["y"]) == ([1], [0], [4], [0])
        assert memory["marker"]["symbol"] != failed["marker"]["symbol"]

    def test_error_bars_are_the_interval(self) -> None:
        points = trace(charts.history([trial(0, 0.4)]), "measured")
        measured = throughput(trial(0, 0.4))
        assert measured is not None
        assert points["error_y"]["array"] == pytest.approx([measured.interval[1] - measured.tokens_per_second])
        assert points["error_y"]["arrayminus"] == pytest.approx([measured.tokens_per_second - measured.interval[0]])

    def test_the_baseline_is_a_line_at_its_rate(self) -> None:
        layout = charts.history(TRIALS)["layout"]
        assert [shape["y0"] for shape in layout["shapes"]] == pytest.approx([rate(0, 0.4)])
        assert layout["yaxis"]["title"]["text"] == "tokens per second"

    def test_nothing_finished_is_no_trace(self) -> None:
        assert charts.history([trial(0, None, outcome=None)])["data"] == []

    def test_points_lead_to_their_trials(self) -> None:
        assert trace(charts.history(TRIALS), "measured")["customdata"] == [0, 2, 3]


class TestThroughputAgainstMemory:
    def test_stages_have_their_own_symbols_and_memory_its_unit(self) -> None:
        figure = charts.throughput_against_memory(TRIALS, limit_bytes=600 * MIB)
        assert trace(figure, "ZeRO 0")["x"] == pytest.approx([400, 400])
        assert trace(figure, "ZeRO 2")["y"] == pytest.approx([rate(3, 0.2)])
        assert trace(figure, "ZeRO 0")["marker"]["symbol"] != trace(figure, "ZeRO 2")["marker"]["symbol"]
        assert "MiB" in figure["layout"]["xaxis"]["title"]["text"]

    def test_the_limit_is_a_line_and_out_of_memory_stands_at_its_prediction(self) -> None:
        figure = charts.throughput_against_memory(TRIALS, limit_bytes=600 * MIB)
        assert figure["layout"]["shapes"][0]["x0"] == pytest.approx(600)
        assert trace(figure, "out of memory")["x"] == pytest.approx([700], rel=0.01)

    def test_without_a_limit_there_is_no_line(self) -> None:
        assert charts.throughput_against_memory(TRIALS, limit_bytes=None)["layout"]["shapes"] == []

    def test_the_named_best_is_ringed_else_the_fastest(self) -> None:
        ring = trace(charts.throughput_against_memory(TRIALS, limit_bytes=None), "best")
        assert ring["y"] == pytest.approx([rate(3, 0.2)])
        ring = trace(charts.throughput_against_memory(TRIALS, limit_bytes=None, best_number=0), "best")
        assert ring["y"] == pytest.approx([rate(0, 0.4)])


class TestOneTrial:
    def test_step_times_are_milliseconds_after_the_warm_up(self) -> None:
        one = trial(0, 0.2)
        figure = charts.step_times(one)
        warm, run = figure["data"]
        assert one.measurement is not None
        assert warm["x"] == [0, 1, 2]
        assert run["x"] == list(range(3, 15))
        assert run["y"] == pytest.approx([1e3 * seconds for seconds in one.measurement.step_seconds])
        assert warm["marker"]["symbol"] == "circle-open"

    def test_repeats_are_series_of_their_own(self) -> None:
        repeated = trial(0, 0.2, repeats=(measurement(0.21, peak_mib=1),))
        assert names(charts.step_times(repeated)) == [
            "warm-up, first run", "first run", "warm-up, repeat 1", "repeat 1"]

    def test_a_run_under_contention_is_named_and_does_not_move_the_mean(self) -> None:
        disturbed = measurement(0.4, peak_mib=1, contended=True)
        figure = charts.step_times(trial(0, 0.2, repeats=(disturbed,)))
        assert names(figure)[-1] == "repeat 1 (contended)"
        assert figure["layout"]["shapes"][0]["y0"] == pytest.approx(200, rel=0.03)

    def test_a_loss_that_is_not_finite_is_a_gap(self) -> None:
        run = measurement(0.2, peak_mib=1, losses=(4.0, None, 3.5))
        line = charts.losses(trial(0, measurement=run))["data"][0]
        assert line["y"] == [4.0, None, 3.5]
        assert line["connectgaps"] is False

    def test_a_trial_without_measurement_has_empty_figures(self) -> None:
        assert charts.step_times(OOM)["data"] == []
        assert charts.losses(OOM)["data"] == []


def test_texts_of_users_are_escaped_and_short() -> None:
    hostile = trial(0, None, outcome=Outcome.CRASHED, detail="<img src=x onerror=alert(1)>\n" + "y" * 500)
    text = charts.history([hostile])["data"][0]["text"][0]
    assert "<img" not in text
    assert "&lt;img" in text
    assert len(text) < 300


def test_figures_are_strict_json_and_name_colours_instead_of_fixing_them() -> None:
    figures = [charts.history(TRIALS), charts.throughput_against_memory(TRIALS, limit_bytes=1),
               charts.step_times(TRIALS[0]), charts.losses(TRIALS[0])]
    text = json.dumps(figures, allow_nan=False)
    assert "var(--accent)" in text
    assert "#" not in text
