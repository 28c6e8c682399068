"""``import``: another tool's configuration in the engine's words."""

import json
from pathlib import Path

import yaml

from autotune.export import export
from engine.config import OptimizerConfig, TrainConfig
from tests.cli.conftest import Run
from tests.export.support import best


def test_an_export_comes_back(run: Run, tmp_path: Path) -> None:
    source = best(zero_stage=2, precision="bf16", reduce_bucket_size=123)
    path = tmp_path / "ds.json"
    path.write_text(export(source, "deepspeed").text)
    result = run("import", str(path))
    found = json.loads(result.out)
    assert TrainConfig(**found["config"]) == source.config
    assert OptimizerConfig(**found["optimizer"]) == source.request.training.optimizer
    assert (found["world_size"], found["global_batch_size"], found["open"]) == (2, 32, [])
    assert "note: zero_optimization.contiguous_gradients" in result.err


def test_notes_are_in_the_output_for_scripts_and_may_go_to_a_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "nearly.yml"
    path.write_text("# gpt-neox writes it so\n{'fp16': {'enabled': True,}, \"steps-per-print\": 10, 'optimizer': "
                    "{'type': 'Adam', 'params': {'lr': 6e-4}},}")
    result = run("import", str(path), "--json")
    found = json.loads(result.out)
    assert (result.err, found["config"]["precision"], found["optimizer"]["lr"]) == ("", "fp16", 6e-4)
    assert "steps-per-print: unknown, did you mean steps_per_print?; left out" in found["notes"]
    target = tmp_path / "engine.json"
    assert run("import", str(path), "-o", str(target)).out == ""
    assert json.loads(target.read_text())["config"] == found["config"]


def test_what_is_refused_is_told_by_file_and_key(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 33, "train_micro_batch_size_per_gpu": 2,
                                "bf16": {"enabled": True}, "fp16": {"enabled": True}}))
    result = run("import", str(path), "--devices", "2")
    assert (result.code, result.out) == (2, "")
    assert f"error: {path}: fp16.enabled: true, and so is bf16.enabled" in result.err
    assert f"error: {path}: train_batch_size: 33 not divisible by 2" in result.err
    path.write_text("[]")
    assert "a configuration is a mapping, not a list" in run("import", str(path)).err


def test_a_pair_of_files(run: Run, tmp_path: Path) -> None:
    pair = tmp_path / "accelerate.yaml", tmp_path / "ds.json"
    pair[0].write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {
        "deepspeed_config_file": "elsewhere.json"}}))
    pair[1].write_text(export(best(zero_stage=3, precision="fp16"), "deepspeed-hf").text)
    refused = run("import", str(pair[0]))
    assert (refused.code, "--deepspeed" in refused.err) == (2, True)
    found = json.loads(run("import", str(pair[0]), "--deepspeed", str(pair[1])).out)
    assert (found["config"]["zero_stage"], found["config"]["precision"], found["world_size"]) == (3, "fp16", 2)
    assert "optimizer.params.lr" in found["open"]
