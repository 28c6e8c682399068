"""What lies in examples/ works as it stands."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from autotune.domain.request import StudyRequest
from autotune.search.space import parse_space
from engine.spec import ALLOWED_TASKS_VARIABLE, PythonSpec
from engine.tasks import build_task
from tests.e2e.live import QUICK, SMALL_BUCKETS, SMALL_GPT, assert_gone, free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STUDIES = ("gpt.json", "vit.json", "huggingface.json", "python_task/study.json")


@pytest.mark.parametrize("name", STUDIES)
def test_the_studies_are_valid(name: str) -> None:
    request = StudyRequest.model_validate_json((EXAMPLES / name).read_text())
    space = parse_space(request)
    micro = {config.micro_batch_size for config in space.points}
    assert len(micro) == 4
    assert {config.zero_stage for config in space.points} == {0, 1, 2, 3}


def test_the_own_task_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "python_task")
    monkeypatch.setenv(ALLOWED_TASKS_VARIABLE, "digits")
    body: dict[str, Any] = json.loads((EXAMPLES / "python_task" / "study.json").read_text())
    task = build_task(PythonSpec.model_validate(body["model"]), seed=3)
    torch.manual_seed(0)
    model = task.build_model()
    images, labels = task.batch([7, 10, 17])
    assert labels.tolist() == [7, 0, 7]
    alone, _ = task.batch([17])
    assert torch.equal(alone[0], images[2])  # a sample depends on its index alone
    assert not torch.equal(images[0], images[2])
    loss = task.loss(model, (images, labels))
    one_by_one = [task.loss(model, task.batch([index])).item() for index in (7, 10, 17)]
    assert loss.item() == pytest.approx(sum(one_by_one) / 3, rel=1e-5)


def test_the_own_task_is_tuned_where_it_is_allowed(tmp_path: Path) -> None:
    study: dict[str, Any] = json.loads((EXAMPLES / "python_task" / "study.json").read_text())
    study["model"]["arguments"] = {"channels": 8, "depth": 2}
    study["search"] = {"sampler": "grid", "policy": QUICK, "space": {"zero_stage": [0, 2]}, "confirm_rounds": 0}
    file = tmp_path / "study.json"
    file.write_text(json.dumps(study))

    def tune(allowed: str) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).with_name("autotune"), "tune", file, "--format", "engine"]
        return subprocess.run(
            [*command, "--output", tmp_path / "best.json"],
            capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path, stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(EXAMPLES / "python_task"), ALLOWED_TASKS_VARIABLE: allowed})

    refused = tune("something.else")
    assert refused.returncode == 2
    assert "model.entry_point" in refused.stderr
    done = tune("digits")
    assert done.returncode == 0, done.stderr
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["model"]["entry_point"] == "digits:make_task"
    assert best["config"]["zero_stage"] in (0, 2)


def losses_of(command: list[str]) -> list[float]:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return [float(value) for value in re.findall(r"loss (\S+)", done.stdout)]


def test_the_loop_on_the_engine_equals_the_plain_one() -> None:
    plain = losses_of(["examples/train.py", "--plain", "--steps", "5"])
    assert len(plain) == 5
    assert plain[-1] != plain[0]
    assert losses_of(["examples/train.py", "--steps", "5"]) == pytest.approx(plain, abs=2e-6)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sharded = losses_of([*ranks, "examples/train.py", "--steps", "5", "--zero-stage", "3"])
    assert sharded == pytest.approx(plain, abs=2e-6)


def test_at_most_five_lines_of_the_loop_change() -> None:
    text = (EXAMPLES / "train.py").read_text()
    marked = re.findall(r"# (\d)", text[text.index("def train_on_engine"):text.index("def mean_over_ranks")])
    assert marked == ["1", "2", "3", "4", "5"]


# --- the demo ---------------------------------------------------------------------------------------------------------


def reduced_study(folder: Path, **changes: Any) -> Path:
    study: dict[str, Any] = json.loads((EXAMPLES / "gpt.json").read_text())
    study["model"] = SMALL_GPT
    study["training"]["global_batch_size"] = 8
    study["search"] = {"sampler": "grid", "policy": QUICK, "space": {"zero_stage": [0, 1], **SMALL_BUCKETS}, **changes}
    file = folder / "study.json"
    file.write_text(json.dumps(study))
    return file


def demo(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, EXAMPLES / "demo.py", *arguments, "--port", str(free_port())], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL)


def test_the_demo_ends_by_itself_with_a_winner_and_its_exports(tmp_path: Path) -> None:
    process = demo("--exit", "--study", reduced_study(tmp_path), "--data-dir", tmp_path / "data")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert re.search(r"winner .*tok/s.*MiB", output), output
    assert re.search(r"default .*tok/s.*MiB", output), output
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/login#token=\S+", output), output
    exported = sorted(path.name for path in (tmp_path / "data" / "exports").glob("*/*"))
    assert {name.split("-")[0] for name in exported} >= {"engine", "deepspeed", "accelerate"}
    run_file = json.loads(next((tmp_path / "data" / "exports").glob("*/engine-*")).read_text())
    config = run_file["config"]
    assert config["micro_batch_size"] * config["gradient_accumulation_steps"] * run_file["world_size"] == 8


def test_the_demo_fails_with_a_reason_and_an_exit_code(tmp_path: Path) -> None:
    study = reduced_study(tmp_path, space={"zero_stage": [7]})
    process = demo("--exit", "--study", study, "--data-dir", tmp_path / "data")
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "search.space.zero_stage" in output


def test_ending_the_demo_ends_all_it_started(tmp_path: Path) -> None:
    process = demo("--study", reduced_study(tmp_path), "--data-dir", tmp_path / "data")
    try:
        family = family_with_workers(process)
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert_gone(family)
    assert process.returncode == 0, output


def family_with_workers(process: subprocess.Popen[str], seconds: float = 100.0) -> list[psutil.Process]:
    """The demo's processes once its study runs: service, scheduler and two ranks."""
    root = psutil.Process(process.pid)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        family = root.children(recursive=True)
        if sum("engine.worker" in child.cmdline() for child in family) >= 2:
            return [root, *family]
        time.sleep(0.2)
    pytest.fail("the demo started no workers")
