"""ds_config.json: what users' files look like, and what contradicts itself in them."""

from typing import Any

import pytest

from autotune.domain.errors import InvalidRequestError
from autotune.importing import ImportedConfig, import_config
from engine.config import OptimizerConfig, TrainConfig


def refused(content: dict[str, Any], **arguments: Any) -> dict[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        import_config(content, **arguments)
    return {error.field: error.message for error in caught.value.errors}


def noted(found: ImportedConfig, key: str) -> str:
    """The one note that names a key."""
    notes = [note for note in found.notes if key in note]
    assert len(notes) == 1, found.notes
    return notes[0]


def test_a_plain_file_with_everything() -> None:
    found = import_config({
        "train_batch_size": 48, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0, "communication_data_type": "fp32", "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": "5e7",
                              "overlap_comm": False, "offload_param": {"device": "cpu"},
                              "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}})
    assert found.config == TrainConfig(
        zero_stage=3, micro_batch_size=4, gradient_accumulation_steps=3, gradient_clipping=1.0, precision="bf16",
        reduce_dtype="fp32", reduce_bucket_size=500_000_000, prefetch_bucket_size=50_000_000, overlap_comm=False,
        offload_param=True, offload_optimizer_ratio=0.3)
    assert found.optimizer == OptimizerConfig(name="sgd", lr=0.1, momentum=0.9)
    assert (found.world_size, found.global_batch_size, found.open, found.notes) == (4, 48, (), ())


@pytest.mark.parametrize(("sizes", "world_size", "expected"), [
    ({"train_batch_size": 8}, 2, (4, 1, 2, 8)),
    ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 2, (2, 3, 2, 12)),
    ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, 2, (2, 2, 2, 8)),
    ({"train_batch_size": 42, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, None,
     (2, 3, 7, 42)),
    ({"train_micro_batch_size_per_gpu": 2}, None, (2, 1, None, None)),
    ({"gradient_accumulation_steps": 4}, 2, (1, 4, 2, None)),
    ({}, None, (1, 1, None, None)),
])
def test_batch_sizes_are_completed(sizes: dict[str, int], world_size: int | None, expected: tuple[Any, ...]) -> None:
    found = import_config({"fp16": {"enabled": False}, **sizes}, world_size=world_size)
    assert (found.config.micro_batch_size, found.config.gradient_accumulation_steps, found.world_size,
            found.global_batch_size) == expected


def test_batch_sizes_that_contradict_each_other_are_refused_with_the_ways_out() -> None:
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    assert import_config(sizes).world_size == 2
    assert refused(sizes, world_size=4) == {"train_batch_size": (
        "train_batch_size must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel size: "
        "32 != 4*4*4; on 4 ranks the global batch would be 64, or for the same batch accumulation would be 2")}
    assert "33 != 4*4*2" in refused({**sizes, "train_batch_size": 33})["train_batch_size"]
    assert "--devices" in refused({"train_batch_size": 32})["train_batch_size"]
    assert "7 not divisible by 2" in refused({"train_batch_size": 7}, world_size=2)["train_batch_size"]


@pytest.mark.parametrize(("content", "place", "words"), [
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled", "bf16.enabled"),
    ({"zero_optimization": {"stage": [0, 1]}}, "zero_optimization.stage",
     "stage must be one integer; lists are search spaces"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1.5}}, "zero_optimization.reduce_bucket_size", "1.5"),
    ({"zero_optimization": True}, "zero_optimization", "must be a mapping"),
    ({"bf16": {"enabled": "yes"}}, "bf16.enabled", "true or false"),
    ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, "bf16.enabled", "contradicts bfloat16.enabled False"),
    ({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 5, "stage3_prefetch_bucket_size": 6}},
     "zero_optimization.stage3_prefetch_bucket_size", "contradicts zero_optimization.prefetch_bucket_size 5"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size", "tensor parallelism is not supported"),
    ({"train_micro_batch_size_per_gpu": "many"}, "train_micro_batch_size_per_gpu", "whole number"),
    ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, "optimizer.params.lr", "greater than or equal to 0"),
    ({"optimizer": {"type": "SGD", "params": {"betas": [0.8, 0.9]}}}, "optimizer.params", "betas do not apply to sgd"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}},
     "zero_optimization.offload_optimizer.device", "none, cpu or nvme"),
])
def test_what_cannot_be_meant_is_refused_where_it_stands(content: dict[str, Any], place: str, words: str) -> None:
    found = refused(content)
    assert set(found) == {place}
    assert words in found[place]


def test_everything_wrong_is_told_at_once() -> None:
    assert set(refused({"fp16": {"enabled": 1}, "zero_optimization": {"stage": [1]}, "pipeline": {"stages": 2}})) == {
        "fp16.enabled", "zero_optimization.stage", "pipeline.stages"}


def test_a_misplaced_section_is_told_with_the_right_place_and_has_no_effect() -> None:
    found = import_config({"zero_optimization": {"stage": 2}, "offload_optimizer": {"device": "cpu"}})
    assert found.config.offload_optimizer_ratio == 0
    assert "zero_optimization.offload_optimizer only" in noted(found, "offload_optimizer:")


def test_unknown_keys_are_told_together_and_a_misspelt_one_with_what_was_meant() -> None:
    found = import_config({"zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1e5}, "mine": 1,
                           "yours": {"a": 1}})
    assert "did you mean stage3_param_persistence_threshold?" in noted(found, "persitance")
    assert noted(found, "mine, yours") == "mine, yours: unknown; left out"


def test_every_auto_is_listed_and_said_what_stands_in_its_place() -> None:
    keys = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    zero = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    found = import_config({**dict.fromkeys(keys, "auto"), "bf16": {"enabled": True}, "zero_optimization": {
        "stage": 3, "overlap_comm": True, "max_live_parameters": 0, **dict.fromkeys(zero, "auto")}})
    assert set(found.open) == {*keys, *(f"zero_optimization.{key}" for key in zero)}
    assert "left to search; reduce_bucket_size 2000000 stands here" in noted(found, ".reduce_bucket_size")
    assert "trainer's own argument decides; gradient_clipping 0.0" in noted(found, "gradient_clipping")
    assert "not in the file" not in "".join(found.notes)
    assert found.config == TrainConfig(zero_stage=3, precision="bf16")


def test_an_optimizer_that_the_trainer_fills_in() -> None:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    found = import_config({"bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": params},
                           "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}})
    assert found.optimizer == OptimizerConfig()
    assert set(found.open) == {"bf16.enabled", *(f"optimizer.params.{name}" for name in params)}
    assert "fp32 stands here" in noted(found, "bf16.enabled")
    assert "training script's" in noted(found, "scheduler")


@pytest.mark.parametrize(("optimizer", "name", "note"), [
    ({"type": "Adam"}, "adamw", "adam_w_mode"),
    ({"type": "Adam", "params": {"adam_w_mode": False}}, "adam", None),
    ({"type": "Lamb", "params": {"lr": 1}}, None, "no Lamb by name"),
])
def test_optimizers_are_what_deepspeed_makes_of_them(optimizer: dict[str, Any], name: str | None,
                                                     note: str | None) -> None:
    found = import_config({"optimizer": optimizer})
    assert (found.optimizer.name if found.optimizer else None) == name
    assert (note in noted(found, "optimizer") if note else found.notes == ())


@pytest.mark.parametrize(("stage", "zero", "expected", "words"), [
    (0, {"offload_optimizer": {"device": "cpu"}}, (0.0, False), "from stage 1 on"),
    (2, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, (1.0, False), "at stage 3 only"),
    (2, {"cpu_offload": True}, (1.0, False), None),
    (2, {"offload_param": {"device": "cpu"}}, (0.0, False), "parameters at stage 3 only"),
    (3, {"offload_param": {"device": "nvme", "nvme_path": "/no/such"}}, (0.0, True), "nvme cannot be tuned here"),
    (3, {"offload_optimizer": {"device": "none"}}, (0.0, False), None),
])
def test_offload_is_what_deepspeed_does_at_that_stage(stage: int, zero: dict[str, Any], expected: tuple[float, bool],
                                                      words: str | None) -> None:
    found = import_config({"zero_optimization": {"stage": stage, **zero}})
    assert (found.config.offload_optimizer_ratio, found.config.offload_param) == expected
    if words:
        assert words in noted(found, words)


def test_a_static_loss_scale_stays_one_and_has_none_without_fp16() -> None:
    found = import_config({"fp16": {"enabled": True, "loss_scale": 1024, "loss_scale_window": 500}})
    assert found.config == TrainConfig(precision="fp16", loss_scale=1024, loss_scale_window=500)
    found = import_config({"fp16": {"enabled": False, "hysteresis": 7}})
    assert found.config.hysteresis == 2
    assert "no effect without fp16" in noted(found, "fp16.hysteresis")


def test_deepspeeds_own_defaults_are_told_where_the_engines_stand() -> None:
    found = import_config({"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}})
    assert noted(found, "not in the file").endswith("overlap_comm (False), allgather_bucket_size (500000000)")


def test_values_that_json_cannot_write_do_no_harm() -> None:
    found = import_config({"steps_per_print": float("inf"), "wall_clock_breakdown": False, "fp16": None})
    assert noted(found, "steps_per_print").startswith("steps_per_print, wall_clock_breakdown: about watching")


@pytest.mark.parametrize("content", [{}, {"a": 1}, {"model": {"kind": "gpt"}}])
def test_what_is_no_configuration_is_refused(content: dict[str, Any]) -> None:
    assert "neither a DeepSpeed configuration" in refused(content)[""]


@pytest.mark.parametrize("dtype", [{}, 7, "int8"])
def test_a_dtype_that_is_none_is_refused_where_it_stands(dtype: object) -> None:
    assert list(refused({"communication_data_type": dtype})) == ["communication_data_type"]
