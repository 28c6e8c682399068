"""Rows of a plan: every format says that they are predicted, and where they would run."""

import json

import pytest
import yaml

from autotune.domain.errors import ExportError
from autotune.domain.study import PlannedConfig
from autotune.export import FORMATS, export
from tests.support.plans import cluster_plan, plan_request


def planned(*, shares_copies: bool = False) -> PlannedConfig:
    """The fastest row of 64 A100 in 8 nodes with its stage 3, else one with tensor or pipeline parallelism."""
    found = cluster_plan().summary
    assert found.model_profile is not None
    assert found.hardware_profile is not None
    row, point = next((row, point) for row, point in enumerate(found.rows, start=1)
                      if point.runs_here is not shares_copies and (shares_copies or point.config.zero_stage == 3))
    return PlannedConfig(study_id="study", row=row, request=plan_request(), point=point,
                         model_profile=found.model_profile, hardware_profile=found.hardware_profile)


@pytest.mark.parametrize("format", FORMATS)
def test_the_file_says_so_once_with_the_predicted_figures(format: str) -> None:
    source, file = planned(), export(planned(), format)
    (note,) = [note for note in file.notes if "PREDICTED" in note]
    seconds = source.point.prediction.step_seconds
    assert note.startswith(f"PREDICTED for 64 x NVIDIA A100-SXM4-80GB, not measured: {seconds:.4g} s a step, ")
    assert f"(row {source.row} of a plan)" in note
    assert note in file.text.replace('\\"', '"')
    assert "tuned with" not in file.text
    assert "tuned on" not in file.text


def test_several_machines_are_launched_as_such() -> None:
    assert json.loads(export(planned(), "engine").text)["notes"][0].startswith(
        "run with: torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m engine.run")
    for format in ("accelerate", "accelerate-fsdp"):
        file = export(planned(), format)
        loaded = yaml.safe_load(file.text)
        assert (loaded["num_processes"], loaded["num_machines"]) == (64, 8)
        assert any("machine_rank" in note for note in file.notes)


@pytest.mark.parametrize("format", FORMATS)
def test_tensor_and_pipeline_parallelism_are_never_exported(format: str) -> None:
    with pytest.raises(ExportError, match=r"has tensor_parallel . and pipeline_parallel ., which none of engine"):
        export(planned(shares_copies=True), format)
