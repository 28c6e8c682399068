"""The space of a request: what varies, what never does, and what is refused before any device is used."""

from typing import Any

import pytest

from autotune.domain.errors import InvalidRequestError
from autotune.search.knobs import KNOBS, positions
from autotune.search.space import divisors, parse_space
from engine.config import TrainConfig
from tests.search.support import study_request


def refusal(**arguments: Any) -> dict[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        parse_space(study_request(**arguments))
    return {error.field: error.message for error in caught.value.errors}


class TestWhatVaries:
    def test_only_named_knobs_vary_and_the_rest_keeps_the_baseline(self) -> None:
        baseline = {"zero_stage": 1, "precision": "bf16", "reduce_bucket_size": 12_345, "overlap_comm": False,
                    "prefetch_bucket_size": 77, "micro_batch_size": 4, "initial_scale_power": 11,
                    "reduce_dtype": "fp32"}
        space = parse_space(study_request(space={"zero_stage": [1, 2]}, baseline=baseline))
        assert [config.zero_stage for config in space.points] == [1, 2]
        for config in space.points:
            kept = config.model_dump()
            assert {name: kept[name] for name in baseline if name != "zero_stage"} == {
                name: value for name, value in baseline.items() if name != "zero_stage"}
            assert config.gradient_accumulation_steps == 4

    def test_no_point_leaves_the_stages_and_the_precision_asked_for(self) -> None:
        space = parse_space(study_request(space={"zero_stage": [1, 2], "precision": ["fp32"],
                                                 "micro_batch_size": "auto", "activation_checkpointing": "auto"}))
        assert {config.zero_stage for config in space.points} == {1, 2}
        assert {config.precision for config in space.points} == {"fp32"}
        assert space.default.zero_stage in (1, 2)

    def test_every_point_keeps_the_global_batch(self) -> None:
        space = parse_space(study_request(devices=3, global_batch_size=36))
        assert {config.global_batch_size(3) for config in space.points} == {36}
        assert {config.micro_batch_size for config in space.points} == {1, 2, 3, 4, 6, 12}

    def test_the_default_space_varies_stage_micro_batch_precision_checkpointing_buckets_and_offload(self) -> None:
        names = {knob.name for knob in parse_space(study_request()).knobs}
        assert names == {"zero_stage", "micro_batch_size", "precision", "activation_checkpointing",
                         "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "overlap_comm",
                         "offload_optimizer_ratio", "offload_param"}

    def test_compile_and_optimizer_precision_vary_only_on_request(self) -> None:
        space = parse_space(study_request(space={"compile": "auto", "optimizer_precision": "auto",
                                                 "precision": ["bf16"]}))
        assert {(config.compile, config.optimizer_precision) for config in space.points} == {
            (False, "fp32"), (False, "compute"), (True, "fp32"), (True, "compute")}

    def test_points_that_differ_only_in_knobs_that_do_nothing_are_one(self) -> None:
        space = parse_space(study_request(space={"zero_stage": [0, 3], "offload_param": [False, True],
                                                 "prefetch_bucket_size": [10, 20]}))
        assert len(space.points) == 1 + 2 * 2
        assert len(set(space.points)) == len(space.points)
        one = space.points[0].model_copy(update={"prefetch_bucket_size": 20})
        assert space.canonical(one) == space.points[0]

    def test_on_one_device_communication_knobs_do_not_multiply_the_space(self) -> None:
        space = parse_space(study_request(devices=1, space={"overlap_comm": "auto", "reduce_bucket_size": "auto",
                                                            "micro_batch_size": [8]}))
        assert len(space.points) == 1

    def test_the_reduce_dtype_follows_the_precision_unless_the_baseline_sets_it(self) -> None:
        followed = parse_space(study_request(space={"precision": ["fp32", "bf16"]}))
        assert [config.reduce_dtype for config in followed.points] == ["fp32", "bf16"]
        fixed = parse_space(study_request(space={"precision": ["fp32", "bf16"]}, baseline={"reduce_dtype": "fp32"}))
        assert [config.reduce_dtype for config in fixed.points] == ["fp32", "fp32"]

    def test_gradient_clipping_is_taken_into_every_configuration(self) -> None:
        space = parse_space(study_request(training={"gradient_clipping": 0.5}, space={"zero_stage": "auto"},
                                          baseline={"zero_stage": 1}))
        assert {config.gradient_clipping for config in (*space.points, space.baseline, space.default)} == {0.5}

    def test_values_that_depend_on_another_knob_fold_without_an_error(self) -> None:
        """Offload choices {none} at stage 0 and {none, all} from stage 1 on."""
        space = parse_space(study_request(space={"zero_stage": [0, 1, 2], "offload_optimizer_ratio": [0, 1]}))
        assert [(config.zero_stage, config.offload_optimizer_ratio) for config in space.points] == [
            (0, 0.0), (1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]

    def test_a_stage_that_excludes_the_only_value_allowed_is_dropped_with_its_reason(self) -> None:
        space = parse_space(study_request(space={"zero_stage": [2, 3], "offload_param": [True]}))
        assert [(config.zero_stage, config.offload_param) for config in space.points] == [(3, True)]
        assert space.impossible_combinations == {"offload_param True is possible only with zero_stage 3": 1}

    def test_a_combination_the_engine_refuses_is_dropped_with_its_reason(self) -> None:
        space = parse_space(study_request(space={"precision": ["bf16", "fp16"], "optimizer_precision": ["compute"]}))
        assert [config.precision for config in space.points] == ["bf16"]
        assert "fp16" in next(iter(space.impossible_combinations))

    def test_sizes_may_be_written_as_floats_and_strings(self) -> None:
        space = parse_space(study_request(space={"reduce_bucket_size": ["5e8", 5e8, 1]}))
        assert [config.reduce_bucket_size for config in space.points] == [1, 500_000_000]


class TestBaseline:
    def test_accumulation_follows_from_the_micro_batch(self) -> None:
        space = parse_space(study_request(global_batch_size=8, baseline={"micro_batch_size": 2}, space={}))
        assert (space.baseline.micro_batch_size, space.baseline.gradient_accumulation_steps) == (2, 2)

    def test_the_micro_batch_follows_from_accumulation(self) -> None:
        space = parse_space(study_request(global_batch_size=8, baseline={"gradient_accumulation_steps": 4}, space={}))
        assert space.baseline.micro_batch_size == 1

    def test_without_either_there_is_no_accumulation(self) -> None:
        space = parse_space(study_request(global_batch_size=8, space={}))
        assert (space.baseline.micro_batch_size, space.baseline.gradient_accumulation_steps) == (4, 1)

    def test_it_is_kept_exactly_although_outside_the_space(self) -> None:
        space = parse_space(study_request(space={"zero_stage": [1, 2]}, baseline={"zero_stage": 3}))
        assert space.baseline.zero_stage == 3
        assert {config.zero_stage for config in space.points} == {1, 2}

    def test_a_contradiction_is_shown_as_the_product(self) -> None:
        errors = refusal(global_batch_size=8, baseline={"micro_batch_size": 2, "gradient_accumulation_steps": 1})
        assert "8 != 2*1*2" in errors["search.baseline.micro_batch_size"]

    def test_a_list_is_a_search_space_not_a_value(self) -> None:
        errors = refusal(baseline={"zero_stage": [0, 1, 2, 3], "precision": ["bf16"]})
        assert "zero_stage must be one integer; lists are search spaces" in errors["search.baseline.zero_stage"]
        assert "precision must be one value; lists are search spaces" in errors["search.baseline.precision"]

    @pytest.mark.parametrize(("baseline", "field", "words"), [
        ({"zero_stge": 1}, "search.baseline.zero_stge", "did you mean 'zero_stage'?"),
        ({"zero_stage": 4}, "search.baseline.zero_stage", "0, 1, 2 or 3"),
        ({"micro_batch_size": 3}, "search.baseline.micro_batch_size", "32 not divisible by 6"),
        ({"micro_batch_size": 1.5}, "search.baseline.micro_batch_size", "whole number"),
        ({"reduce_bucket_size": 0}, "search.baseline.reduce_bucket_size", "greater than or equal to 1"),
        ({"reduce_bucket_size": -1}, "search.baseline.reduce_bucket_size", "greater than or equal to 1"),
        ({"reduce_bucket_size": 1.5}, "search.baseline.reduce_bucket_size", "whole number"),
        ({"offload_param": True}, "search.baseline", "offload_param needs zero_stage 3"),
        ({"tensor_parallel": 2}, "search.baseline.tensor_parallel", "not supported"),
        ({"global_batch_size": 8}, "search.baseline.global_batch_size", "training.global_batch_size"),
        ({"gradient_clipping": 2.0}, "search.baseline.gradient_clipping", "training.gradient_clipping"),
    ])
    def test_what_is_wrong_with_it_is_said_at_its_field(self, baseline: dict[str, Any], field: str,
                                                        words: str) -> None:
        assert words in refusal(baseline=baseline)[field]


class TestRefusals:
    def test_a_global_batch_that_devices_do_not_divide(self) -> None:
        assert "7 not divisible by 2" in refusal(global_batch_size=7)["training.global_batch_size"]

    @pytest.mark.parametrize(("name", "values", "words"), [
        ("zero_stge", [1], "did you mean zero_stage?"),
        ("stage", [1], "did you mean zero_stage?"),
        ("nonsense", [1], "knobs are zero_stage, micro_batch_size"),
        ("gradient_accumulation_steps", [1, 2], "give micro_batch_size instead"),
        ("gradient_clipping", [1.0], "training.gradient_clipping"),
        ("hysteresis", [1], "search.baseline"),
        ("tensor_parallel", [1, 2], "tensor_parallel is not supported"),
        ("pipeline_parallel_size", [2], "pipeline_parallel_size is not supported"),
        ("zero_stage", [], "empty"),
        ("zero_stage", [0, 4], "4 is not possible: Input should be 0, 1, 2 or 3"),
        ("zero_stage", [True], "must not be true or false"),
        ("precision", ["bf61"], "did you mean bf16?"),
        ("precision", ["fp8"], "'fp32', 'bf16' or 'fp16'"),
        ("overlap_comm", [1], "true or false"),
        ("reduce_bucket_size", [0], "greater than or equal to 1"),
        ("reduce_bucket_size", [1.5], "whole number"),
        ("offload_optimizer_ratio", [1.5], "less than or equal to 1"),
        ("micro_batch_size", [3], "3 does not divide 16"),
        ("micro_batch_size", [32], "possible are 1, 2, 4, 8, 16"),
    ])
    def test_of_a_knob_name_its_field_and_say_what_to_do(self, name: str, values: list[Any], words: str) -> None:
        assert words in refusal(space={name: values})[f"search.space.{name}"]

    def test_all_problems_are_reported_at_once(self) -> None:
        assert set(refusal(space={"zero_stge": [1], "precision": ["fp8"], "micro_batch_size": [5]})) == {
            "search.space.zero_stge", "search.space.precision", "search.space.micro_batch_size"}

    def test_a_space_in_which_nothing_can_run(self) -> None:
        errors = refusal(space={"zero_stage": [0, 1], "offload_param": [True]})
        assert errors["search.space"] == ("no combination can run: offload_param True is possible only with "
                                          "zero_stage 3")

    def test_a_space_too_large_to_enumerate(self) -> None:
        sizes = list(range(1, 401))
        assert "50000" in refusal(space={"reduce_bucket_size": sizes, "allgather_bucket_size": sizes,
                                         "zero_stage": [1]})["search.space"]

    def test_a_list_longer_than_any_space_before_its_values_are_looked_at(self) -> None:
        found = refusal(space={"zero_stage": [0] * 60_000, "reduce_bucket_size": list(range(1, 60_001))})
        assert found.keys() == {"search.space.zero_stage", "search.space.reduce_bucket_size"}


def test_every_knob_is_a_field_of_the_configuration_with_possible_values() -> None:
    for kind in KNOBS.values():
        assert kind.name in TrainConfig.model_fields
        assert [kind.check(value) for value in kind.auto] == list(kind.auto)


def test_divisors() -> None:
    assert divisors(1) == (1,)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)


@pytest.mark.parametrize(("values", "expected"), [
    ((1, 2, 4, 8), (0, 1, 2, 3)),
    ((1_000_000, 2_000_000, 16_000_000), (0, 1, 4)),
    ((0.0, 0.5, 1.0), (0, 1, 2)),
    ((0, 1, 2, 3), (0, 1, 2, 3)),
    ((1, 2, 3, 4), (0, 2, 3, 4)),
])
def test_positions_are_distinct_and_logarithmic(values: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert positions(values) == expected
