"""``plan``: a model ranked for a cluster that is not here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli.output import plan_parts, print_wide
from autotune.predict.cluster import bundled_cluster
from tests.cli.conftest import Run
from tests.support.plans import cluster_plan
from tests.support.samples import sample_request
from tests.support.service import clean_environment


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    path = tmp_path / "study.json"
    path.write_text(sample_request(training={"global_batch_size": 512}, search={}).model_dump_json())
    return path


def test_configurations_are_ranked_a_row_is_exported_and_nothing_is_kept(study_file: Path, tmp_path: Path) -> None:
    cluster, temporary = tmp_path / "lab.json", tmp_path / "temporary"
    temporary.mkdir()
    cluster.write_text(bundled_cluster("h100-80gb").model_copy(update={
        "name": "lab", "device_name": "Lab GPU"}).model_dump_json())
    done = subprocess.run(
        [sys.executable, "-m", "autotune.cli", "plan", str(study_file), "-c", str(cluster), "-n", "16", "-t", "1,2",
         "-p", "auto", "--export", "deepspeed", "--json"],
        capture_output=True, text=True, timeout=240, check=False, env=clean_environment(TMPDIR=str(temporary)))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["study"]["state"] == "succeeded"
    assert result["study"]["best"] is None
    assert result["study"]["progress"]["trials_finished"] == 0
    assert result["study"]["note"].startswith("predicted for 16 x Lab GPU")
    seconds = [point["prediction"]["step_seconds"] for point in result["plan"]["fastest"]]
    assert len(seconds) == 20
    assert seconds == sorted(seconds)
    for point in result["plan"]["fastest"]:
        config, data = point["config"], point["data_parallel"]
        assert config["micro_batch_size"] * config["gradient_accumulation_steps"] * data == 512
        assert point["tensor_parallel"] * point["pipeline_parallel"] * data == 16
    exported = json.loads(result["export"]["text"])
    assert exported["_comment"][0].startswith("PREDICTED for 16 x Lab GPU, not measured")
    assert exported["train_batch_size"] == 512
    assert not list(temporary.glob("autotune-*"))


def test_the_ranking_says_once_what_all_rows_share(capsys: pytest.CaptureFixture[str]) -> None:
    print_wide(*plan_parts(cluster_plan().summary))
    ranking, layouts = capsys.readouterr().out.split("\nThe fastest of each layout, ")
    assert ranking.splitlines()[1] == "Predicted to be fastest, 79.2 GiB a device; all precision bf16, checkpoint none"
    assert layouts.splitlines()[0] == "79.2 GiB a device; all precision bf16, checkpoint none, offload none"
    assert layouts.splitlines()[1].split() == ["row", "tokens/s", "step", "ms", "MFU", "%", "GiB", "tp", "pp", "dp",
                                               "zero", "micro", "accum"]
    first = cluster_plan().summary.layouts[0]
    assert layouts.splitlines()[2].split()[1:3] == [f"{first.tokens_per_second:,.0f}",
                                                    f"{1000 * (first.prediction.step_seconds or 0):,.0f}"]


def test_an_unknown_cluster_is_refused_with_those_there_are(run: Run, study_file: Path) -> None:
    result = run("plan", str(study_file), "--cluster", "a100")
    assert result.code == 2
    assert "hardware.cluster: no cluster is known as 'a100': give one of a100-40gb, a100-80gb" in result.err


def test_a_batch_that_the_devices_cannot_share_is_refused(run: Run, study_file: Path) -> None:
    result = run("plan", str(study_file), "--cluster", "a100-80gb", "--devices", "3")
    assert result.code == 2
    assert "training.global_batch_size" in result.err


def test_without_a_cluster_those_there_are_are_named(run: Run, study_file: Path) -> None:
    result = run("plan", str(study_file))
    assert (result.code, result.err) == (2, "error: --cluster: name a cluster, or give the file of your own; there are "
                                         "a100-40gb, a100-80gb, h100-80gb, h200-141gb, v100-32gb\n")


def test_clusters_are_listed_and_printed_to_be_edited(run: Run, tmp_path: Path, study_file: Path) -> None:
    assert "NVIDIA H200" in run("clusters").out
    own = json.loads(run("clusters", "h100-80gb").out)
    file = tmp_path / "own.json"
    file.write_text(json.dumps(own | {"memory_byte": 1}))
    result = run("plan", str(study_file), "-c", str(file))
    assert (result.code, result.err) == (
        2, f"error: {file}: memory_byte: unknown field: did you mean 'memory_bytes'?\n")
    assert run("clusters", "h100").code == 2


def test_a_row_that_no_format_expresses_does_not_cost_the_plan(run: Run, study_file: Path) -> None:
    result = run("plan", str(study_file), "-c", "a100-80gb", "-n", "16", "-t", "2", "-p", "1", "--export", "deepspeed",
                 "--json")
    assert result.code != 0
    assert json.loads(result.out)["plan"]["fastest"]
    assert "tensor" in result.err


def test_a_row_that_is_not_there_does_not_cost_the_plan(run: Run, study_file: Path) -> None:
    result = run("plan", str(study_file), "-c", "a100-80gb", "-n", "16", "--row", "99", "--export", "deepspeed")
    assert result.code == 2
    assert "Predicted to be fastest" in result.out
    assert "no row 99: the plan has 1 to " in result.err


def test_an_unknown_format_is_refused_before_anything_is_done(run: Run, study_file: Path) -> None:
    result = run("plan", str(study_file), "-c", "a100-80gb", "--export", "megatron")
    assert (result.code, "unknown format 'megatron': give one of engine, deepspeed" in result.err) == (2, True)
