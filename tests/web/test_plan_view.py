"""View values of plans: rankings, what tells rows apart, and bars by term."""

import pytest

from autotune.domain.study import PlanSummary
from tests.support.plans import cluster_plan
from web.plan_view import plan_view


@pytest.fixture(scope="module")
def plan() -> PlanSummary:
    return cluster_plan().summary


def test_rejections_come_most_frequent_first() -> None:
    plan = PlanSummary(space={"zero_stage": [0, 1]}, points=9, feasible=2, rejections={"rare": 1, "often": 6})
    view = plan_view(plan)
    assert view.rejections == (("often", 6), ("rare", 1))
    assert (view.fastest.rows, view.exportable) == ((), ())


def test_what_is_the_same_in_all_rows_is_said_once(plan: PlanSummary) -> None:
    found = plan_view(plan).fastest
    assert ("Precision", "bf16") in found.common
    assert found.columns[:3] == ("Tensor × pipeline × data", "ZeRO", "Micro-batch × steps")
    first, point = found.rows[0], plan.fastest[0]
    assert first.cells[:2] == (f"{point.tensor_parallel} × {point.pipeline_parallel} × {point.data_parallel}",
                               str(point.config.zero_stage))


def test_memory_is_drawn_against_the_limit_and_time_against_the_slowest_row(plan: PlanSummary) -> None:
    view = plan_view(plan)
    for row, point in zip(view.fastest.rows, plan.fastest, strict=True):
        assert sum(piece.length for piece in row.memory) == pytest.approx(
            100 * point.prediction.peak_device_bytes / 85_000_000_000)
    slowest = view.fastest.rows[-1]
    assert sum(piece.length for piece in slowest.time) == pytest.approx(100)
    assert len(slowest.time) <= 8, "as many as there are colours"
    assert {label for _, label in view.time_terms} >= {"forward", "backward", "pipeline", "data exchange"}


def test_only_rows_without_tensor_and_pipeline_parallelism_can_be_exported(plan: PlanSummary) -> None:
    view = plan_view(plan)
    numbers = [row.number for row in view.exportable]
    assert numbers == sorted(numbers)
    assert numbers[0] == plan.first_exportable
    assert {(row.point.tensor_parallel, row.point.pipeline_parallel) for row in view.exportable} == {(1, 1)}
    assert [plan.rows[row.number - 1] for row in view.layouts.rows] == list(plan.layouts)
