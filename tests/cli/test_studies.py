"""submit, list, watch, export, cancel: against a running service."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.cli.output import plan_parts, print_wide
from autotune.cli.tune import _report as report_tuned
from autotune.domain.errors import ExportError
from autotune.domain.study import StudyState
from autotune.export import FORMATS
from autotune.store import Database
from engine.config import TrainConfig
from engine.report import Outcome
from tests.cli.conftest import Run
from tests.service.stories import failed, planned, queued, running, succeeded
from tests.support.plans import cluster_plan
from tests.support.samples import sample_best, sample_failure, sample_report, sample_request
from tests.support.service import RunningService


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    path = tmp_path / "study.json"
    path.write_text(sample_request().model_dump_json())
    return path


class TestSubmit:
    """Files as JSON or YAML; every mistake is told by file and field."""

    def test_json_prints_the_id(
            self, run: Run, connected: RunningService, study_file: Path, database: Database) -> None:
        result = run("submit", str(study_file))
        assert result.code == 0
        with database.read() as transaction:
            assert transaction.studies.get(result.out.strip()).request == sample_request()

    def test_yaml_is_the_same(self, run: Run, connected: RunningService, tmp_path: Path, database: Database) -> None:
        path = tmp_path / "study.yaml"
        path.write_text("# a comment\n" + yaml.safe_dump(sample_request().model_dump(mode="json")))
        result = run("submit", str(path), "--json")
        assert result.code == 0
        with database.read() as transaction:
            assert transaction.studies.get(json.loads(result.out)["id"]).request == sample_request()

    def test_again_with_the_same_key_is_the_same_study(
            self, run: Run, connected: RunningService, study_file: Path) -> None:
        first = run("submit", str(study_file), "--idempotency-key", "once")
        assert run("submit", str(study_file), "--idempotency-key", "once").out == first.out

    @pytest.mark.parametrize(("name", "text", "says"), [
        ("a.json", "{", "is not JSON"), ("a.json", "[1]", "a study is a mapping, not a list"),
        ("a.yaml", "a: [", "is neither JSON nor YAML"), ("a.yaml", "", "a study is a mapping, not nothing"),
        ("a.yaml", "name: x\nname: y", "a.yaml: name: is given twice: keep one"),
        ("a.yaml", "model: {layers: 1, layers: 2}", "a.yaml: layers: is given twice: keep one"),
        ("a.json", '{"name": "x", "name": "y"}', "a.json: name: is given twice: keep one"),
        ("a.yaml", "{'name': x", "line"), ("a.yaml", "name: x", "model: missing"),
        ("a.json", '{"nam": "x"}', "nam: unknown field: did you mean 'name'?")])
    def test_a_bad_file_is_told_with_its_name(
            self, run: Run, connected: RunningService, tmp_path: Path, name: str, text: str, says: str) -> None:
        path = tmp_path / name
        path.write_text(text)
        result = run("submit", str(path))
        assert result.code == 2
        assert str(path) in result.err
        assert says in result.err
        assert "Traceback" not in result.err

    def test_a_missing_or_unreadable_file(self, run: Run, connected: RunningService, tmp_path: Path) -> None:
        assert "No such file" in run("submit", str(tmp_path / "none.json")).err
        (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
        assert "not UTF-8" in run("submit", str(tmp_path / "binary.yaml")).err

    def test_what_the_service_refuses_is_told_by_field(
            self, run: Run, connected: RunningService, tmp_path: Path) -> None:
        path = tmp_path / "study.json"
        path.write_text(sample_request(search={"space": {"zero_stages": [1]}}).model_dump_json())
        result = run("submit", str(path))
        assert result.code == 1
        assert "search.space.zero_stages: no such knob; did you mean zero_stage?" in result.err


class TestConnection:
    """One line that says what to do, never a traceback."""

    def test_nobody_there(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTOTUNE_TOKEN", "x")
        result = run("list", "--server", "http://127.0.0.1:1")
        assert result.code == 1
        assert "cannot reach http://127.0.0.1:1" in result.err

    def test_wrong_token(self, run: Run, connected: RunningService) -> None:
        result = run("list", "--token", "wrong")
        assert result.code == 1
        assert "does not accept the token" in result.err

    def test_no_token(self, run: Run) -> None:
        result = run("list")
        assert result.code == 1
        assert "AUTOTUNE_TOKEN" in result.err

    def test_no_url(self, run: Run, connected: RunningService) -> None:
        result = run("list", "--server", "somewhere")
        assert result.code == 2
        assert "AUTOTUNE_SERVER" in result.err


class TestList:
    """Newest first."""

    def test_filters_and_json(self, run: Run, connected: RunningService, database: Database) -> None:
        first = queued(database, sample_request("only-here"))
        second = queued(database, sample_request("only-here"))
        found = json.loads(run("list", "--json", "--model", "only-here").out)
        assert [study["id"] for study in found] == [second, first]
        text = run("list", "--model", "only-here").out
        assert text.index(second) < text.index(first)
        assert json.loads(run("list", "--json", "--model", "only-here", "--state", "failed").out) == []

    def test_a_plan_has_no_trials_to_count(self, run: Run, connected: RunningService, database: Database) -> None:
        queued(database, sample_request("only-plan", mode="plan", hardware={"cluster": "h100-80gb", "devices": 8}))
        assert run("list", "--model", "only-plan").out.splitlines()[-1].split()[1:] == ["only-plan", "queued", "plan"]

    def test_a_name_is_shown_as_it_is(self, run: Run, connected: RunningService, database: Database) -> None:
        queued(database, sample_request("[/odd] [red]name"))
        result = run("list", "--model", "[/odd] [red]name")
        assert result.code == 0
        assert "[/odd] [red]name" in result.out

    def test_unknown_state(self, run: Run, connected: RunningService) -> None:
        result = run("list", "--state", "done")
        assert result.code == 1
        assert "state" in result.err


class TestWatch:
    """Exit code 0 only if the study succeeded."""

    def test_success(self, run: Run, connected: RunningService, database: Database) -> None:
        cancel_waiting(database)
        result = run("watch", succeeded(database))
        assert result.code == 0
        assert "trial   0  ok" in result.out
        assert "trial   1  oom_device" in result.out
        assert "12 MiB over the limit" in result.out
        assert "winner: trial 0: 1,000 tok/s (95 % interval 990 to 1,010)" in result.out
        assert "speed-up: 1.25x (1.20 to 1.30)" in result.out

    def test_a_plan_is_told_as_plan_tells_it(
            self, run: Run, connected: RunningService, database: Database, capsys: pytest.CaptureFixture[str]) -> None:
        cancel_waiting(database)
        found = cluster_plan().summary
        print_wide(*plan_parts(found))
        table = capsys.readouterr().out
        result = run("watch", planned(database))
        assert (result.code, len(found.layouts) > 20) == (0, True)
        assert table in result.out

    def test_failure(self, run: Run, connected: RunningService, database: Database) -> None:
        cancel_waiting(database)
        result = run("watch", failed(database, sample_failure(Outcome.CRASHED, "ValueError: bad arg")))
        assert result.code == 1
        assert "failed: ValueError: bad arg" in result.out

    @pytest.mark.parametrize("story", [succeeded, failed])
    def test_the_end_is_told_once(
            self, run: Run, connected: RunningService, database: Database, story: Callable[[Database], str]) -> None:
        cancel_waiting(database)
        study_id = story(database)
        told = [line for line in run("watch", study_id).out.splitlines() if study_id in line]
        assert len(told) == 1, told

    def test_cancelled(self, run: Run, connected: RunningService, database: Database) -> None:
        study_id = queued(database)
        with database.begin() as transaction:
            transaction.studies.request_cancel(study_id)
        assert run("watch", study_id).code == 1

    def test_json_is_one_event_per_line(self, run: Run, connected: RunningService, database: Database) -> None:
        cancel_waiting(database)
        result = run("watch", succeeded(database), "--json")
        events = [json.loads(line) for line in result.out.splitlines()]
        assert events[0]["data"] == {"state": "queued"}
        assert events[-1]["data"]["state"] == "succeeded"

    def test_unknown(self, run: Run, connected: RunningService) -> None:
        result = run("watch", "0" * 32)
        assert result.code == 1
        assert "no study" in result.err

    def test_follows_a_study_that_still_runs(self, connected: RunningService, database: Database) -> None:
        cancel_waiting(database)
        study_id, epoch = running(database, sample_report())
        process = subprocess.Popen([sys.executable, "-m", "autotune.cli", "watch", study_id], text=True,
                                   stdout=subprocess.PIPE)
        assert process.stdout is not None
        while "trial   0" not in (line := process.stdout.readline()):
            assert line, "watch ended early"
        with database.begin() as transaction:
            transaction.studies.finish(study_id, epoch, StudyState.FAILED, error="boom")
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 1
        process.stdout.close()
        assert "failed: boom" in rest


class TestBeginningsOfIds:
    """As much of an id as tells it from others will do."""

    def test_a_beginning_of_one_study_is_enough(
            self, run: Run, connected: RunningService, database: Database, tmp_path: Path) -> None:
        cancel_waiting(database)
        study_id = succeeded(database)
        others = {study["id"] for study in json.loads(run("list", "--json").out)} - {study_id}
        beginning = next(study_id[:length] for length in range(1, 33)
                         if not any(other.startswith(study_id[:length]) for other in others))
        assert f"study {study_id} succeeded" in run("watch", beginning).out
        assert run("export", beginning).code == 0
        assert study_id not in run("cancel", "no-such-id").err
        cancelled = run("cancel", study_id[:max(6, len(beginning))])
        assert (cancelled.code, "has ended" in cancelled.err) == (1, True)

    def test_to_cancel_a_letter_is_not_enough(self, run: Run, connected: RunningService, database: Database) -> None:
        study_id = queued(database)
        refused = run("cancel", study_id[:5])
        assert (refused.code, "give at least 6 characters" in refused.err) == (1, True)
        assert next(study["state"] for study in json.loads(run("list", "--json").out)
                    if study["id"] == study_id) == "queued"
        assert run("cancel", study_id[:6]).code == 0

    def test_a_beginning_of_several_is_refused_with_all_of_them(
            self, run: Run, connected: RunningService, database: Database) -> None:
        by_digit: dict[str, list[str]] = {}
        for _ in range(17):  # of 16 first digits one comes twice
            study_id = queued(database, sample_request("alike"))
            by_digit.setdefault(study_id[0], []).append(study_id)
        digit, twins = next(item for item in by_digit.items() if len(item[1]) > 1)
        result = run("watch", digit)
        assert result.code == 1
        assert f"studies' ids begin with {digit}, give more of it:" in result.err
        assert f"{twins[-1]}  queued  alike" in result.err
        states = {study["id"]: study["state"] for study in json.loads(run("list", "--json", "--model", "alike").out)}
        assert {states[twin] for twin in twins} == {"queued"}


class TestExport:
    """The winner to standard output or a file; notes to standard error."""

    def test_to_a_file(self, run: Run, connected: RunningService, database: Database, tmp_path: Path) -> None:
        cancel_waiting(database)
        study_id = succeeded(database)
        target = tmp_path / "ds.json"
        result = run("export", study_id, "--format", "deepspeed", "-o", str(target))
        assert (result.code, result.out) == (0, "")
        assert json.loads(target.read_text())["train_batch_size"] == 8
        assert "note: " in result.err

    @pytest.mark.parametrize("format", FORMATS)
    def test_to_standard_output(self, run: Run, connected: RunningService, database: Database, format: str) -> None:
        cancel_waiting(database)
        result = run("export", succeeded(database), "-f", format)
        assert result.code == 0
        assert yaml.safe_load(result.out)

    def test_a_row_of_a_plan(self, run: Run, connected: RunningService, database: Database) -> None:
        cancel_waiting(database)
        study_id = planned(database, "1")
        result = run("export", study_id, "-f", "deepspeed", "--row", "2")
        assert result.code == 0
        assert "(row 2 of a plan)" in json.loads(result.out)["_comment"][0]
        without = run("export", study_id)
        rows = len(cluster_plan("1").summary.rows)
        assert (without.code, f"only planned: export a row of it, --row 1 to {rows} (" in without.err) == (1, True)

    def test_an_unknown_format_lists_all(self, run: Run, connected: RunningService, database: Database) -> None:
        cancel_waiting(database)
        result = run("export", succeeded(database), "-f", "onnx")
        assert result.code == 1
        assert all(name in result.err for name in FORMATS)

    def test_what_a_format_cannot_express_is_said_as_it_is(
            self, run: Run, connected: RunningService, database: Database) -> None:
        cancel_waiting(database)
        result = run("export", won_at_stage_1(database), "-f", "fsdp")
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("error: zero_stage 1: fully_shard shards gradients")

    def test_no_winner(self, run: Run, connected: RunningService, database: Database) -> None:
        cancel_waiting(database)
        result = run("export", failed(database, sample_failure(Outcome.OOM_DEVICE, "x")))
        assert result.code == 1
        assert "1 oom_device" in result.err

    def test_a_file_that_cannot_be_written(self, run: Run, connected: RunningService, database: Database) -> None:
        cancel_waiting(database)
        result = run("export", succeeded(database), "-o", "/no/such/folder/x.json")
        assert result.code == 2
        assert "/no/such/folder/x.json: cannot be written" in result.err


def test_an_export_that_is_refused_does_not_cost_the_winner(
        database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    cancel_waiting(database)
    study_id = won_at_stage_1(database)
    with database.read() as transaction:
        study = transaction.studies.get(study_id)
    with pytest.raises(ExportError, match="zero_stage 1"):
        report_tuned(study, {}, "fsdp", None, json=False)
    assert "winner: trial 0" in capsys.readouterr().out
    with pytest.raises(ExportError, match="zero_stage 1"):
        report_tuned(study, {}, "fsdp", None, json=True)
    assert json.loads(capsys.readouterr().out)["best"]["trial_number"] == 0


def test_cancel(run: Run, connected: RunningService, database: Database) -> None:
    study_id = queued(database)
    assert "is cancelled" in run("cancel", study_id).out
    again = run("cancel", study_id)
    assert again.code == 1
    assert "has ended" in again.err


def won_at_stage_1(database: Database) -> str:
    """A study whose winner FSDP cannot express."""
    study_id, epoch = running(database, sample_report())
    best = sample_best(study_id, trial_number=0, config=TrainConfig(micro_batch_size=8, zero_stage=1))
    with database.begin() as transaction:
        transaction.studies.set_best(study_id, epoch, best)
        transaction.studies.finish(study_id, epoch, StudyState.SUCCEEDED)
    return study_id


def cancel_waiting(database: Database) -> None:
    """Leave nothing in the queue: stories claim the study at its head."""
    waiting: Any = None
    while waiting is None or waiting.next_cursor:
        with database.begin() as transaction:
            waiting = transaction.studies.page(state=StudyState.QUEUED, limit=500)
            for study in waiting.items:
                transaction.studies.request_cancel(study.id)
