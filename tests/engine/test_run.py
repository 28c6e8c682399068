"""An engine export trains again as its trial did."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import OptimizerConfig, TrainConfig
from engine.errors import ConfigurationError
from engine.report import MeasurePolicy, TrialRequest
from engine.run import main
from engine.run_file import RunFile, load_run_file
from tests.support import tasks
from tests.support.trials import TINY_GPT, run, run_once


def _run_file(ranks: int = 1, **changes: Any) -> RunFile:
    config = changes.pop("config", TrainConfig(micro_batch_size=2))
    return RunFile.model_validate({
        "model": TINY_GPT.model_dump(), "optimizer": {"name": "adamw", "lr": 3e-4}, "config": config.model_dump(),
        "global_batch_size": config.global_batch_size(ranks), "world_size": ranks, "seed": 7, **changes})


@pytest.mark.parametrize("config", [
    TrainConfig(micro_batch_size=2, gradient_accumulation_steps=2, zero_stage=0, gradient_clipping=1.0),
    TrainConfig(micro_batch_size=4, zero_stage=3, precision="bf16", activation_checkpointing="full"),
])
def test_two_ranks_reproduce_a_trials_losses_bit_for_bit(config: TrainConfig, tmp_path: Path) -> None:
    run_file = _run_file(2, config=config)
    request = TrialRequest(
        model=run_file.model, optimizer=run_file.optimizer, config=config, seed=7,
        global_batch_size=run_file.global_batch_size,
        policy=MeasurePolicy(max_warmup_steps=3, min_steps=3, max_steps=3))
    report = run(run_once(request, ranks=2))
    assert report.measurement is not None
    losses = report.measurement.losses
    path = tmp_path / "run.json"
    path.write_text(run_file.model_dump_json())
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node",
         "2", "-m", "engine.run", str(path), "--steps", str(len(losses)), "--json", "--device", "cpu"],
        capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stderr
    assert tuple(json.loads(result.stdout)["losses"]) == losses


def test_one_rank_runs_without_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(_run_file().model_dump_json())
    assert main([str(path), "--steps", "3", "--json", "--device", "cpu"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["losses"]) == 3
    assert told["skipped_steps"] == 0
    assert main([str(path), "--steps", "3", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"step {step}  loss {loss}" for step, loss in enumerate(told["losses"])]


def test_another_number_of_ranks_is_refused_with_the_right_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(_run_file(2).model_dump_json())
    assert main([str(path)]) == 2
    assert f"torchrun --nproc-per-node 2 -m engine.run {path}" in capsys.readouterr().err


def test_a_file_survives_writing_and_reading(tmp_path: Path) -> None:
    run_file = _run_file(2, notes=["from study 1, trial 4"])
    path = tmp_path / "run.json"
    path.write_text(run_file.model_dump_json(indent=2))
    assert load_run_file(path) == run_file
    assert run_file.optimizer == OptimizerConfig(name="adamw", lr=3e-4)


@pytest.mark.parametrize(("text", "message"), [
    ("{", "no run file"),
    ('{"format": "other"}', "format"),
    (_run_file(2).model_dump_json().replace('"global_batch_size":4', '"global_batch_size":5'), "5 != 2\\*1\\*2"),
])
def test_a_broken_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        load_run_file(path)
    assert main([str(path)]) == 2


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        load_run_file(tmp_path / "missing.json")
    with pytest.raises(ConfigurationError, match=r"cannot read .*null byte"):
        load_run_file(tmp_path / "a\0b")


def test_a_files_own_python_task_needs_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_ALLOWED_TASKS", "")
    path = tmp_path / "run.json"
    path.write_text(_run_file(model=tasks.spec("toy").model_dump()).model_dump_json())
    with pytest.raises(Exception, match="not allowed here"):
        main([str(path), "--steps", "1", "--device", "cpu"])
    assert main([str(path), "--steps", "1", "--device", "cpu", "--allow-tasks", tasks.MODULE]) == 0
