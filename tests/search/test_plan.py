"""The plan: what can be tried, and why the rest is not."""

import pickle
from typing import Any

import pytest

from autotune.search.plan import Limits, device_bytes_to_allow
from autotune.search.space import parse_space
from engine.config import TrainConfig
from tests.search.support import MIB, hardware_profile, model_profile, study_plan, study_request


def test_every_point_is_either_a_candidate_or_rejected_with_a_reason() -> None:
    plan = study_plan(study_request(memory_limit_bytes=120 * MIB))
    assert len(plan.candidates) + len(plan.rejections) == len(plan.space.points)
    assert all(candidate.prediction.peak_device_bytes <= 120 * MIB for candidate in plan.candidates)
    assert plan.candidates
    summary = plan.summary()
    assert summary.points == len(plan.space.points)
    assert sum(summary.rejections.values()) == len(plan.rejections)
    assert set(summary.examples) == set(summary.rejections)
    assert summary.rejections["does not fit into device memory"] > 0


def test_a_precision_that_the_hardware_lacks_is_rejected_with_that_reason() -> None:
    plan = study_plan(study_request(space={"precision": ["fp32", "bf16"]}),
                      hardware=hardware_profile(precisions=("fp32",)))
    assert [candidate.config.precision for candidate in plan.candidates] == ["fp32"]
    assert plan.summary().rejections == {"precision bf16 does not run on test cpu, which runs fp32": 1}


def test_fp16_is_tried_when_named_or_when_bf16_is_lacking() -> None:
    def precisions(space: dict[str, list[str] | str], **hardware: tuple[str, ...]) -> set[str]:
        plan = study_plan(study_request(space=space), hardware=hardware_profile(**hardware))
        return {candidate.config.precision for candidate in plan.candidates}

    assert precisions({"precision": "auto"}) == {"fp32", "bf16"}
    assert precisions({"precision": "auto"}, precisions=("fp32", "fp16")) == {"fp32", "fp16"}
    assert precisions({"precision": ["fp32", "fp16"]}) == {"fp32", "fp16"}


def test_buckets_beyond_the_model_are_one() -> None:
    plan = study_plan(study_request(space={"reduce_bucket_size": [1_000, 100_000_000, 5_000_000]}))
    assert [candidate.config.reduce_bucket_size for candidate in plan.candidates] == [1_000, 5_000_000]
    largest = plan.candidates[1].config.model_copy(update={"reduce_bucket_size": 100_000_000})
    assert plan.canonical(largest) == plan.candidates[1].config


def test_fp16_is_tried_where_bf16_is_far_slower() -> None:
    def precisions(bf16: float) -> set[str]:
        rates = {"fp32": 1.4e13, "bf16": bf16, "fp16": 1e14}
        plan = study_plan(study_request(space={"precision": "auto"}),
                          hardware=hardware_profile(matmul_flops_per_second=rates))
        return {candidate.config.precision for candidate in plan.candidates}

    assert precisions(7.1e13) == {"fp32", "bf16"}
    assert precisions(6.9e13) == {"fp32", "bf16", "fp16"}


def test_a_baseline_s_bucket_beyond_the_model_is_the_one_of_the_space() -> None:
    plan = study_plan(study_request(baseline={"reduce_bucket_size": 500_000_000, "zero_stage": 2},
                                    space={"reduce_bucket_size": "auto"}))
    canonical = plan.canonical(plan.baseline)
    assert canonical in plan.index
    assert canonical.reduce_bucket_size >= plan.model.parameters


def test_below_stage_3_only_trainable_parameters_fill_buckets() -> None:
    sizes = [1_000, 20_000, 5_000_000]
    space = {"zero_stage": [2, 3], "reduce_bucket_size": sizes, "allgather_bucket_size": sizes}
    plan = study_plan(study_request(space=space), model=model_profile(trainable_parameters=10_000))
    configs = [candidate.config for candidate in plan.candidates]
    for stage, tried in ((2, {1_000, 20_000}), (3, {*sizes})):
        assert {config.reduce_bucket_size for config in configs if config.zero_stage == stage} == tried
        assert {config.allgather_bucket_size for config in configs if config.zero_stage == stage} == tried


def test_checkpointing_needs_something_that_repeats() -> None:
    plan = study_plan(study_request(space={"activation_checkpointing": "auto"}),
                      model=model_profile(block_class=None, block_count=0, block_parameters=0))
    assert [candidate.config.activation_checkpointing for candidate in plan.candidates] == ["none"]
    assert "this model has none" in next(iter(plan.summary().rejections))


def test_the_request_s_memory_limit_only_lowers_the_device_s() -> None:
    assert study_plan(study_request(memory_limit_bytes=64 * MIB)).limits.device_bytes == 64 * MIB
    assert study_plan(study_request(memory_limit_bytes=10_000 * MIB)).limits.device_bytes == 2048 * MIB


def test_the_default_takes_the_largest_micro_batch_that_fits_even_if_twice_the_activations_are_needed() -> None:
    roomy = study_plan(study_request(space={"micro_batch_size": "auto", "zero_stage": "auto"}))
    assert (roomy.default.micro_batch_size, roomy.default.gradient_accumulation_steps) == (16, 1)
    tight = study_plan(study_request(space={"micro_batch_size": "auto", "zero_stage": "auto"},
                                     memory_limit_bytes=150 * MIB))
    assert (tight.default.micro_batch_size, tight.default.gradient_accumulation_steps) == (2, 8)
    assert tight.default.zero_stage == 0
    assert tight.baseline == tight.default


def test_the_user_s_baseline_is_measured_as_given_even_if_it_should_not_fit() -> None:
    plan = study_plan(study_request(baseline={"micro_batch_size": 16}, space={"micro_batch_size": "auto"},
                                    memory_limit_bytes=150 * MIB))
    assert plan.baseline.micro_batch_size == 16
    assert plan.default.micro_batch_size == 2


def test_the_default_is_the_smallest_that_should_fit_where_none_fits_for_sure() -> None:
    needed = study_plan(study_request()).predict(TrainConfig(micro_batch_size=2))
    plan = study_plan(study_request(space={"micro_batch_size": "auto"},
                                    memory_limit_bytes=device_bytes_to_allow(needed)))
    assert max(candidate.config.micro_batch_size for candidate in plan.candidates) == 2
    assert plan.default.micro_batch_size == 1


def test_two_percent_of_what_is_needed_are_held_in_reserve() -> None:
    needed = study_plan(study_request()).predict(TrainConfig(micro_batch_size=1))
    least = device_bytes_to_allow(needed)
    assert least == pytest.approx(1.02 * needed.peak_device_bytes, abs=1)
    allowing, refusing = (Limits(device_bytes=limit, host_bytes=needed.peak_host_bytes) for limit in (least, least - 1))
    assert allowing.allow(needed)
    assert not refusing.allow(needed)
    assert f"needs {least / MIB:,.0f} MiB of device memory" in refusing.excess(needed)
    no_host = Limits(device_bytes=least, host_bytes=needed.peak_host_bytes - 1)
    assert not no_host.allow(needed)
    assert [limits.exceeded(needed) for limits in (allowing, refusing, no_host)] == [None, "device", "host"]


def test_the_host_is_divided_by_all_its_devices() -> None:
    host = 8192 * MIB
    shares = [study_plan(study_request(), hardware=hardware_profile(host_memory_bytes=host, host_devices=devices))
              .limits.host_bytes for devices in (None, 1, 8)]
    assert shares == [host // 2, host // 2, host // 8]


def test_on_a_cpu_device_and_host_memory_are_one() -> None:
    config = TrainConfig(zero_stage=2, offload_optimizer_ratio=1.0)
    needed = study_plan(study_request()).predict(config)
    device, host = device_bytes_to_allow(needed), needed.peak_host_bytes
    assert host > MIB

    def limits(device_type: str, share: int) -> Limits:
        hardware = hardware_profile(device_type=device_type, memory_bytes=share, host_memory_bytes=2 * share)
        return study_plan(study_request(), hardware=hardware).limits

    both = device + host
    assert limits("cpu", both).allow(needed)
    assert limits("cpu", both - 1).exceeded(needed) == "device and host"
    assert limits("cuda", both - 1).allow(needed)
    assert f"needs {both / MIB:,.0f} MiB of device and host memory" in limits("cpu", both - 1).excess(needed)


def test_nothing_fits_says_so_down_to_the_smallest_micro_batch() -> None:
    plan = study_plan(study_request(memory_limit_bytes=MIB))
    assert not plan.candidates
    assert plan.why_empty().startswith("no feasible micro-batch: micro_batch_size 1 would not fit either")


def test_nothing_fits_says_what_the_smallest_needs_where_and_what_to_change() -> None:
    def why(device: str, memory_limit_bytes: int | None = MIB, **fields: list[Any]) -> str:
        space = {"zero_stage": [0], "micro_batch_size": [8, 2], **fields}
        plan = study_plan(study_request(space=space, memory_limit_bytes=memory_limit_bytes),
                          hardware=hardware_profile(device_type=device, memory_bytes=2 * MIB))
        return plan.why_empty()

    smallest = study_plan(study_request()).predict(TrainConfig(micro_batch_size=2))
    needs = f"the smallest needs {device_bytes_to_allow(smallest) / MIB:,.0f} MiB of device memory where "
    more = "allow a smaller micro_batch_size, a higher zero_stage, activation_checkpointing, offload_optimizer_ratio"
    assert why("cuda").endswith(f"; {needs}1 may be used: raise hardware.memory_limit_bytes, or {more} in search.space")
    assert why("cuda", None).endswith(f"; {needs}2 may be used: {more} in search.space")
    everything = {"zero_stage": [3], "micro_batch_size": [1], "activation_checkpointing": ["full"]}
    assert why("cpu", **everything).endswith("1 may be used: raise hardware.memory_limit_bytes")
    assert why("cpu", None, **everything).endswith("2 may be used: take a smaller model")


def test_it_travels_to_another_process_as_its_inputs() -> None:
    plan = study_plan(study_request(memory_limit_bytes=120 * MIB))
    packed = pickle.dumps(plan)
    assert len(packed) < 10_000
    assert pickle.loads(packed).candidates == plan.candidates


def test_profiles_of_another_world_size_are_refused() -> None:
    request = study_request(devices=2)
    with pytest.raises(ValueError, match="calibrated on 4 devices, but the study uses 2"):
        study_plan(request, hardware=hardware_profile(world_size=4))
    assert parse_space(request).world_size == 2
