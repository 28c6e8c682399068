"""Keyword values for fully_shard, tried on torch's own classes; and the engine's own file."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.domain.errors import ExportError
from autotune.export import export
from engine.run_file import RunFile, load_run_file
from tests.export.support import best


def written(**config: Any) -> dict[str, Any]:
    loaded = json.loads(export(best(**config), "fsdp").text)
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize(("stage", "reshards"), [(2, False), (3, True)])
def test_it_reshards_after_forward_at_stage_3_only(stage: int, reshards: bool) -> None:
    assert written(zero_stage=stage)["fully_shard"] == {"reshard_after_forward": reshards, "mp_policy": None,
                                                        "offload_policy": None}


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_that_do_not_shard_gradients_are_refused(stage: int) -> None:
    with pytest.raises(ExportError, match=f"zero_stage {stage}: fully_shard"):
        written(zero_stage=stage)


def test_its_policies_are_keywords_that_torch_accepts() -> None:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    values = written(zero_stage=3, precision="bf16", reduce_dtype="fp32", offload_param=True,
                     offload_optimizer_ratio=1.0)["fully_shard"]
    policy = MixedPrecisionPolicy(**{name: getattr(torch, dtype) for name, dtype in values["mp_policy"].items()})
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    offload = values["offload_policy"]
    assert offload.pop("class") == "CPUOffloadPolicy"
    assert CPUOffloadPolicy(**offload).pin_memory is True


def test_it_tells_what_belongs_around_the_call() -> None:
    config = written(zero_stage=3, gradient_clipping=1.0, activation_checkpointing="full", precision="fp16")
    assert config["apply_to"] == ["each Block", "model"]
    training = config["training"]
    assert (training["global_batch_size"], training["micro_batch_size"], training["gradient_accumulation_steps"]) == (
        32, 4, 4)
    assert (training["gradient_clipping"], training["activation_checkpointing"]) == (1.0, "full")
    assert training["loss_scaling"]["initial_scale_power"] == 16
    assert any("GradScaler" in note for note in config["notes"])


def test_the_engine_s_file_loads_as_the_run_that_was_measured(tmp_path: Path) -> None:
    winner = best(zero_stage=1, precision="bf16", reduce_bucket_size=123)
    exported = export(winner, "engine")
    file = tmp_path / exported.filename
    file.write_text(exported.text)
    assert load_run_file(file) == RunFile(
        model=winner.request.model, optimizer=winner.request.training.optimizer, config=winner.config,
        global_batch_size=32, seed=7, world_size=2, notes=exported.notes)
    assert any("torchrun" in note and "--nproc-per-node 2" in note for note in exported.notes)
