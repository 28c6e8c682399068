"""A described cluster: what is refused, and with which field."""

from typing import Any

import pytest

from autotune.domain.errors import InvalidRequestError
from autotune.domain.study import PlannedPoint
from autotune.predict.cluster import bundled_cluster
from autotune.service.fields import parse_request
from engine.config import TrainConfig
from tests.support.samples import sample_prediction

OWN = bundled_cluster("h100-80gb").model_dump(mode="json")


def body(**hardware: Any) -> dict[str, Any]:
    return {"name": "planned", "mode": "plan", "model": {"kind": "gpt"}, "training": {"global_batch_size": 64},
            "hardware": {"devices": 8, **hardware}}


def problem(**hardware: Any) -> tuple[str, str]:
    with pytest.raises(InvalidRequestError) as raised:
        parse_request(body(**hardware))
    (error,) = raised.value.errors
    return error.field.removeprefix("hardware."), error.message


def test_a_bundled_files_form_is_a_cluster() -> None:
    hardware = parse_request(body(cluster=OWN)).hardware
    assert (hardware.cluster, hardware.cluster_name) == (bundled_cluster("h100-80gb"), "h100-80gb")


@pytest.mark.parametrize(("change", "field", "text"), [
    ({"memory_bytes": 0}, "cluster.memory_bytes", "greater than or equal to 1"),
    ({"memory_byte": 1}, "cluster.memory_byte", "did you mean 'memory_bytes'"),
    ({"copy_bytes_per_second": -1}, "cluster.copy_bytes_per_second", "greater than 0"),
    ({"links": OWN["links"] | {"devices_per_node": 0}}, "cluster.links.devices_per_node", "greater than or equal"),
    ({"matmul_flops_per_second": {}}, "cluster.matmul_flops_per_second", "at least 1"),
    ({"matmul_flops_per_second": {"bf16": 2e15}}, "cluster.matmul_flops_per_second", "above the peak"),
    ({"matmul_peak_flops_per_second": {"fp16": 2e15}}, "cluster.matmul_peak_flops_per_second", "lacks fp32"),
])
def test_a_wrong_figure_is_named(change: dict[str, Any], field: str, text: str) -> None:
    found, message = problem(cluster=OWN | change)
    assert found == field
    assert text in message


def test_what_is_neither_a_name_nor_a_description_is_refused() -> None:
    assert problem(cluster=3) == ("cluster", "give the name of a bundled cluster, or an object that describes one")


def test_degrees_are_a_number_a_list_or_auto() -> None:
    hardware = parse_request(body(cluster="h100-80gb", tensor_parallel=4, pipeline_parallel="auto")).hardware
    assert (hardware.tensor_parallel, hardware.pipeline_parallel) == ([4], "auto")
    assert problem(cluster="h100-80gb", tensor_parallel="all")[0] == "tensor_parallel"
    assert problem(cluster="h100-80gb", tensor_parallel=[2, 0])[0] == "tensor_parallel.1"


def test_degrees_are_planned_never_measured() -> None:
    with pytest.raises(InvalidRequestError, match="can be planned, not measured"):
        parse_request(body(tensor_parallel=2) | {"mode": "tune"})


def test_points_that_were_kept_as_pairs_are_read() -> None:
    old = [TrainConfig.model_validate({}).model_dump(mode="json"), sample_prediction().model_dump(mode="json")]
    point = PlannedPoint.model_validate(old)
    assert (point.config, point.prediction, point.runs_here) == (TrainConfig.model_validate({}), sample_prediction(),
                                                                 True)
