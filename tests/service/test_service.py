"""The application as a whole: errors of every kind, health, metrics, documentation."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from autotune.service.queries import Queries
from autotune.settings import Settings
from autotune.store import Database
from engine.report import Outcome
from tests.service.conftest import TOKEN
from tests.service.stories import queued, running, succeeded
from tests.support.samples import sample_failure


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/api/v1/nothing", 404), ("GET", "/api/v2/studies", 404), ("PUT", "/api/v1/studies", 405),
    ("DELETE", "/api/v1/hardware", 405), ("POST", "/healthz", 405), ("TRACE", "/api/v1/studies", 405)])
def test_unknown_paths_and_methods_are_problems(client: TestClient, method: str, path: str, status: int) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["status"] == status
    assert ("allow" in response.headers) is (status == 405)


def test_a_refused_method_is_told_all_that_the_path_has(client: TestClient) -> None:
    assert client.put("/api/v1/studies").headers["allow"] == "GET, POST"
    assert client.put(f"/api/v1/studies/{'0' * 32}").headers["allow"] == "DELETE, GET"


def test_a_bug_is_answered_without_internals(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(Queries, "hardware", fail)
    response = client.get("/api/v1/hardware")
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert "secret" not in response.text
    assert "RuntimeError" not in response.text


def test_readiness_follows_the_database(anonymous: TestClient, database: Database, app: FastAPI,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.domain.errors import StoreUnavailableError

    def unreachable(_: Database) -> None:
        raise StoreUnavailableError("cannot use the database postgresql://inner-host/x")

    assert anonymous.get("/readyz").json() == {"status": "ready"}
    monkeypatch.setattr(Database, "check", unreachable)
    response = anonymous.get("/readyz")
    assert response.status_code == 503
    assert response.json()["type"] == "urn:autotune:problem:unavailable"
    assert "inner-host" not in response.text  # anyone may ask
    assert anonymous.get("/healthz").status_code == 200


def test_an_empty_database_is_not_ready(tmp_path: Any, make_settings: Callable[..., Settings]) -> None:
    from autotune.service.app import create_app

    database = Database(f"sqlite:///{tmp_path}/empty.sqlite3")
    with TestClient(create_app(database, make_settings()), base_url="http://127.0.0.1") as client:
        assert client.get("/readyz").status_code == 503
    database.close()


def read_metrics(client: TestClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and sorted labels."""
    text = client.get("/metrics").text
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


def test_metrics_count_what_is_in_the_store(client: TestClient, database: Database,
                                            register_host: Callable[..., None]) -> None:
    from autotune.domain.hardware import Device

    register_host(devices=2)
    succeeded(database)
    study_id, epoch = running(database, sample_failure(Outcome.CRASHED, "boom"))
    queued(database)
    with database.begin() as transaction:
        transaction.leases.acquire([Device(host="box", device_type="cpu", index=0)], study_id=study_id, epoch=epoch,
                                   seconds=600)
    found = read_metrics(client)
    for state, number in (("queued", 1), ("running", 1), ("succeeded", 1), ("failed", 0), ("cancelled", 0)):
        assert found["autotune_studies", (("state", state),)] == number
    for outcome, number in (("ok", 1), ("oom_device", 1), ("crashed", 1), ("timeout", 0)):
        assert found["autotune_trials", (("outcome", outcome),)] == number
    assert found["autotune_devices", ()] == 2
    assert found["autotune_devices_held", ()] == 1


def test_metrics_count_requests_by_route_not_by_id(client: TestClient, database: Database) -> None:
    for study_id in (queued(database), queued(database)):
        client.get(f"/api/v1/studies/{study_id}")
    client.get("/api/v1/studies/unknown")
    client.get("/nonsense")
    found = read_metrics(client)

    def count(route: str, status: str) -> float | None:
        return found.get(("autotune_http_requests_total",
                          (("method", "GET"), ("route", route), ("status", status))))

    assert count("/api/v1/studies/{study_id}", "200") == 2
    assert count("/api/v1/studies/{study_id}", "404") == 1
    assert count("unmatched", "404") == 1


def test_two_applications_keep_metrics_apart(app: FastAPI, client: TestClient, database: Database,
                                             make_settings: Callable[..., Settings]) -> None:
    from autotune.service.app import create_app

    client.get("/healthz")
    other = create_app(database, make_settings())
    with TestClient(other, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {TOKEN}"}) as second:
        assert not [key for key in read_metrics(second) if ("route", "/healthz") in key[1]]


@pytest.mark.parametrize("path", ["/api/v1/studies", "/metrics", "/"])
def test_a_database_out_of_reach_is_503_for_every_request(path: str, make_settings: Callable[..., Settings]) -> None:
    from autotune.service.app import create_app

    database = Database("postgresql://me:hidden@127.0.0.1:1/x")
    with TestClient(create_app(database, make_settings()), base_url="http://127.0.0.1") as client:
        response = client.get(path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/problem+json"
    assert "hidden" not in response.text


class TestOpenApi:
    """Every handler is documented, with the problems it may answer."""

    @pytest.fixture
    def document(self, client: TestClient) -> dict[str, Any]:
        found: dict[str, Any] = client.get("/api/v1/openapi.json").json()
        return found

    def test_every_contracted_path_is_there(self, document: dict[str, Any]) -> None:
        expected = {
            ("post", "/api/v1/studies"), ("get", "/api/v1/studies"), ("get", "/api/v1/studies/{study_id}"),
            ("post", "/api/v1/studies/{study_id}/cancel"), ("delete", "/api/v1/studies/{study_id}"),
            ("get", "/api/v1/studies/{study_id}/plan"), ("get", "/api/v1/studies/{study_id}/trials"),
            ("get", "/api/v1/studies/{study_id}/trials/{number}"),
            ("get", "/api/v1/studies/{study_id}/trials/{number}/log"), ("get", "/api/v1/studies/{study_id}/events"),
            ("get", "/api/v1/studies/{study_id}/best"), ("get", "/api/v1/studies/{study_id}/export"),
            ("get", "/api/v1/studies/{study_id}/explanation"),
            ("get", "/api/v1/models"), ("get", "/api/v1/models/{name}/best"), ("get", "/api/v1/hardware"),
            ("get", "/api/v1/clusters"),
            ("get", "/healthz"), ("get", "/readyz"), ("get", "/metrics")}
        assert {(method, path) for path, methods in document["paths"].items() for method in methods} == expected

    def test_every_handler_is_described(self, document: dict[str, Any]) -> None:
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                assert operation["summary"], (method, path)
                assert operation["description"], (method, path)
                for parameter in operation.get("parameters", []):
                    if parameter["name"] not in ("study_id", "number"):
                        assert parameter.get("description") or parameter["schema"].get("description"), parameter

    def test_problems_are_problems(self, document: dict[str, Any]) -> None:
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                for status, response in operation["responses"].items():
                    if int(status) >= 400:
                        content = response["content"]["application/problem+json"]["schema"]
                        assert content == {"$ref": "#/components/schemas/Problem"}, (method, path, status)
        assert set(document["components"]["schemas"]["Problem"]["required"]) >= {"type", "title", "status", "detail"}

    def test_every_reference_leads_somewhere(self, document: dict[str, Any]) -> None:
        references = {part.partition('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
        assert references <= set(document["components"]["schemas"])


def test_the_service_loads_no_torch() -> None:
    code = "import sys, autotune.service.app, autotune.client, autotune.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
