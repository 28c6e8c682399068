"""The trials table: sorting, filtering, columns that say something."""

import pytest

from engine.config import TrainConfig
from engine.report import Outcome
from tests.web.values import trial
from web.trials_view import KNOBS, TableView, trials_table

TRIALS = [
    trial(0, 0.4, peak_mib=400, config=TrainConfig(micro_batch_size=4)),
    trial(1, None, outcome=Outcome.OOM_DEVICE, config=TrainConfig(micro_batch_size=16)),
    trial(2, 0.2, peak_mib=500, config=TrainConfig(micro_batch_size=8, zero_stage=1)),
    trial(3, 0.5, peak_mib=300, config=TrainConfig(micro_batch_size=1, zero_stage=3)),
    trial(4, None, outcome=None, config=TrainConfig(micro_batch_size=2)),
]


def numbers(**view: object) -> list[int]:
    return [row.number for row in trials_table(TRIALS, TableView(**view)).rows]  # type: ignore[arg-type]


def test_trials_come_in_order_at_first() -> None:
    assert numbers() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("view", "order"), [
    ({"sort": "tokens_per_second", "descending": True}, [2, 0, 3, 1, 4]),
    ({"sort": "tokens_per_second"}, [3, 0, 2, 1, 4]),
    ({"sort": "peak_device_bytes"}, [3, 0, 2, 1, 4]),
    ({"sort": "micro_batch_size", "descending": True}, [1, 2, 0, 4, 3]),
    ({"sort": "number", "descending": True}, [4, 3, 2, 1, 0])])
def test_sorted_with_unknown_values_last_either_way(view: dict[str, object], order: list[int]) -> None:
    assert numbers(**view) == order


def test_equal_values_keep_the_order_of_trials_either_way() -> None:
    assert numbers(sort="precision") == [0, 1, 2, 3, 4]
    assert numbers(sort="precision", descending=True) == [0, 1, 2, 3, 4]


def test_filtered_by_outcome_with_counts_of_all() -> None:
    table = trials_table(TRIALS, TableView(outcome="oom_device"))
    assert [row.number for row in table.rows] == [1]
    assert table.total == 5
    assert {value: count for value, _, count in table.filters} == {"ok": 3, "oom_device": 1, "running": 1}


def test_only_differing_knobs_unless_all_are_wanted() -> None:
    table = trials_table(TRIALS, TableView())
    assert table.knobs == ("zero_stage", "micro_batch_size")
    assert table.hidden_knobs == len(KNOBS) - 2
    assert trials_table(TRIALS, TableView(all_knobs=True)).knobs == KNOBS
    assert trials_table(TRIALS[:1], TableView()).knobs == ()


def test_a_trial_that_was_stopped_early_shows_what_it_measured_and_is_compared_with_nothing() -> None:
    (row,) = trials_table([trial(5, 0.5, outcome=Outcome.PRUNED)], TableView()).rows
    assert row.rate is not None
    assert row.rate.step_seconds == pytest.approx(0.5, rel=0.03)
    assert (row.gain, row.is_best) == (None, False)


def test_the_gain_is_over_trial_0_even_when_that_is_filtered_out() -> None:
    rows = {row.number: row for row in trials_table(TRIALS, TableView()).rows}
    assert rows[0].gain == pytest.approx(1.0)
    assert rows[2].gain == pytest.approx(2.0, rel=0.03)
    assert rows[1].gain is None


def test_the_named_winner_is_marked_else_the_fastest() -> None:
    assert [row.number for row in trials_table(TRIALS, TableView()).rows if row.is_best] == [2]
    assert [row.number for row in trials_table(TRIALS, TableView(), best_number=3).rows if row.is_best] == [3]


def test_host_memory_is_shown_only_where_there_is_any() -> None:
    assert not trials_table(TRIALS, TableView()).any_host_bytes
    offloaded = trial(0, measurement=TRIALS[0].measurements[0].model_copy(update={"peak_host_bytes": 5}))
    assert trials_table([offloaded], TableView()).any_host_bytes


class TestView:
    def test_a_query_gives_the_view_back(self) -> None:
        view = TableView(sort="gain", descending=True, outcome="ok", all_knobs=True)
        pairs = dict(pair.split("=") for pair in view.query().split("&"))
        assert TableView.from_query(pairs) == view
        assert TableView().query() == ""

    def test_nonsense_falls_back_to_the_first_view(self) -> None:
        assert TableView.from_query({"sort": "<script>", "order": "up", "outcome": "x", "knobs": "?"}) == TableView()

    def test_a_second_click_turns_the_order_round(self) -> None:
        once = TableView().sorted_by("tokens_per_second")
        assert (once.sort, once.descending) == ("tokens_per_second", True)
        assert once.sorted_by("tokens_per_second").descending is False
        assert TableView().sorted_by("step_seconds").descending is False
        assert [once.aria_sort(column) for column in ("tokens_per_second", "number")] == ["descending", "none"]
