"""The submit form: to the API's body, and problems back to their fields."""

import pytest

from autotune.domain.errors import FieldError
from autotune.service.fields import parse_request
from web.forms import FormError, default_values, parse_json, place_errors, request_body


def body(**changes: str) -> dict[str, object]:
    values = default_values() | {name.replace("__", "."): text for name, text in changes.items()}
    return request_body(values, {})


def test_the_form_as_it_first_is_can_be_submitted() -> None:
    request = parse_request(body())
    assert (request.model.kind, request.training.global_batch_size, request.search.space) == ("gpt", 32, None)
    assert request.training.optimizer.lr == pytest.approx(3e-4)


@pytest.mark.parametrize("kind", ["gpt", "vit", "huggingface"])
def test_every_kind_of_model_is_complete(kind: str) -> None:
    assert parse_request(body(kind=kind)).model.kind == kind


def test_a_python_task() -> None:
    request = parse_request(body(kind="python", python__entry_point="mine.tasks:make",
                                 python__arguments='{"width": 8}'))
    assert request.model.model_dump() == {"kind": "python", "entry_point": "mine.tasks:make", "arguments": {"width": 8}}


def test_the_memory_limit_has_its_unit() -> None:
    limited = parse_request(body(hardware__memory_limit_bytes="1.5", memory_unit="GiB"))
    assert limited.hardware.memory_limit_bytes == 3 * 2**29
    assert parse_request(body(hardware__memory_limit_bytes="600", memory_unit="MiB")
                         ).hardware.memory_limit_bytes == 600 * 2**20
    assert parse_request(body()).hardware.memory_limit_bytes is None


def test_device_seconds_are_limited_where_given() -> None:
    assert parse_request(body(budget__max_device_seconds="1200")).budget.max_device_seconds == 1200
    assert parse_request(body()).budget.max_device_seconds is None


def test_a_plan_names_a_cluster_and_degrees_and_has_no_budget() -> None:
    found = body(purpose="plan", hardware__cluster="h100-80gb", hardware__devices="16",
                 hardware__tensor_parallel="1, 2 4", hardware__pipeline_parallel="auto")
    assert "budget" not in found
    request = parse_request(found)
    assert (request.mode, request.hardware.cluster, request.hardware.devices) == ("plan", "h100-80gb", 16)
    assert (request.hardware.tensor_parallel, request.hardware.pipeline_parallel) == ([1, 2, 4], "auto")


def test_ticked_values_are_the_space() -> None:
    values = default_values() | {"space": "chosen", "search.space.micro_batch_size": "1, 2 4"}
    ticked = {"zero_stage": ("0", "3"), "overlap_comm": ("false",), "offload_optimizer_ratio": ("0.5",)}
    assert request_body(values, ticked)["search"]["space"] == {
        "zero_stage": [0, 3], "overlap_comm": [False], "offload_optimizer_ratio": [0.5], "micro_batch_size": [1, 2, 4]}


def test_ticks_mean_nothing_while_autotune_chooses() -> None:
    assert "space" not in request_body(default_values(), {"zero_stage": ("0",)})["search"]


def test_what_is_no_number_is_left_to_the_schema() -> None:
    assert body(training__global_batch_size="many")["training"]["global_batch_size"] == "many"  # type: ignore[index]


def test_json_that_cannot_be_read_names_field_and_place() -> None:
    with pytest.raises(FormError, match="line 1, column 2") as caught:
        body(kind="huggingface", huggingface__config="{oops")
    assert caught.value.error.field == "huggingface.config"
    with pytest.raises(FormError, match="not JSON"):
        parse_json("[" * 100_000)


def test_problems_are_placed_beside_their_fields() -> None:
    errors = [FieldError("model.heads", "a"), FieldError("training.optimizer.lr", "b"),
              FieldError("search.space.zero_stage", "c"), FieldError("search.space", "d"),
              FieldError("search.space.compile", "h"), FieldError("search.baseline.compile", "e"),
              FieldError("hardware.devices", "f"), FieldError("hardware.devices", "g")]
    placed, general = place_errors(errors, kind="gpt")
    assert placed == {"gpt.heads": ("a",), "training.optimizer.lr": ("b",), "search.space.zero_stage": ("c",),
                      "search.space": ("d", "compile: h"), "hardware.devices": ("f", "g")}
    assert [error.field for error in general] == ["search.baseline.compile"]


def test_a_problem_inside_a_huggingface_config_stands_at_the_config() -> None:
    placed, _ = place_errors([FieldError("model.config.model_type", "x")], kind="huggingface")
    assert placed == {"huggingface.config": ("x",)}
