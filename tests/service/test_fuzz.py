"""Whatever is sent, the answer is a study or a problem that names the fault; never an unexpected error."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from autotune.service.app import create_app
from autotune.settings import Settings
from autotune.store import Database
from tests.service.conftest import BASE_URL, TOKEN
from tests.service.stories import queued
from tests.support.samples import sample_request

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats() | st.text(st.characters(), max_size=12)
    | st.sampled_from(["auto", "gpt", "vit", "python", "bf16", "fp32", "5e8", "\x00", "0", "-1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.text(st.characters(), max_size=8) | st.sampled_from(["kind", "zero_stage", "micro_batch_size", "precision"]),
        inner, max_size=3),
    max_leaves=8)

SEARCH = {"space": {"zero_stage": [0, 1]}, "baseline": {"micro_batch_size": 2}}
BODY = sample_request(search=SEARCH).model_dump(mode="json")


def paths_of(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [prefix]
    if isinstance(value, dict):
        found += [path for key, item in value.items() for path in paths_of(item, (*prefix, key))]
    return found


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    database = Database(f"sqlite:///{folder}/autotune.sqlite3")
    database.upgrade()
    app = create_app(database, Settings(data_dir=folder, token=TOKEN))
    app.state.services.auth.ensure_token()
    study_id = queued(database)
    with TestClient(app, base_url=BASE_URL, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client, study_id
    database.close()


def assert_study_or_problem(response: Any) -> None:
    if response.status_code in (200, 201):
        json.loads(response.text, parse_constant=pytest.fail)
        return
    assert 400 <= response.status_code < 500, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == response.status_code
    assert problem["detail"]


LIMITS = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@LIMITS
@given(place=st.sampled_from(paths_of(BODY)), value=JSON)
def test_one_part_of_a_submission_is_anything(fuzzed: Any, place: tuple[Any, ...], value: Any) -> None:
    client, _ = fuzzed
    body: Any = json.loads(json.dumps(BODY))
    if not place:
        body = value
    else:
        parent = body
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = value
    response = client.post("/api/v1/studies", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert_study_or_problem(response)


@LIMITS
@given(key=st.text(st.characters(), max_size=12), place=st.sampled_from(paths_of(BODY)), value=JSON)
def test_a_submission_has_another_key_anywhere(fuzzed: Any, key: str, place: tuple[Any, ...], value: Any) -> None:
    client, _ = fuzzed
    body: Any = json.loads(json.dumps(BODY))
    parent = body
    for part in place:
        parent = parent[part]
    if isinstance(parent, dict):
        parent[key] = value
    assert_study_or_problem(client.post(
        "/api/v1/studies", content=json.dumps(body), headers={"Content-Type": "application/json"}))


@LIMITS
@given(content=st.binary(max_size=60))
def test_a_body_is_any_bytes(fuzzed: Any, content: bytes) -> None:
    client, _ = fuzzed
    assert_study_or_problem(client.post("/api/v1/studies", content=content,
                                        headers={"Content-Type": "application/json"}))


@LIMITS
@given(path=st.sampled_from(["studies", "models", "studies/ID/trials", "studies/ID/plan", "studies/ID/export"]),
       name=st.sampled_from(["cursor", "limit", "state", "model", "format"]),
       value=st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.integers().map(str))
def test_a_parameter_is_anything(fuzzed: Any, path: str, name: str, value: str) -> None:
    client, study_id = fuzzed
    assert_study_or_problem(client.get(f"/api/v1/{path.replace('ID', study_id)}", params={name: value}))


@LIMITS
@given(study_id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
       rest=st.sampled_from(["", "/trials/0", "/trials/x/log", "/best"]))
def test_an_id_is_anything(fuzzed: Any, study_id: str, rest: str) -> None:
    from urllib.parse import quote

    client, _ = fuzzed
    response = client.get(f"/api/v1/studies/{quote(study_id, safe='')}{rest}")
    assert_study_or_problem(response)
