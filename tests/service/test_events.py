"""The stream of events: whole, in order, resumable, and over when the study is."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from autotune.domain.errors import StoreUnavailableError
from autotune.domain.study import EventKind, StudyState
from autotune.service.queries import Queries
from autotune.store import Database
from tests.service.stories import queued, running, succeeded
from tests.support.samples import sample_report


def parse(text: str) -> list[dict[str, str]]:
    """Events of a stream as their fields; comments and bare retries left out."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            events.append(fields)
    return events


def read(client: TestClient, study_id: str, **headers: str) -> list[dict[str, str]]:
    """The whole stream of a study that has ended or will."""
    response = client.get(f"/api/v1/studies/{study_id}/events", headers=headers)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    return parse(response.text)


@contextmanager
def later(action: Any, *, seconds: float = 0.4) -> Iterator[None]:
    """Do something a little later, from another thread, and wait for it at the end."""
    def act() -> None:
        time.sleep(seconds)
        action()

    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


def test_a_finished_study_is_told_from_the_first_event_to_the_last(client: TestClient, database: Database) -> None:
    study_id = succeeded(database)
    events = read(client, study_id)
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["state", "state"]
    assert kinds.count("trial_started") == kinds.count("trial_finished") == 2
    assert "best_changed" in kinds
    assert kinds[-1] == "state"
    assert '"state":"succeeded"' in events[-1]["data"]
    ids = [int(event["id"]) for event in events]
    assert ids == sorted(set(ids))


def test_events_of_other_studies_are_left_out(client: TestClient, database: Database) -> None:
    study_id = succeeded(database)
    other = succeeded(database)
    assert all(study_id in event["data"] for event in read(client, study_id))
    assert all(other in event["data"] for event in read(client, other))


def test_a_stream_goes_on_after_the_last_event_seen(client: TestClient, database: Database) -> None:
    study_id = succeeded(database)
    whole = read(client, study_id)
    for cut in range(len(whole) - 1):
        assert read(client, study_id, **{"Last-Event-ID": whole[cut]["id"]}) == whole[cut + 1:]


def test_the_header_wins_over_the_parameter(client: TestClient, database: Database) -> None:
    study_id = succeeded(database)
    whole = read(client, study_id)
    response = client.get(f"/api/v1/studies/{study_id}/events", params={"last_event_id": whole[3]["id"]})
    assert parse(response.text) == whole[4:]
    response = client.get(f"/api/v1/studies/{study_id}/events", params={"last_event_id": whole[3]["id"]},
                          headers={"Last-Event-ID": whole[0]["id"]})
    assert parse(response.text) == whole[1:]


def test_a_browser_that_saw_the_end_is_told_not_to_come_again(client: TestClient, database: Database) -> None:
    study_id = succeeded(database)
    last = read(client, study_id)[-1]["id"]
    response = client.get(f"/api/v1/studies/{study_id}/events", headers={"Last-Event-ID": last})
    assert (response.status_code, response.content) == (204, b"")


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "9" * 30])
def test_a_malformed_last_event_id_is_refused(client: TestClient, database: Database, value: str) -> None:
    response = client.get(f"/api/v1/studies/{queued(database)}/events", headers={"Last-Event-ID": value})
    assert response.status_code == 422


def test_what_happens_while_the_stream_is_open_arrives_and_the_end_ends_it(
        client: TestClient, database: Database) -> None:
    study_id, epoch = running(database, sample_report())

    def happen() -> None:
        with database.begin() as transaction:
            transaction.events.append(study_id, EventKind.TRIAL_PROGRESS, {"number": 1, "step": 3})
        with database.begin() as transaction:
            transaction.studies.finish(study_id, epoch, StudyState.FAILED, error="boom")

    with later(happen):
        events = read(client, study_id)
    assert [event["event"] for event in events[-2:]] == ["trial_progress", "state"]
    assert '"error":"boom"' in events[-1]["data"]


def test_deleting_the_study_ends_the_stream(client: TestClient, database: Database) -> None:
    study_id = queued(database)
    last = {"Last-Event-ID": str(database_last_id(database, study_id))}

    def happen() -> None:
        with database.begin() as transaction:
            transaction.studies.request_cancel(study_id)
        with database.begin() as transaction:
            transaction.studies.delete(study_id)

    with later(happen):
        response = client.get(f"/api/v1/studies/{study_id}/events", headers=last)
    assert response.status_code == 200  # the read ended by itself


def database_last_id(database: Database, study_id: str) -> int:
    with database.read() as transaction:
        return transaction.events.last_id(study_id)


def test_the_servers_stop_ends_the_stream(app: FastAPI, client: TestClient, database: Database) -> None:
    study_id = queued(database)
    with later(app.state.services.stopping.set):
        events = read(client, study_id)
    assert [event["event"] for event in events] == ["state"]


def test_a_database_that_goes_away_ends_the_stream_in_order(
        client: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    study_id = queued(database)
    looks, events_after = 0, Queries.events_after

    def look(*arguments: Any, **named: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise StoreUnavailableError("gone")
        return events_after(*arguments, **named)

    monkeypatch.setattr(Queries, "events_after", look)
    assert [event["event"] for event in read(client, study_id)] == ["state"]


def test_a_quiet_stream_sends_comments(client: TestClient, app: FastAPI, database: Database,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastapi.routing._PING_INTERVAL", 0.05)
    looks, events_after = 0, Queries.events_after

    def look(*arguments: Any, **named: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 6:  # looks are a quarter of a second apart
            app.state.services.stopping.set()
        return events_after(*arguments, **named)

    monkeypatch.setattr(Queries, "events_after", look)
    text = client.get(f"/api/v1/studies/{queued(database)}/events").text
    assert text.startswith(": study ")
    assert "retry: 1000" in text
    assert text.count(": ping") >= 2


def test_an_open_stream_holds_no_database_connection(client: TestClient, app: FastAPI, database: Database) -> None:
    study_id = queued(database)
    checked = []

    def happen() -> None:
        for _ in range(20):
            with database.begin() as transaction:  # would wait for ever behind an open transaction
                transaction.settings.put("key", "value")
            checked.append(database._connections.pool.checkedout())  # type: ignore[attr-defined]
            time.sleep(0.02)
        app.state.services.stopping.set()

    with later(happen):
        read(client, study_id)
    assert min(checked) == 0
