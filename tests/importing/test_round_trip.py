"""What was exported and is imported again is the same configuration, but for what the export's notes say."""

import json
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.domain.errors import ExportError
from autotune.export import ExportedFile, export
from autotune.importing import import_config
from engine.config import TrainConfig
from tests.export.support import best

SIZES = st.integers(1, 10**10)
CONFIGS = st.fixed_dictionaries({
    "zero_stage": st.sampled_from([0, 1, 2, 3]), "micro_batch_size": st.sampled_from([1, 2, 4]),
    "precision": st.sampled_from(["fp32", "bf16", "fp16"]), "reduce_bucket_size": SIZES, "overlap_comm": st.booleans(),
    "gradient_clipping": st.sampled_from([0.0, 0.5, 1.0]), "offload_param": st.booleans(),
    "offload_optimizer_ratio": st.sampled_from([0.0, 0.25, 1.0]), "compile": st.booleans(),
    "activation_checkpointing": st.sampled_from(["none", "selective", "full"]),
}, optional={
    "allgather_bucket_size": SIZES, "prefetch_bucket_size": SIZES, "loss_scale": st.sampled_from([0.0, 512.0]),
    "initial_scale_power": st.integers(0, 32), "loss_scale_window": SIZES, "hysteresis": st.integers(1, 9),
    "min_loss_scale": st.sampled_from([0.5, 1.0, 8.0]), "reduce_dtype": st.sampled_from(["fp32", "bf16"]),
    "optimizer_precision": st.sampled_from(["fp32", "compute"]),
})
OPTIMIZERS = st.sampled_from([
    {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1}, {"name": "adam", "lr": 1e-3, "betas": (0.8, 0.95)},
    {"name": "sgd", "lr": 0.1, "momentum": 0.9}, {"name": "rmsprop", "lr": 0.01, "eps": 1e-6}, {"name": "adagrad"}])


def possible(fields: dict[str, Any]) -> dict[str, Any]:
    if fields["zero_stage"] != 3:
        fields = {**fields, "offload_param": False}
    if fields["precision"] != "bf16":  # of fp32 it says nothing, of fp16 it is refused
        fields = {**fields, "optimizer_precision": "fp32"}
    return fields


def written(format: str, **arguments: Any) -> ExportedFile | None:
    try:
        return export(best(**arguments), format)
    except ExportError:
        return None


def assert_comes_back(file: ExportedFile, config: TrainConfig) -> None:
    """Every field that differs is named in the export's notes."""
    content = json.loads(file.text) if file.filename.endswith("json") else yaml.safe_load(file.text)
    found = import_config(content)
    told = " ".join(file.notes)
    fields = set(TrainConfig.model_fields)
    if config.reduce_dtype == config.precision:
        fields.remove("reduce_dtype")  # as little told as the precision that it follows
    different = [name for name in fields if getattr(found.config, name) != getattr(config, name)]
    assert [name for name in different if name not in told] == []
    assert found.world_size == 2
    assert not any("unknown" in note for note in found.notes), found.notes


@settings(max_examples=60, deadline=None)
@given(CONFIGS, OPTIMIZERS)
def test_deepspeed(fields: dict[str, Any], optimizer: dict[str, Any]) -> None:
    source = best(optimizer=optimizer, **possible(fields))
    file = written("deepspeed", optimizer=optimizer, **possible(fields))
    if file is None:
        return
    assert_comes_back(file, source.config)
    found = import_config(json.loads(file.text))
    assert (found.optimizer, found.global_batch_size) == (source.request.training.optimizer, 32)
    assert found.open == ()


@settings(max_examples=60, deadline=None)
@given(CONFIGS, st.sampled_from(["deepspeed-hf", "accelerate", "accelerate-fsdp", "accelerate-fsdp1"]))
def test_formats_that_leave_something_to_the_script(fields: dict[str, Any], format: str) -> None:
    file = written(format, **possible(fields))
    if file is not None:
        assert_comes_back(file, best(**possible(fields)).config)
