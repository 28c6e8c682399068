"""Submitting: what is taken, and what is refused at once with the field named."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from autotune.domain.errors import InvalidRequestError
from autotune.service.app import create_app
from autotune.service.fields import parse_request
from autotune.settings import Settings
from autotune.store import Database
from tests.service.conftest import BASE_URL, TOKEN

JSON = {"Content-Type": "application/json"}


def problems_of(response: Any, status: int = 422) -> dict[str, str]:
    """Messages by field, of a problem with this status."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    assert problem["type"].startswith("urn:autotune:problem:")
    return {error["field"]: error["message"] for error in problem["errors"]}


def with_change(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The body with one field set, made where it is missing."""
    changed: dict[str, Any] = json.loads(json.dumps(body))
    *parents, name = path.split(".")
    place = changed
    for parent in parents:
        place = place.setdefault(parent, {})
    place[name] = value
    return changed


def test_a_study_is_queued_and_found_at_its_location(client: TestClient, body: dict[str, Any]) -> None:
    response = client.post("/api/v1/studies", json=body)
    assert response.status_code == 201
    study = response.json()
    assert (study["name"], study["state"], study["phase"], study["best"]) == ("gpt-tiny", "queued", None, None)
    assert study["request"]["training"]["global_batch_size"] == 8
    assert study["created_at"].endswith("Z")
    assert response.headers["location"] == f"/api/v1/studies/{study['id']}"
    assert client.get(response.headers["location"]).json() == study


def test_the_documented_example_is_valid(client: TestClient) -> None:
    document = client.get("/api/v1/openapi.json").json()
    content = document["paths"]["/api/v1/studies"]["post"]["requestBody"]["content"]["application/json"]
    assert client.post("/api/v1/studies", json=content["examples"]["gpt"]["value"]).status_code == 201


def test_a_plan_needs_no_devices_here(client: TestClient, body: dict[str, Any], database: Database) -> None:
    with database.begin() as transaction:
        transaction.hosts.register("here", device_type="cpu", device_name="core", device_count=1, device_indices=[0],
                                   owner="someone")
    plan = {**body, "mode": "plan", "training": {"global_batch_size": 64}, "search": {},
            "hardware": {"devices": 64, "cluster": "h200-141gb"}}
    assert client.post("/api/v1/studies", json=plan).status_code == 201
    unknown = client.post("/api/v1/studies", json=with_change(plan, "hardware.cluster", "b300"))
    assert "give one of a100-40gb" in problems_of(unknown)["hardware.cluster"]
    described = client.get("/api/v1/clusters").json()["items"][0]
    assert client.post("/api/v1/studies", json=with_change(plan, "hardware.cluster", described)).status_code == 201
    described["links"]["intra_bytes_per_second"] = 0
    wrong = client.post("/api/v1/studies", json=with_change(plan, "hardware.cluster", described))
    assert problems_of(wrong).keys() == {"hardware.cluster.links.intra_bytes_per_second"}
    degrees = client.post("/api/v1/studies", json=with_change(plan, "hardware.tensor_parallel", [3]))
    assert "does not stay inside a node" in problems_of(degrees)["hardware.tensor_parallel"]
    without = {**plan, "hardware": {"devices": 64}}
    assert "hardware.cluster" in problems_of(client.post("/api/v1/studies", json=without))["mode"]
    tuned = {**plan, "mode": "tune"}
    assert "give both or neither" in problems_of(client.post("/api/v1/studies", json=tuned))["mode"]


@pytest.mark.parametrize("character", ["\x1b", "\x7f", "\x85", "\x9b"])
def test_a_name_holds_nothing_that_steers_a_terminal(client: TestClient, body: dict[str, Any], character: str) -> None:
    assert "name" in problems_of(client.post("/api/v1/studies", json={**body, "name": f"a{character}31mb"}))


@pytest.mark.parametrize("size", [{"image_size": 2**14, "patch_size": 1}, {"image_size": 1024, "channels": 4096}])
def test_an_image_of_gigabytes_is_refused_before_one_is_made(
        client: TestClient, body: dict[str, Any], size: dict[str, int]) -> None:
    found = problems_of(client.post("/api/v1/studies", json={**body, "model": {"kind": "vit", **size}}))
    assert "values in an image are out of range" in found["model.image_size"]


@pytest.mark.parametrize(("config", "field"), [
    ({"num_labels": 10**9}, "model.config.num_labels"),
    ({"num_hidden_layers": 10**6}, "model.config.num_hidden_layers"), ({"n_layer": 1e9}, "model.config.n_layer"),
    ({"vision_config": {"image_size": 10**6}}, "model.config.vision_config.image_size")])
def test_sizes_in_a_transformers_config_are_within_reason_too(
        client: TestClient, body: dict[str, Any], config: dict[str, Any], field: str) -> None:
    model = {"kind": "huggingface", "config": {"model_type": "llama", **config}}
    found = problems_of(client.post("/api/v1/studies", json={**body, "model": model}))
    assert "out of range" in found[field]


@pytest.mark.parametrize("path", [
    "training.seed", "training.gradient_clipping", "training.optimizer.lr", "search.finalists",
    "search.policy.min_steps", "search.policy.max_seconds", "budget.max_trials", "budget.max_seconds",
    "budget.max_device_seconds", "hardware.devices"])
def test_true_is_not_taken_for_one(client: TestClient, body: dict[str, Any], path: str) -> None:
    found = problems_of(client.post("/api/v1/studies", json=with_change(body, path, True)))
    assert "not true/false" in found[path]


@pytest.mark.parametrize(("path", "value", "field", "says"), [
    ("layers", 3, "layers", "unknown field"),
    ("trainig", {}, "trainig", "did you mean 'training'?"),
    ("model.layrs", 3, "model.layrs", "did you mean 'layers'?"),
    ("training.global_batch_sise", 3, "training.global_batch_sise", "did you mean 'global_batch_size'?"),
    ("training.optimizer", {"learning_rate": 1}, "training.optimizer.learning_rate", "did you mean 'lr'?"),
    ("model", {"kind": "gtp"}, "model.kind", "did you mean 'gpt'?"),
    ("model", {"layers": 2}, "model.kind", "give one of"),
    ("model", {"kind": "gpt", "hidden": 33, "heads": 2}, "model.hidden", "not divisible by heads 2"),
    ("model", {"kind": "huggingface", "config": {}}, "model.config", "model_type"),
    ("model", {"kind": "python", "entry_point": "no colon"}, "model.entry_point", "pattern"),
    ("training.global_batch_size", 0, "training.global_batch_size", "greater than or equal to 1"),
    ("training.global_batch_size", -8, "training.global_batch_size", "greater than or equal to 1"),
    ("training.global_batch_size", 1.5, "training.global_batch_size", "whole number, not 1.5"),
    ("training.global_batch_size", True, "training.global_batch_size", "whole number"),
    ("training.global_batch_size", "many", "training.global_batch_size", "whole number, not 'many'"),
    ("training.global_batch_size", 2**60, "training.global_batch_size", "out of range"),
    ("training.optimizer", {"name": "lion"}, "training.optimizer.name", "'adamw'"),
    ("training.optimizer", {"name": "adamw", "momentum": 0.9}, "training.optimizer.momentum", "does not apply"),
    ("training.optimizer", {"lr": -1}, "training.optimizer.lr", "greater than or equal to 0"),
    ("hardware.device", "tpu", "hardware.device", "'cuda'"),
    ("hardware.devices", 0, "hardware.devices", "greater than or equal to 1"),
    ("hardware.devices", 10**9, "hardware.devices", "out of range"),
    ("hardware.memory_limit_bytes", 0, "hardware.memory_limit_bytes", "greater than or equal to 1"),
    ("model.vocab", 10**12, "model.vocab", "out of range"),
    ("search.sampler", "bayes", "search.sampler", "'tpe'"),
    ("search.space", {"zero_stage": 3}, "search.space.zero_stage", "list"),
    ("search.space", {"zero_stage": []}, "search.space.zero_stage", "empty"),
    ("search.space", {"zero_stage": [7]}, "search.space.zero_stage", "7"),
    ("search.space", {"zero_stages": [1]}, "search.space.zero_stages", "did you mean zero_stage?"),
    ("search.space", {"gradient_accumulation_steps": [1]}, "search.space.gradient_accumulation_steps", "is no knob"),
    ("search.space", {"tensor_parallel": [2]}, "search.space.tensor_parallel", "not supported"),
    ("search.space", {"micro_batch_size": [3]}, "search.space.micro_batch_size", "3 does not divide 8"),
    ("search.space", {"reduce_bucket_size": [0]}, "search.space.reduce_bucket_size", "0"),
    ("search.space", {"reduce_bucket_size": [-1]}, "search.space.reduce_bucket_size", "-1"),
    ("search.space", {"reduce_bucket_size": [1.5]}, "search.space.reduce_bucket_size", "1.5"),
    ("search.baseline", {"zero_stag": 1}, "search.baseline.zero_stag", "did you mean 'zero_stage'?"),
    ("search.baseline", {"zero_stage": [0, 1]}, "search.baseline.zero_stage",
     "must be one integer; lists are search spaces"),
    ("budget.max_trials", 0, "budget.max_trials", "greater than or equal to 1"),
    ("budget.max_seconds", -5, "budget.max_seconds", "greater than 0"),
    ("budget.max_device_seconds", 0, "budget.max_device_seconds", "greater than 0"),
    ("name", "", "name", "at least 1 character"),
    ("name", "x" * 200, "name", "at most 120"),
])
def test_what_can_never_run_is_refused_with_the_field(
        client: TestClient, body: dict[str, Any], path: str, value: Any, field: str, says: str) -> None:
    found = problems_of(client.post("/api/v1/studies", json=with_change(body, path, value)))
    assert field in found
    assert says in found[field]
    assert client.get("/api/v1/studies").json()["items"] == []


@pytest.mark.parametrize("value", ["5e2", 5e2, 500, "500"])
def test_counts_may_be_written_as_people_write_them(client: TestClient, body: dict[str, Any], value: Any) -> None:
    response = client.post("/api/v1/studies", json=with_change(
        body, "search.space", {"reduce_bucket_size": [value], "zero_stage": [1]}))
    assert response.status_code == 201


@pytest.mark.parametrize(("changes", "field", "says"), [
    ({"training.global_batch_size": 7}, "training.global_batch_size", "7 not divisible by 2"),
    ({"training.global_batch_size": 8, "search.baseline": {"micro_batch_size": 2, "gradient_accumulation_steps": 1}},
     "search.baseline.micro_batch_size", "8 != 2*1*2"),
    ({"training.global_batch_size": 8, "search.baseline": {"micro_batch_size": 3}},
     "search.baseline.micro_batch_size", "not divisible by 6"),
    ({"search.baseline": {"offload_param": True, "zero_stage": 1}}, "search.baseline",
     "offload_param needs zero_stage 3"),
    ({"search.baseline": {"precision": "fp16", "optimizer_precision": "compute"}}, "search.baseline", "fp16"),
])
def test_batch_arithmetic_and_impossible_combinations_are_refused(
        client: TestClient, body: dict[str, Any], changes: dict[str, Any], field: str, says: str) -> None:
    body = with_change(with_change(body, "hardware.devices", 2), "search.space", {"zero_stage": [0]})
    for path, value in changes.items():
        body = with_change(body, path, value)
    found = problems_of(client.post("/api/v1/studies", json=body))
    assert any(name.startswith(field) and says in message for name, message in found.items()), found


def test_a_baseline_with_only_a_micro_batch_gets_its_accumulation(client: TestClient, body: dict[str, Any]) -> None:
    body = with_change(with_change(body, "hardware.devices", 2), "search", {
        "space": {"zero_stage": [0, 1]}, "baseline": {"micro_batch_size": 2}})
    assert client.post("/api/v1/studies", json=body).status_code == 201


def test_all_that_is_wrong_is_told_at_once(client: TestClient, body: dict[str, Any],
                                           register_host: Callable[..., None]) -> None:
    register_host(devices=2)
    body = with_change(body, "model", {"kind": "python", "entry_point": "os:system"})
    body = with_change(with_change(body, "hardware.devices", 4), "search.space", {"zero": [1], "micro_batch_size": [3]})
    assert set(problems_of(client.post("/api/v1/studies", json=body))) == {
        "model.entry_point", "hardware.devices", "search.space.zero", "search.space.micro_batch_size"}


class TestDevices:
    """More than any host has is refused; before a host is known, nothing is."""

    def test_unknown_hosts_refuse_nothing(self, client: TestClient, body: dict[str, Any]) -> None:
        body = with_change(with_change(body, "hardware.devices", 8), "search.space", {"zero_stage": [0]})
        assert client.post("/api/v1/studies", json=body).status_code == 201

    def test_the_largest_host_decides(self, client: TestClient, body: dict[str, Any],
                                      register_host: Callable[..., None]) -> None:
        register_host("small", devices=2)
        register_host("large", devices=4)
        body = with_change(body, "search.space", {"zero_stage": [0]})
        assert client.post("/api/v1/studies", json=with_change(body, "hardware.devices", 4)).status_code == 201
        found = problems_of(client.post("/api/v1/studies", json=with_change(body, "hardware.devices", 8)))
        assert found == {"hardware.devices": "8 asked for, but the largest host has 4: give at most 4"}

    def test_a_kind_that_no_host_has_is_refused(self, client: TestClient, body: dict[str, Any],
                                                register_host: Callable[..., None]) -> None:
        register_host(devices=2)
        found = problems_of(client.post("/api/v1/studies", json=with_change(body, "hardware.device", "cuda")))
        assert found == {"hardware.device": "no host has cuda devices; there are: cpu"}


class TestPythonTasks:
    """Only modules under a prefix that the operator allows, compared by whole names."""

    def submit(self, database: Database, settings: Settings, body: dict[str, Any], entry_point: str) -> Any:
        app: FastAPI = create_app(database, settings)
        app.state.services.auth.ensure_token()
        with TestClient(app, base_url=BASE_URL, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            return client.post("/api/v1/studies", json=with_change(
                body, "model", {"kind": "python", "entry_point": entry_point}))

    @pytest.mark.parametrize("entry_point", ["os:system", "mytaskss:make", "my:make", "tasks.mytasks:make"])
    def test_others_are_refused(self, database: Database, make_settings: Callable[..., Settings], body: dict[str, Any],
                                entry_point: str) -> None:
        found = problems_of(self.submit(database, make_settings(allowed_tasks="mytasks"), body, entry_point))
        assert "AUTOTUNE_ALLOWED_TASKS (now: mytasks)" in found["model.entry_point"]

    @pytest.mark.parametrize("entry_point", ["mytasks:make", "mytasks.inner:make", "team.tasks.a:make"])
    def test_those_under_a_prefix_are_taken(self, database: Database, make_settings: Callable[..., Settings],
                                            body: dict[str, Any], entry_point: str) -> None:
        settings = make_settings(allowed_tasks="mytasks, team.tasks")
        assert self.submit(database, settings, body, entry_point).status_code == 201

    def test_none_is_allowed_by_default(self, client: TestClient, body: dict[str, Any]) -> None:
        found = problems_of(client.post("/api/v1/studies", json=with_change(
            body, "model", {"kind": "python", "entry_point": "json:loads"})))
        assert "(now: none)" in found["model.entry_point"]


class TestBodies:
    """What is no JSON request at all."""

    @pytest.mark.parametrize("content", [b"{", b"{'a': 1}", b"\xff\xfe", b"[" * 50_000, b"nonsense"])
    def test_malformed_json(self, client: TestClient, content: bytes) -> None:
        problems_of(client.post("/api/v1/studies", content=content, headers=JSON), 400)

    @pytest.mark.parametrize("content", [b"[]", b"1", b'"text"', b"null", b""])
    def test_json_of_another_kind(self, client: TestClient, content: bytes) -> None:
        assert "body" in problems_of(client.post("/api/v1/studies", content=content, headers=JSON))

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
    def test_other_content_types(self, client: TestClient, body: dict[str, Any], kind: str | None) -> None:
        headers = {} if kind is None else {"Content-Type": kind}
        problems_of(client.post("/api/v1/studies", content=json.dumps(body), headers=headers), 415)

    def test_too_large(self, client: TestClient, body: dict[str, Any]) -> None:
        big = json.dumps(with_change(body, "name", "x" * (1 << 20)))
        problems_of(client.post("/api/v1/studies", content=big, headers=JSON), 413)

    def test_too_large_without_an_announced_length(self, client: TestClient) -> None:
        response = client.post("/api/v1/studies", content=(b"x" * 100_000 for _ in range(20)), headers=JSON)
        problems_of(response, 413)

    @pytest.mark.parametrize(("text", "says"), [
        ("NaN", "not a finite number"), ("1e999", "not a finite number"), ("-Infinity", "not a finite number"),
        ('"\\u0000"', "NUL"), ('"\\ud800"', "surrogate"), ("[" * 60 + "]" * 60, "nested deeper")])
    def test_values_that_python_reads_but_json_or_a_database_cannot_hold(
            self, client: TestClient, body: dict[str, Any], text: str, says: str) -> None:
        body = with_change(body, "model", {"kind": "huggingface", "config": {"model_type": "llama", "x": "HERE"}})
        response = client.post("/api/v1/studies", content=json.dumps(body).replace('"HERE"', text), headers=JSON)
        (field, message), = problems_of(response).items()
        assert field.startswith("model.config.x")
        assert says in message


class TestIdempotency:
    """The same key and body give the first study; another body is refused."""

    def test_again(self, client: TestClient, body: dict[str, Any]) -> None:
        headers = {"Idempotency-Key": "key-1"}
        first = client.post("/api/v1/studies", json=body, headers=headers)
        again = client.post("/api/v1/studies", json=body, headers=headers)
        assert again.status_code == 201
        assert again.json()["id"] == first.json()["id"]
        assert again.headers["location"] == first.headers["location"]
        assert len(client.get("/api/v1/studies").json()["items"]) == 1

    def test_another_body(self, client: TestClient, body: dict[str, Any]) -> None:
        headers = {"Idempotency-Key": "key-1"}
        client.post("/api/v1/studies", json=body, headers=headers)
        response = client.post("/api/v1/studies", json=with_change(body, "search.seed", 9), headers=headers)
        assert response.status_code == 409
        assert "key-1" in response.json()["detail"]

    def test_without_a_key_every_post_is_a_study(self, client: TestClient, body: dict[str, Any]) -> None:
        ids = {client.post("/api/v1/studies", json=body).json()["id"] for _ in range(3)}
        assert len(ids) == 3

    @pytest.mark.parametrize("key", ["", "x" * 256])
    def test_a_useless_key(self, client: TestClient, body: dict[str, Any], key: str) -> None:
        found = problems_of(client.post("/api/v1/studies", json=body, headers={"Idempotency-Key": key}))
        assert "Idempotency-Key" in found


def test_the_same_checks_serve_files_and_forms(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(with_change(with_change(body, "model.layrs", 1), "budget.max_trials", 0))
    assert {error.field for error in caught.value.errors} == {"model.layrs", "budget.max_trials"}
