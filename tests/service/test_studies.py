"""Reading studies, trials, plans, winners and exports; cancelling and deleting."""

import json
from typing import Any

import pytest
import yaml
from sqlalchemy import text
from starlette.testclient import TestClient

from autotune.domain.study import StudyState
from autotune.export import FORMATS
from autotune.store import Database
from engine.config import TrainConfig
from engine.report import Outcome
from tests.service.stories import failed, planned, queued, running, succeeded
from tests.support.plans import cluster_plan
from tests.support.samples import sample_best, sample_failure, sample_measurement, sample_report, sample_request

UNKNOWN = "0" * 32


def collect(client: TestClient, path: str, **parameters: Any) -> list[dict[str, Any]]:
    """All items of a list, page by page."""
    items: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = client.get(path, params={**parameters, **({"cursor": cursor} if cursor else {})}).json()
        items += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return items


class TestLists:
    """Newest first, in pages that stay disjoint and complete while studies are added."""

    def test_pages(self, client: TestClient, database: Database) -> None:
        ids = [queued(database) for _ in range(5)]
        assert [item["id"] for item in collect(client, "/api/v1/studies", limit=2)] == ids[::-1]

    def test_a_study_added_between_two_pages_moves_nothing(self, client: TestClient, database: Database) -> None:
        ids = [queued(database) for _ in range(4)]
        first = client.get("/api/v1/studies", params={"limit": 2}).json()
        queued(database)
        second = client.get("/api/v1/studies", params={"limit": 2, "cursor": first["next_cursor"]}).json()
        assert [item["id"] for item in first["items"] + second["items"]] == ids[::-1]
        assert second["next_cursor"] is None

    def test_by_state(self, client: TestClient, database: Database) -> None:
        done, waiting = succeeded(database), queued(database)
        for state, expected in (("succeeded", [done]), ("queued", [waiting]), ("failed", [])):
            assert [item["id"] for item in collect(client, "/api/v1/studies", state=state)] == expected

    def test_by_model(self, client: TestClient, database: Database) -> None:
        queued(database, sample_request("a"))
        wanted = queued(database, sample_request("b"))
        assert [item["id"] for item in collect(client, "/api/v1/studies", model="b")] == [wanted]

    @pytest.mark.parametrize(("parameters", "field"), [
        ({"limit": 0}, "limit"), ({"limit": 501}, "limit"), ({"limit": "x"}, "limit"), ({"state": "done"}, "state"),
        ({"cursor": "nonsense"}, "cursor"), ({"cursor": "djE6eA"}, "cursor"), ({"model": "a\x00b"}, "model")])
    def test_wrong_parameters_are_named(self, client: TestClient, parameters: dict[str, Any], field: str) -> None:
        response = client.get("/api/v1/studies", params=parameters)
        assert response.status_code == 422
        assert [error["field"] for error in response.json()["errors"]] == [field]


class TestOneStudy:
    """A study with its progress and best so far."""

    def test_winner_in_short(self, client: TestClient, database: Database) -> None:
        study = client.get(f"/api/v1/studies/{succeeded(database)}").json()
        assert (study["state"], study["note"], study["error"]) == ("succeeded", "budget spent", None)
        assert study["best"]["tokens_per_second"] == 1000.0
        assert study["best"]["tokens_per_second_interval"] == [990.0, 1010.0]
        assert study["best"]["speedup"] == 1.25
        assert study["best"]["config"]["micro_batch_size"] == 8
        assert "plan" not in study
        assert study["finished_at"] is not None

    def test_failure_with_its_reason(self, client: TestClient, database: Database) -> None:
        study = client.get(f"/api/v1/studies/{failed(database)}").json()
        assert (study["state"], study["error"], study["best"]) == ("failed", "ValueError: bad arg", None)

    @pytest.mark.parametrize("path", [
        "", "/plan", "/best", "/export", "/trials", "/trials/0", "/trials/0/log", "/events"])
    @pytest.mark.parametrize("study_id", [UNKNOWN, "x", "../etc/passwd", "%00", "A" * 400])
    def test_unknown(self, client: TestClient, study_id: str, path: str) -> None:
        response = client.get(f"/api/v1/studies/{study_id}{path}")
        assert response.status_code == 404
        assert response.headers["content-type"] == "application/problem+json"


class TestCancelAndDelete:
    """Only what runs can be cancelled, only what has ended can be deleted."""

    def test_a_queued_study_ends_at_once(self, client: TestClient, database: Database) -> None:
        study = client.post(f"/api/v1/studies/{queued(database)}/cancel").json()
        assert (study["state"], study["cancel_requested"]) == ("cancelled", True)

    def test_a_running_study_is_asked_to_stop(self, client: TestClient, database: Database) -> None:
        study_id, _ = running(database)
        study = client.post(f"/api/v1/studies/{study_id}/cancel").json()
        assert (study["state"], study["cancel_requested"]) == ("running", True)

    def test_a_finished_study_cannot_be_cancelled(self, client: TestClient, database: Database) -> None:
        response = client.post(f"/api/v1/studies/{succeeded(database)}/cancel")
        assert response.status_code == 409
        assert "succeeded" in response.json()["detail"]

    def test_a_running_study_cannot_be_deleted(self, client: TestClient, database: Database) -> None:
        study_id, _ = running(database)
        assert client.delete(f"/api/v1/studies/{study_id}").status_code == 409
        assert client.get(f"/api/v1/studies/{study_id}").status_code == 200

    def test_deleting_keeps_the_best_configuration(self, client: TestClient, database: Database) -> None:
        study_id = succeeded(database)
        response = client.delete(f"/api/v1/studies/{study_id}")
        assert (response.status_code, response.content) == (204, b"")
        assert client.get(f"/api/v1/studies/{study_id}").status_code == 404
        assert client.get("/api/v1/models/gpt-tiny/best").json()["items"][0]["study_id"] == study_id

    @pytest.mark.parametrize(("method", "path"), [("POST", "/cancel"), ("DELETE", "")])
    def test_unknown(self, client: TestClient, method: str, path: str) -> None:
        assert client.request(method, f"/api/v1/studies/{UNKNOWN}{path}").status_code == 404


class TestTrials:
    """Trials with configuration, prediction, measurement and outcome."""

    def test_fields(self, client: TestClient, database: Database) -> None:
        study_id, _ = running(database, sample_report(), sample_failure(Outcome.OOM_HOST, "killed (signal 9)"))
        good, bad = collect(client, f"/api/v1/studies/{study_id}/trials", limit=1)
        assert (good["number"], good["state"], good["outcome"]) == (0, "finished", "ok")
        assert good["measurement"]["samples_per_second"] == pytest.approx(80.0)
        assert good["measurement"]["step_seconds"] == pytest.approx([0.099, 0.1, 0.101, 0.1, 0.1])
        assert good["prediction"]["peak_device_bytes"] == 1_000_000
        assert good["config"]["gradient_accumulation_steps"] == 1
        assert (bad["number"], bad["outcome"], bad["detail"], bad["measurement"]) == (
            1, "oom_host", "killed (signal 9)", None)

    def test_one_and_its_log(self, client: TestClient, database: Database) -> None:
        study_id, _ = running(database, sample_report())
        assert client.get(f"/api/v1/studies/{study_id}/trials/0").json()["number"] == 0
        log = client.get(f"/api/v1/studies/{study_id}/trials/0/log")
        assert log.text == "log of trial 0\n"
        assert log.headers["content-type"].startswith("text/plain")

    @pytest.mark.parametrize(("number", "status"), [(7, 404), (-1, 422), (2**40, 422), ("x", 422)])
    def test_unknown(self, client: TestClient, database: Database, number: Any, status: int) -> None:
        study_id, _ = running(database, sample_report())
        assert client.get(f"/api/v1/studies/{study_id}/trials/{number}").status_code == status

    def test_losses_that_are_not_finite_are_null_in_valid_json(self, client: TestClient, database: Database) -> None:
        report = sample_failure(Outcome.NON_FINITE, "loss is NaN at step 1").model_copy(
            update={"measurement": sample_measurement(losses=(4.0, None, None))})
        study_id, _ = running(database, report)
        text = client.get(f"/api/v1/studies/{study_id}/trials/0").text
        trial = json.loads(text, parse_constant=pytest.fail)
        assert trial["measurement"]["losses"] == [4.0, None, None]
        assert trial["outcome"] == "non_finite"


class TestPlan:
    """Feasible count, rejections by reason, predictions."""

    def test_made(self, client: TestClient, database: Database) -> None:
        study_id = succeeded(database)
        plan = client.get(f"/api/v1/studies/{study_id}/plan", params={"limit": 2}).json()
        assert (plan["points"], plan["feasible"], plan["rejections"]) == (4, 3, {"does not fit": 1})
        assert len(plan["predictions"]) == 2
        assert plan["predictions"][0]["prediction"]["peak_device_bytes"] == 1_000_000

    def test_not_made_yet(self, client: TestClient, database: Database) -> None:
        response = client.get(f"/api/v1/studies/{queued(database)}/plan")
        assert response.status_code == 409
        assert "no plan yet" in response.json()["detail"]

    def test_never_to_be_made(self, client: TestClient, database: Database) -> None:
        response = client.get(f"/api/v1/studies/{failed(database)}/plan")
        assert response.status_code == 409
        assert "ValueError: bad arg" in response.json()["detail"]


class TestWinner:
    """The winner with its evidence; a defined answer where there is none."""

    def test_with_evidence(self, client: TestClient, database: Database) -> None:
        study_id = succeeded(database)
        best = client.get(f"/api/v1/studies/{study_id}/best").json()
        assert best["study_id"] == study_id
        assert best["hardware_profile"]["fingerprint"] == "hardware-1"
        assert best["request"]["training"]["global_batch_size"] == 8
        assert best["confirmed"] is True

    def test_with_an_explanation(self, client: TestClient, database: Database) -> None:
        explanation = client.get(f"/api/v1/studies/{succeeded(database)}/explanation").json()
        assert explanation["trial_number"] == 0
        assert explanation["memory"]["measured_peak_bytes"] == 1_000_000
        assert explanation["memory"]["measured_bytes"] == {
            "parameters": 100, "gradients": 100, "optimizer": 200, "rest": 999_600}
        assert sum(explanation["time"]["measured_seconds"].values()) == pytest.approx(0.1)
        assert [step["value"] for knob in explanation["knobs"] if knob["name"] == "zero_stage"
                for step in knob["steps"]] == [0, 1]

    @pytest.mark.parametrize("path", ["best", "explanation", "export?format=engine"])
    def test_none_without_trials(self, client: TestClient, database: Database, path: str) -> None:
        response = client.get(f"/api/v1/studies/{queued(database)}/{path}")
        assert response.status_code == 409
        assert response.json()["outcomes"] == {}
        assert response.json()["type"] == "urn:autotune:problem:no-winner"

    @pytest.mark.parametrize("path", ["best", "explanation", "export?format=engine"])
    def test_none_with_failed_trials_only(self, client: TestClient, database: Database, path: str) -> None:
        study_id = failed(database, sample_failure(Outcome.OOM_DEVICE, "a"), sample_failure(Outcome.OOM_DEVICE, "b"),
                          sample_failure(Outcome.CRASHED, "c"), error="no feasible configuration")
        response = client.get(f"/api/v1/studies/{study_id}/{path}")
        assert response.status_code == 409
        assert response.json()["outcomes"] == {"oom_device": 2, "crashed": 1}
        assert "no feasible configuration" in response.json()["detail"]
        assert "1 crashed, 2 oom_device" in response.json()["detail"]


class TestPlanForACluster:
    """Rows of a plan: read and exported, never stored as a best configuration."""

    def test_rows_name_degrees_and_rates(self, client: TestClient, database: Database) -> None:
        plan = client.get(f"/api/v1/studies/{planned(database)}/plan").json()
        row = plan["fastest"][0]
        assert row["tensor_parallel"] * row["pipeline_parallel"] * row["data_parallel"] == 64
        assert row["tokens_per_second"] == pytest.approx(2048 * row["samples_per_second"])
        assert 0.2 < row["model_flops_utilization"] < 0.9
        assert plan["device_limit_bytes"] == 85_000_000_000
        assert len({(row["tensor_parallel"], row["pipeline_parallel"]) for row in plan["layouts"]}) == len(
            plan["layouts"]) == len(cluster_plan().plans) > 20

    @pytest.mark.parametrize("format", FORMATS)
    def test_a_row_is_exported_as_predicted(self, client: TestClient, database: Database, format: str) -> None:
        study_id = planned(database, "1")
        response = client.get(f"/api/v1/studies/{study_id}/export", params={"format": format, "row": 1})
        assert response.status_code == 200
        notes = json.loads(response.headers["x-autotune-notes"])
        marked = [note for note in notes if note.startswith("PREDICTED for 64 x NVIDIA A100-SXM4-80GB, not measured")]
        assert len(marked) == 1
        assert "PREDICTED" in response.text, "the file itself says so"
        assert "tuned on" not in response.text
        assert "than measured" not in response.text

    def test_what_it_ranked_is_nobody_s_best_configuration(self, client: TestClient, database: Database) -> None:
        study_id = planned(database)
        client.get(f"/api/v1/studies/{study_id}/export", params={"row": 1})
        assert client.get(f"/api/v1/studies/{study_id}").json()["best"] is None
        assert client.get("/api/v1/models/gpt-7b/best").json()["items"] == []
        for path in ("best", "export", "explanation"):
            response = client.get(f"/api/v1/studies/{study_id}/{path}")
            assert (response.status_code, "only planned" in response.json()["detail"]) == (409, True)
        with database.read() as transaction:
            assert transaction.best.for_model("gpt-7b") == ()

    def test_a_row_of_another_engine_is_not_exported(self, client: TestClient, database: Database) -> None:
        study_id = planned(database)
        row = next(number for number, point in enumerate(
            client.get(f"/api/v1/studies/{study_id}/plan").json()["fastest"], start=1) if point["tensor_parallel"] > 1)
        response = client.get(f"/api/v1/studies/{study_id}/export", params={"format": "engine", "row": row})
        assert response.status_code == 422
        assert f"row {row} has tensor_parallel" in response.json()["detail"]

    def test_rows_that_are_not_there_are_refused(self, client: TestClient, database: Database) -> None:
        for study_id, row in ((planned(database), 999), (succeeded(database), 1)):
            response = client.get(f"/api/v1/studies/{study_id}/export", params={"row": row})
            assert response.status_code == 422
            assert response.json()["errors"][0]["field"] == "row"

    def test_clusters_are_listed_with_their_figures(self, client: TestClient) -> None:
        items = client.get("/api/v1/clusters").json()["items"]
        assert [item["name"] for item in items] == ["a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "v100-32gb"]
        assert items[1]["links"]["devices_per_node"] == 8


class TestExport:
    """The winner as a file."""

    @pytest.mark.parametrize("format", FORMATS)
    def test_every_format_is_a_download(self, client: TestClient, database: Database, format: str) -> None:
        response = client.get(f"/api/v1/studies/{succeeded(database)}/export", params={"format": format})
        assert response.status_code == 200
        assert response.headers["content-disposition"].startswith("attachment; filename=")
        assert isinstance(json.loads(response.headers["x-autotune-notes"]), list)
        assert yaml.safe_load(response.text)  # JSON is YAML

    def test_the_engine_file_holds_the_batch(self, client: TestClient, database: Database) -> None:
        file = client.get(f"/api/v1/studies/{succeeded(database)}/export").json()
        assert file["global_batch_size"] == 8
        assert file["config"]["micro_batch_size"] == 8

    @pytest.mark.parametrize("format", ["", "onnx", "../engine", "a" * 90])
    def test_unknown_formats_are_refused_with_the_list(
            self, client: TestClient, database: Database, format: str) -> None:
        response = client.get(f"/api/v1/studies/{succeeded(database)}/export", params={"format": format})
        assert response.status_code == 422
        (error,) = response.json()["errors"]
        assert error["field"] == "format"
        assert all(name in error["message"] for name in FORMATS)

    def test_what_a_format_cannot_express_is_refused(self, client: TestClient, database: Database) -> None:
        study_id, epoch = running(database, sample_report())
        config = TrainConfig.model_validate({"zero_stage": 1, "micro_batch_size": 8})
        with database.begin() as transaction:
            transaction.studies.set_best(study_id, epoch, sample_best(study_id, config=config))
            transaction.studies.finish(study_id, epoch, StudyState.SUCCEEDED)
        response = client.get(f"/api/v1/studies/{study_id}/export", params={"format": "fsdp"})
        assert response.status_code == 422
        assert response.json()["type"] == "urn:autotune:problem:not-expressible"
        assert "stage" in response.json()["detail"]


class TestModels:
    """Models seen, with the best stored configuration of each."""

    def test_list_in_pages(self, client: TestClient, database: Database) -> None:
        for name in ("c", "a", "b/with slash"):
            queued(database, sample_request(name))
        assert [model["name"] for model in collect(client, "/api/v1/models", limit=2)] == ["a", "b/with slash", "c"]

    def test_best(self, client: TestClient, database: Database) -> None:
        succeeded(database)
        (best,) = client.get("/api/v1/models/gpt-tiny/best").json()["items"]
        assert best["tokens_per_second"] == 1000.0

    def test_seen_but_without_a_winner(self, client: TestClient, database: Database) -> None:
        queued(database, sample_request("a/b"))
        assert client.get("/api/v1/models/a/b/best").json()["items"] == []

    def test_unknown(self, client: TestClient) -> None:
        assert client.get("/api/v1/models/nothing/best").status_code == 404

    def test_a_cursor_of_another_list_is_refused(self, client: TestClient, database: Database) -> None:
        queued(database)
        queued(database)
        cursor = client.get("/api/v1/studies", params={"limit": 1}).json()["next_cursor"]
        assert client.get("/api/v1/models", params={"cursor": cursor}).status_code == 422


def test_hardware_says_who_holds_what(client: TestClient, database: Database, register_host: Any) -> None:
    from autotune.domain.hardware import Device
    from tests.support.samples import sample_hardware_profile

    register_host("box", devices=2)
    study_id, epoch = running(database)
    with database.begin() as transaction:
        transaction.leases.acquire([Device(host="box", device_type="cpu", index=1)], study_id=study_id, epoch=epoch,
                                   seconds=600)
        transaction.profiles.put_hardware(sample_hardware_profile())
    view = client.get("/api/v1/hardware").json()
    assert [(device["index"], device["study_id"]) for device in view["devices"]] == [(0, None), (1, study_id)]
    assert view["hosts"][0]["device_count"] == 2
    assert view["profiles"][0]["matmul_flops_per_second"]["fp32"] == 1e10


def test_a_study_that_cannot_be_read_says_so_and_leaves_the_list_working(
        client: TestClient, database: Database) -> None:
    readable, spoilt = queued(database), queued(database)
    with database.begin() as transaction:
        transaction.studies._connection.execute(
            text("UPDATE studies SET request = '{}' WHERE id = :id"), {"id": spoilt})
    assert [item["id"] for item in client.get("/api/v1/studies").json()["items"]] == [readable]
    response = client.get(f"/api/v1/studies/{spoilt}")
    assert response.status_code == 500
    assert response.json()["type"] == "urn:autotune:problem:unreadable"
    assert "request is not valid (name: Field required)" in response.json()["detail"]
