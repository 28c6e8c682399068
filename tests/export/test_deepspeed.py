"""ds_config.json, plain and for Hugging Face."""

import json
from typing import Any

import pytest

from autotune.domain.errors import ExportError
from autotune.export import export
from tests.export.support import best


def plain(**config: Any) -> dict[str, Any]:
    loaded = json.loads(export(best(**config), "deepspeed").text)
    assert isinstance(loaded, dict)
    return loaded


def notes(format: str = "deepspeed", **config: Any) -> str:
    return "\n".join(export(best(**config), format).notes)


def test_the_batch_triple_is_written_out_and_consistent() -> None:
    config = plain(world_size=2, global_batch_size=32, micro_batch_size=4)
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"],
            config["gradient_accumulation_steps"]) == (32, 4, 4)


def test_plain_has_no_auto_anywhere() -> None:
    text = export(best(zero_stage=3, precision="bf16", offload_optimizer_ratio=0.5, offload_param=True,
                       activation_checkpointing="full"), "deepspeed").text
    assert '"auto"' not in text


def test_for_hugging_face_only_the_trainer_s_own_arguments_are_auto() -> None:
    config = json.loads(export(best(zero_stage=2, precision="bf16"), "deepspeed-hf").text)
    assert config["optimizer"] == {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto",
                                                               "eps": "auto"}}
    del config["optimizer"], config["_comment"]
    assert '"auto"' not in json.dumps(config)
    assert config["train_batch_size"] == 32
    assert "--per_device_train_batch_size 4 --gradient_accumulation_steps 4" in notes("deepspeed-hf")
    assert "--bf16" in notes("deepspeed-hf", precision="bf16")


@pytest.mark.parametrize(("precision", "enabled"), [("fp32", []), ("bf16", ["bf16"]), ("fp16", ["fp16"])])
def test_at_most_one_16_bit_format_is_enabled(precision: str, enabled: list[str]) -> None:
    config = plain(precision=precision)
    assert [name for name in ("bf16", "fp16") if config[name]["enabled"]] == enabled


def test_fp16_carries_its_loss_scaling() -> None:
    assert plain(precision="fp16", initial_scale_power=12, hysteresis=3)["fp16"] == {
        "enabled": True, "loss_scale": 0.0, "initial_scale_power": 12, "loss_scale_window": 1000, "hysteresis": 3,
        "min_loss_scale": 1}


def test_stage_2_has_its_buckets_and_contiguous_gradients() -> None:
    assert plain(zero_stage=2, reduce_bucket_size=5, allgather_bucket_size=6)["zero_optimization"] == {
        "stage": 2, "reduce_bucket_size": 5, "overlap_comm": True, "contiguous_gradients": True,
        "allgather_partitions": True, "allgather_bucket_size": 6, "reduce_scatter": True}


def test_stage_3_uses_the_prefixed_names_and_twin_flow() -> None:
    zero = plain(zero_stage=3, prefetch_bucket_size=7, offload_optimizer_ratio=0.5, offload_param=True)[
        "zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == 7
    assert "prefetch_bucket_size" not in zero
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 0.5}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_a_partial_offload_below_stage_3_becomes_a_whole_one_with_a_note() -> None:
    assert plain(zero_stage=2, offload_optimizer_ratio=0.5)["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu", "pin_memory": True}
    assert "offload_optimizer_ratio 0.5" in notes(zero_stage=2, offload_optimizer_ratio=0.5)


def test_offload_works_with_an_optimizer_of_the_user_s_own_and_says_so() -> None:
    config = plain(zero_stage=2, offload_optimizer_ratio=1.0)
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert config["optimizer"]["type"] == "AdamW"
    assert "zero_force_ds_cpu_optimizer" in notes(zero_stage=2, offload_optimizer_ratio=1.0)
    assert "zero_force_ds_cpu_optimizer" not in plain(zero_stage=2)


def test_offload_at_stage_0_is_refused() -> None:
    with pytest.raises(ExportError, match=r"offload_optimizer_ratio 1.0: DeepSpeed offloads .* from stage 1"):
        plain(zero_stage=0, offload_optimizer_ratio=1.0)


def test_host_memory_is_not_pinned_on_a_cpu() -> None:
    config = plain(zero_stage=2, offload_optimizer_ratio=1.0, device_type="cpu")
    assert config["zero_optimization"]["offload_optimizer"]["pin_memory"] is False


def test_optimizer_states_in_bf16_are_expressed_from_stage_1_on() -> None:
    config = plain(zero_stage=1, precision="bf16", optimizer_precision="compute")
    assert config["bf16"] == {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    with pytest.raises(ExportError, match="optimizer_precision compute"):
        plain(zero_stage=0, precision="bf16", optimizer_precision="compute")


def test_the_reduce_dtype_and_clipping_are_top_level() -> None:
    config = plain(precision="bf16", reduce_dtype="fp32", gradient_clipping=0.5)
    assert (config["communication_data_type"], config["gradient_clipping"]) == ("fp32", 0.5)


@pytest.mark.parametrize(("optimizer", "block"), [
    ({"name": "adamw", "lr": 0.1}, {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0, "betas": [0.9, 0.999],
                                                                "eps": 1e-8}}),
    ({"name": "adam", "lr": 0.1}, {"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.0, "betas": [0.9, 0.999],
                                                              "eps": 1e-8, "adam_w_mode": False}}),
    ({"name": "sgd", "lr": 0.1, "momentum": 0.9}, {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 0.0,
                                                                             "momentum": 0.9}}),
])
def test_the_optimizer_s_block(optimizer: dict[str, Any], block: dict[str, Any]) -> None:
    config = plain(optimizer=optimizer)
    assert config["optimizer"] == block
    assert config.get("zero_allow_untested_optimizer", False) == (optimizer["name"] == "sgd")


def test_checkpointing_is_left_to_the_model_with_a_note() -> None:
    assert "activation_checkpointing" not in plain(activation_checkpointing="full")
    assert "activation_checkpointing full" in notes(activation_checkpointing="full")
