"""``tune``: a real study on this machine's cores, without a service."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.support.samples import sample_request
from tests.support.service import clean_environment, descendants_of, is_alive, wait_until

SEARCH = {"sampler": "grid", "space": {"zero_stage": [0, 1], "micro_batch_size": [8]}, "confirm_rounds": 1,
          "policy": {"max_warmup_steps": 2, "min_steps": 2, "max_steps": 4, "max_seconds": 5.0}}


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    path = tmp_path / "study.json"
    path.write_text(sample_request(search=SEARCH, budget={"max_trials": 2, "max_seconds": 120}).model_dump_json())
    return path


def test_a_winner_is_found_and_exported(study_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "ds.json"
    done = subprocess.run(
        [sys.executable, "-m", "autotune.cli", "tune", str(study_file), "--json", "-f", "deepspeed", "-o", str(target)],
        capture_output=True, text=True, timeout=240, check=False, env=clean_environment(TMPDIR=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["study"]["state"] == "succeeded"
    assert result["study"]["progress"]["trials_finished"] == 2
    assert result["best"]["config"]["micro_batch_size"] == 8
    assert result["best"]["tokens_per_second"] > 0
    assert json.loads(target.read_text())["train_batch_size"] == 8
    assert not list(tmp_path.glob("autotune-*"))  # nothing is kept


def test_an_interrupt_cancels_the_study_and_leaves_no_worker(study_file: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune.cli", "tune", str(study_file), "--data-dir", str(tmp_path / "data")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=clean_environment())
    assert process.stdout is not None
    while "probing" not in (line := process.stdout.readline()):
        assert line, "tune ended early"
    wait_until(lambda: bool(descendants_of(process.pid)), "a worker")
    workers = descendants_of(process.pid)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 1
    process.stdout.close()
    assert "cancelled" in rest
    assert not any(map(is_alive, workers))


def test_a_study_that_can_never_run_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    path.write_text(sample_request(training={"global_batch_size": 7}, hardware={"devices": 2}).model_dump_json())
    result = run("tune", str(path))
    assert result.code == 2
    assert "training.global_batch_size" in result.err


def test_an_unknown_format_is_refused_before_anything_runs(run: Run, study_file: Path) -> None:
    result = run("tune", str(study_file), "-f", "onnx")
    assert result.code == 2
    assert "deepspeed" in result.err


def test_code_outside_the_allowed_prefixes_is_not_run(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    path.write_text(sample_request(model={"kind": "python", "entry_point": "os:getcwd"}).model_dump_json())
    result = run("tune", str(path))
    assert result.code == 2
    assert "AUTOTUNE_ALLOWED_TASKS" in result.err
