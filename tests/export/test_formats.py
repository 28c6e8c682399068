"""What holds for every format: nothing is lost, the file can be read again, the batch is consistent."""

import json
from typing import Any

import pytest
import yaml

from autotune.domain.errors import ExportError
from autotune.export import FORMATS, ExportedFile, export
from engine.config import TrainConfig
from tests.export.support import best
from tests.search.support import hardware_profile

CHANGED: dict[str, dict[str, Any]] = {
    "zero_stage": {"zero_stage": 3},
    "micro_batch_size": {"micro_batch_size": 2},
    "gradient_accumulation_steps": {"micro_batch_size": 1},
    "precision": {"precision": "bf16"},
    "optimizer_precision": {"precision": "bf16", "optimizer_precision": "compute"},
    "reduce_dtype": {"precision": "bf16", "reduce_dtype": "fp32"},
    "reduce_bucket_size": {"reduce_bucket_size": 1234567},
    "allgather_bucket_size": {"allgather_bucket_size": 2345678},
    "prefetch_bucket_size": {"prefetch_bucket_size": 3456789},
    "overlap_comm": {"overlap_comm": False},
    "offload_optimizer_ratio": {"offload_optimizer_ratio": 1.0, "offload_param": True, "zero_stage": 3},
    "offload_param": {"offload_optimizer_ratio": 1.0, "offload_param": True, "zero_stage": 3},
    "activation_checkpointing": {"activation_checkpointing": "selective"},
    "compile": {"compile": True},
    "gradient_clipping": {"gradient_clipping": 0.75},
    "loss_scale": {"precision": "fp16", "loss_scale": 512.0},
    "initial_scale_power": {"precision": "fp16", "initial_scale_power": 13},
    "loss_scale_window": {"precision": "fp16", "loss_scale_window": 77},
    "hysteresis": {"precision": "fp16", "hysteresis": 5},
    "min_loss_scale": {"precision": "fp16", "min_loss_scale": 8.0},
}
"""For every field of the configuration, one in which it is not the default."""


def content(file: ExportedFile) -> dict[str, Any]:
    """The file as its tool reads it, without comments and notes."""
    loaded = yaml.safe_load(file.text) if file.filename.endswith("yaml") else json.loads(file.text)
    assert isinstance(loaded, dict)
    return {key: value for key, value in loaded.items() if key not in ("_comment", "notes")}


def values_in(tree: object) -> list[object]:
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in values_in(value)]
    if isinstance(tree, list):
        return [leaf for value in tree for leaf in values_in(value)]
    return [tree]


def test_every_field_of_the_configuration_is_tried() -> None:
    assert set(CHANGED) == set(TrainConfig.model_fields)


@pytest.mark.parametrize(("confirmed", "standing"), [
    (True, "confirmed: measured again beside the other finalists"), (False, "NOT CONFIRMED: only one run counts")])
@pytest.mark.parametrize("format", FORMATS)
def test_every_file_says_what_it_was_measured_as(format: str, confirmed: bool, standing: str) -> None:
    file = export(best(zero_stage=2).model_copy(update={"confirmed": confirmed}), format)
    origin = (f"measured in study study, trial 3: 1,234 tokens/s on 2 x {hardware_profile().device_name}, "
              f"runs beside other work left out; {standing}")
    assert origin in file.notes
    assert origin in file.text


def exported_or_refused(format: str, **config: Any) -> ExportedFile | str:
    try:
        return export(best(**config), format)
    except ExportError as error:
        return str(error)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("field", list(CHANGED))
@pytest.mark.parametrize("format", FORMATS)
def test_no_value_is_dropped_in_silence(format: str, field: str, stage: int) -> None:
    """Changing a field is refused with a field's name, or changes what the tool reads, or is named in the notes."""
    changed = {"zero_stage": stage, **CHANGED[field]}
    plain = {"zero_stage": changed["zero_stage"], "precision": changed.get("precision", "fp32")}
    if field in plain:
        plain[field] = {"zero_stage": 2, "precision": "fp32"}[field]
    file, without = exported_or_refused(format, **changed), exported_or_refused(format, **plain)
    if isinstance(file, str):
        assert file.split()[0] in changed
    elif isinstance(without, str):
        assert "zero_stage" in without
    else:
        assert content(file) != content(without) or any(field in note for note in file.notes)


@pytest.mark.parametrize("format", FORMATS)
def test_notes_are_inside_the_file_too(format: str) -> None:
    file = export(best(zero_stage=3, activation_checkpointing="full"), format)
    assert file.notes
    if file.filename.endswith("yaml"):
        assert all(f"# - {note}\n" in file.text for note in file.notes)
    else:
        assert set(file.notes) <= set(values_in(json.loads(file.text)))


@pytest.mark.parametrize("format", FORMATS)
def test_counts_are_whole_numbers_for_odd_sizes(format: str) -> None:
    file = export(best(zero_stage=3, reduce_bucket_size=0x1234567, prefetch_bucket_size="15099494"), format)
    for value in values_in(content(file)):
        assert not (isinstance(value, float) and value > 1000), value
    assert "e+" not in file.text
    assert "Infinity" not in file.text
    assert "NaN" not in file.text


@pytest.mark.parametrize("format", FORMATS)
def test_the_number_of_processes_is_the_tuned_one(format: str) -> None:
    """With another number, the notes say what keeps the global batch."""
    file = export(best(world_size=3, global_batch_size=36, micro_batch_size=4, zero_stage=3), format)
    read = content(file)
    batch = read.get("train_batch_size")
    assert batch == 36 if batch is not None else read.get("num_processes", read.get("world_size")) == 3
    assert any("3 processes" in note or "--nproc-per-node 3" in note for note in file.notes)


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ExportError, match="no such format: megatron; there are engine, deepspeed"):
        export(best(), "megatron")
