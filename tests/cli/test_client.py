"""The client's stream of events, over broken connections."""

import itertools
import threading
from pathlib import Path

import pytest

from autotune.client import Client, RefusedError, UnauthorizedError, UnreachableError
from autotune.domain.study import Event, EventKind, StudyState
from autotune.store import Database
from tests.service.stories import queued, running
from tests.support.samples import sample_request
from tests.support.service import RunningService, running_service


def test_nothing_is_lost_or_doubled_when_the_service_is_killed_and_comes_back(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/autotune.sqlite3")
    with running_service(tmp_path, "--no-scheduler") as first:
        study_id, epoch = running(database)
        seen: list[Event] = []
        arrived = threading.Event()

        def follow() -> None:
            with first.client() as client:
                for event in client.events(study_id):
                    seen.append(event)
                    arrived.set()

        follower = threading.Thread(target=follow)
        follower.start()
        assert arrived.wait(30)
        append(database, study_id, range(3))
        first.kill()
    append(database, study_id, range(3, 6))
    with running_service(tmp_path, "--no-scheduler", token=first.token, port=first.port):
        append(database, study_id, range(6, 9))
        with database.begin() as transaction:
            transaction.studies.finish(study_id, epoch, StudyState.SUCCEEDED)
        follower.join(timeout=60)
    assert not follower.is_alive()
    assert [event.data["step"] for event in seen if event.kind is EventKind.TRIAL_PROGRESS] == list(range(9))
    assert [event.id for event in seen] == sorted({event.id for event in seen})
    assert seen[-1].data["state"] == "succeeded"
    database.close()


def append(database: Database, study_id: str, steps: range) -> None:
    for step in steps:
        with database.begin() as transaction:
            transaction.events.append(study_id, EventKind.TRIAL_PROGRESS, {"number": 0, "step": step})


def test_a_service_that_stays_away_is_given_up(service: RunningService, database: Database) -> None:
    study_id = queued(database)
    with Client("http://127.0.0.1:1", "x") as client, pytest.raises(UnreachableError, match="cannot reach"):
        next(iter(client.events(study_id, give_up_seconds=0.1)))


def test_a_refusal_is_not_retried(service: RunningService) -> None:
    with service.client() as client, pytest.raises(RefusedError) as caught:
        next(iter(client.events("0" * 32)))
    assert caught.value.status == 404
    assert caught.value.problem["type"] == "urn:autotune:problem:not-found"


def test_a_wrong_token_is_told(service: RunningService) -> None:
    with Client(service.url, "wrong") as client, pytest.raises(UnauthorizedError):
        client.submit(sample_request())


def test_lists_are_read_to_their_end(service: RunningService, database: Database) -> None:
    ids = [queued(database, sample_request("many")) for _ in range(205)]
    with service.client() as client:
        assert [study.id for study in client.studies(model="many")] == ids[::-1]
        assert len(list(itertools.islice(client.studies(model="many"), 3))) == 3


def test_submitting_gives_the_study(service: RunningService) -> None:
    with service.client() as client:
        study = client.submit(sample_request("from-a-client"), idempotency_key="k-1")
        assert client.submit(sample_request("from-a-client"), idempotency_key="k-1").id == study.id
        assert client.study(study.id).request == sample_request("from-a-client")
        assert client.cancel(study.id).state is StudyState.CANCELLED
        client.delete(study.id)
        with pytest.raises(RefusedError):
            client.study(study.id)
