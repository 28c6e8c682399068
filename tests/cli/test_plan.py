"""``plan``: a model ranked for a cluster that is not here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.support.samples import sample_request
from tests.support.service import clean_environment


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    path = tmp_path / "study.json"
    path.write_text(sample_request(training={"global_batch_size": 512}, search={}).model_dump_json())
    return path


def test_configurations_are_ranked_and_nothing_is_kept(study_file: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune.cli", "plan", str(study_file), "-c", "h100-80gb", "-n", "16", "--json"],
        capture_output=True, text=True, timeout=240, check=False, env=clean_environment(TMPDIR=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["study"]["state"] == "succeeded"
    assert result["study"]["best"] is None
    assert result["study"]["progress"]["trials_finished"] == 0
    assert result["study"]["note"].startswith("predicted for 16 x NVIDIA H100")
    seconds = [point["prediction"]["step_seconds"] for point in result["plan"]["fastest"]]
    assert len(seconds) == 20
    assert seconds == sorted(seconds)
    configs = [point["config"] for point in result["plan"]["fastest"]]
    assert {config["micro_batch_size"] * config["gradient_accumulation_steps"] for config in configs} == {512 // 16}
    assert not list(tmp_path.glob("autotune-*"))


def test_an_unknown_cluster_is_refused_with_those_there_are(run: Run, study_file: Path) -> None:
    result = run("plan", str(study_file), "--cluster", "a100")
    assert result.code == 2
    assert "hardware.cluster: no cluster is known as 'a100': give one of a100-40gb, a100-80gb" in result.err


def test_a_batch_that_the_devices_cannot_share_is_refused(run: Run, study_file: Path) -> None:
    result = run("plan", str(study_file), "--cluster", "a100-80gb", "--devices", "3")
    assert result.code == 2
    assert "training.global_batch_size" in result.err
