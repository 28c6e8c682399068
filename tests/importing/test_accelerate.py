"""Accelerate's YAML, as users have it."""

from typing import Any

import pytest
import yaml

from autotune.domain.errors import InvalidRequestError
from autotune.importing import ImportedConfig, import_config
from engine.config import TrainConfig


def read(text: str, **arguments: Any) -> ImportedConfig:
    return import_config(yaml.safe_load(text), **arguments)


def refused(text: str, **arguments: Any) -> dict[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        read(text, **arguments)
    return {error.field: error.message for error in caught.value.errors}


def fsdp(**section: Any) -> str:
    return yaml.safe_dump({"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2,
                           "fsdp_config": {f"fsdp_{key}": value for key, value in section.items()}})


def test_the_deepspeed_flavour() -> None:
    found = read("""
        compute_environment: LOCAL_MACHINE
        distributed_type: DEEPSPEED
        mixed_precision: bf16  # as trained
        num_processes: 7
        deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 2, gradient_clipping: 1.0,
                           offload_optimizer_device: cpu, offload_param_device: cpu, zero3_init_flag: true}
        """)
    assert found.config == TrainConfig(
        zero_stage=3, precision="bf16", gradient_accumulation_steps=2, gradient_clipping=1.0,
        offload_optimizer_ratio=1.0, offload_param=True)
    assert (found.world_size, found.global_batch_size) == (7, None)
    assert "compute_environment: about starting processes, not about training" in found.notes


@pytest.mark.parametrize(("section", "stage"), [
    ({"version": 2, "reshard_after_forward": True}, 3), ({"version": 2, "reshard_after_forward": False}, 2),
    ({"version": 1, "reshard_after_forward": "SHARD_GRAD_OP"}, 2), ({"reshard_after_forward": "true"}, 3),
    ({"sharding_strategy": "FULL_SHARD"}, 3), ({"sharding_strategy": "NO_SHARD"}, 0),
    ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": False}, 2),
    ({"sharding_strategy": 1}, 3), ({"sharding_strategy": 2}, 2), ({"sharding_strategy": 3}, 0), ({}, 3)])
def test_fsdps_strategies_are_stages_and_number_3_is_none(section: dict[str, Any], stage: int) -> None:
    found = read(fsdp(**section))
    assert (found.config.zero_stage, found.config.precision, found.world_size) == (stage, "bf16", 2)


def test_a_strategy_and_a_reshard_that_mean_two_stages_are_refused_naming_both() -> None:
    found = refused(fsdp(sharding_strategy="SHARD_GRAD_OP", reshard_after_forward=True))
    assert found == {"fsdp_config.fsdp_sharding_strategy and fsdp_config.fsdp_reshard_after_forward":
                     "'SHARD_GRAD_OP' is stage 2 and True is stage 3: make them agree, or keep one"}


def test_fsdp_with_offload_and_checkpointing() -> None:
    found = read(fsdp(sharding_strategy="FULL_SHARD", offload_params=True, activation_checkpointing=True,
                      backward_prefetch="NO_PREFETCH", auto_wrap_policy="TRANSFORMER_BASED_WRAP"))
    assert found.config == TrainConfig(zero_stage=3, precision="bf16", offload_optimizer_ratio=1.0, offload_param=True,
                                       activation_checkpointing="full", overlap_comm=False)
    partly = read(fsdp(sharding_strategy="SHARD_GRAD_OP", offload_params=True))
    assert (partly.config.offload_optimizer_ratio, partly.config.offload_param) == (1.0, False)
    assert any("the optimizer alone is offloaded" in note for note in partly.notes)


def test_a_renamed_key_has_its_old_meaning_and_both_must_agree() -> None:
    old, new = "backward_prefetch_policy", "backward_prefetch"
    assert read(fsdp(**{old: "NO_PREFETCH"})).config == read(fsdp(**{new: "NO_PREFETCH"})).config
    assert not read(fsdp(**{old: "NO_PREFETCH", new: "NO_PREFETCH"})).config.overlap_comm
    assert refused(fsdp(**{old: "NO_PREFETCH", new: "BACKWARD_PRE"})) == {
        "fsdp_config.fsdp_backward_prefetch": "'BACKWARD_PRE' contradicts fsdp_config.fsdp_backward_prefetch_policy "
        "'NO_PREFETCH', another name for the same: keep one"}


@pytest.mark.parametrize(("text", "precision"), [
    ("mixed_precision: no", "fp32"), ("mixed_precision: 'no'", "fp32"), ("mixed_precision: fp16", "fp16"),
    ("mixed_precision: null", "fp32"), ("num_processes: 2", "fp32")])
def test_no_mixed_precision_is_fp32_quoted_or_not(text: str, precision: str) -> None:
    assert read(f"{text}\ndistributed_type: NO").config == TrainConfig(precision=precision)  # type: ignore[arg-type]


@pytest.mark.parametrize(("gpus", "ranks"), [("4,5,6,7", 4), ("0", 1), ("all", 4)])
def test_as_many_ranks_as_devices(gpus: str, ranks: int) -> None:
    assert read(f"distributed_type: MULTI_GPU\ngpu_ids: {gpus}\nnum_processes: {ranks}").world_size == ranks


def test_devices_are_those_of_every_machine() -> None:
    text = "distributed_type: MULTI_GPU\nnum_machines: 2\ngpu_ids: 0,1,2,3"
    assert read(text).world_size == 8
    assert refused(f"{text}\nnum_processes: 4")["num_processes"].endswith("num_processes 4, gpu_ids 8")


def test_ranks_that_disagree_are_refused_naming_all() -> None:
    text = "distributed_type: MULTI_GPU\ngpu_ids: 4,5,6\nnum_processes: 4"
    assert refused(text, world_size=2)["num_processes"].endswith(
        "num_processes 4, gpu_ids 3, the ranks asked for 2")


def test_only_data_parallel_ranks_are_taken() -> None:
    degrees = {"cp": 4, "tp": 1, "dp_replicate": 1, "dp_shard": 2}
    text = fsdp(reshard_after_forward=True) + "parallelism_config: {%s}"
    sizes = ", ".join(f"parallelism_config_{name}_size: {size}" for name, size in degrees.items())
    assert "context parallelism is not supported" in refused(text % sizes)[
        "parallelism_config.parallelism_config_cp_size"]
    assert read(text % sizes.replace("cp_size: 4", "cp_size: 1")).world_size == 2


@pytest.mark.parametrize(("text", "place", "words"), [
    ("distributed_type: MEGATRON_LM", "distributed_type", "MEGATRON_LM is not supported"),
    ("mixed_precision: fp8", "mixed_precision", "no, bf16 or fp16"),
    (fsdp(sharding_strategy="HYBRID_SHARD"), "fsdp_config.fsdp_sharding_strategy",
     "HYBRID_SHARD is not supported"),
    ("distributed_type: DEEPSPEED\ndeepspeed_config: {offload_param_device: disk}",
     "deepspeed_config.offload_param_device", "none, cpu or nvme"),
])
def test_what_the_engine_cannot_do_is_refused_where_it_stands(text: str, place: str, words: str) -> None:
    assert words in refused(text)[place]


def test_a_file_that_another_names_is_asked_for_and_not_opened() -> None:
    text = ("distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 2\n"
            "deepspeed_config: {deepspeed_config_file: ../../etc/passwd, zero3_init_flag: true}")
    assert "give it too" in refused(text)["deepspeed_config.deepspeed_config_file"]
    found = read(text, deepspeed={"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 3,
                                  "zero_optimization": {"stage": 1}})
    assert found.config == TrainConfig(zero_stage=1, precision="bf16", micro_batch_size=3)
    assert (found.world_size, found.global_batch_size) == (2, 6)
    assert any(note.startswith("deepspeed_config.zero3_init_flag: ") for note in found.notes)
    other = refused(text, deepspeed={"fp16": {"enabled": True}})
    assert "fp16 and bf16 of the DeepSpeed file mean fp16" in other["mixed_precision"]


@pytest.mark.parametrize(("mixed", "precision"), [("fp16", "fp16"), ("bf16", "bf16"), ("'no'", "fp32")])
def test_what_the_second_file_leaves_open_of_precision_is_accelerates_own(mixed: str, precision: str) -> None:
    names_it = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\nmixed_precision: "
    both = {"fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}}
    found = read(names_it + mixed, deepspeed=both)
    assert (found.config.precision, found.open) == (precision, ())


def test_what_the_second_file_says_of_precision_must_still_agree() -> None:
    names_it = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\nmixed_precision: "
    fp16 = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}
    assert read(f"{names_it}fp16", deepspeed=fp16).config.precision == "fp16"
    assert "enable one of them" in refused(f"{names_it}bf16", deepspeed=fp16)["fp16.enabled"]
    assert "mean fp16" in refused(f"{names_it}'no'", deepspeed=fp16)["mixed_precision"]


def test_a_second_file_that_is_none_or_that_nothing_names_is_refused() -> None:
    names_it = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}"
    for other in ({"distributed_type": "NO"}, {"anything": 1}, {}):
        assert refused(names_it, deepspeed=other) == {"": "the second file is no DeepSpeed configuration"}
    found = refused("distributed_type: MULTI_GPU", deepspeed={"bf16": {"enabled": True}})
    assert "names no DeepSpeed file" in found["deepspeed_config.deepspeed_config_file"]


def test_keys_of_other_releases_are_told_together_and_empty_ones_do_no_harm() -> None:
    found = read("distributed_type: NO\nmain_process_ip: null\ndeepspeed_config: {}\none: 1\ntwo: 2\nthree: {a: 1}")
    assert "one, two, three: unknown; left out" in found.notes
    assert found.config == TrainConfig()


@pytest.mark.parametrize(("backend", "compiled"), [("INDUCTOR", True), ("inductor", True), ("NO", False)])
def test_compilation(backend: str, compiled: bool) -> None:
    text = f"distributed_type: NO\ndynamo_config: {{dynamo_backend: {backend}}}"
    assert read(text).config.compile is compiled
    assert any("not eager" in note for note in read(text.replace(f"backend: {backend}", "backend: eager")).notes)
