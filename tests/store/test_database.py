"""Transactions, URLs and what columns keep."""

import json
import threading
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy import select, text, update

from autotune.domain.errors import ConflictError, StoreUnavailableError, UnreadableError
from autotune.store import Database
from autotune.store.tables import studies
from tests.support.samples import FakeClock, sample_request


def test_an_exception_rolls_everything_back(database: Database) -> None:
    def change_and_fail() -> None:
        with database.begin() as tx:
            tx.studies.add(sample_request())
            tx.settings.put("key", "value")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        change_and_fail()
    with database.read() as tx:
        assert tx.studies.page().items == ()
        assert tx.settings.get("key") is None
        assert tx.events.after(0) == ()


def test_a_reader_sees_one_state_while_others_write(database: Database) -> None:
    with database.read() as reader:
        assert reader.studies.page().items == ()
        with database.begin() as writer:
            study = writer.studies.add(sample_request())
        assert reader.studies.page().items == ()
    with database.read() as reader:
        assert reader.studies.page().items == (study,)


def test_times_come_back_in_utc(database: Database, clock: FakeClock) -> None:
    clock.now = datetime(2030, 6, 1, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=5)))
    with database.begin() as tx:
        study = tx.studies.add(sample_request())
    with database.read() as tx:
        stored = tx.studies.get(study.id)
    assert stored.created_at == datetime(2030, 6, 1, 7, 0, 0, 123456, tzinfo=UTC)
    assert stored.created_at.utcoffset() == timedelta(0)


def test_stored_values_are_validated_when_read(database: Database) -> None:
    with database.begin() as tx:
        study = tx.studies.add(sample_request())
    with database._writing.begin() as connection:
        broken = connection.execute(text("SELECT request FROM studies")).scalar_one()
        broken = broken if isinstance(broken, str) else json.dumps(broken)
        connection.execute(text("UPDATE studies SET request = :request"),
                           {"request": broken.replace('"global_batch_size"', '"batch"')})
    with database.read() as tx, pytest.raises(UnreadableError, match="global_batch_size"):
        tx.studies.get(study.id)


def test_writers_wait_for_each_other(database: Database) -> None:
    """Eight threads that read, then write what they read plus one: no update is lost, none fails for a lock."""
    with database.begin() as tx:
        study = tx.studies.add(sample_request())
    failures: list[BaseException] = []

    def count_up() -> None:
        try:
            for _ in range(10):
                with database.begin() as tx:
                    connection = tx.studies._connection
                    seen = connection.execute(
                        select(studies.c.lease_epoch).where(studies.c.id == study.id).with_for_update()).scalar_one()
                    connection.execute(update(studies).values(lease_epoch=seen + 1))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=count_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with database.read() as tx:
        assert tx.studies.get(study.id).lease_epoch == 80


@pytest.mark.parametrize(("url", "message"), [
    ("mysql://localhost/x", "mysql is not supported"),
    ("sqlite://", "needs a file"),
    ("sqlite:///:memory:", "needs a file"),
    ("just words", "not a URL"),
])
def test_urls_that_cannot_be_used_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Database(url)
    assert str(caught.value).startswith("database: ")


def test_an_unreachable_server_is_named_without_its_password() -> None:
    database = Database("postgresql://me:secret@127.0.0.1:1/nothing")
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1") as caught:
        database.check()
    assert "secret" not in str(caught.value)


def test_text_that_a_database_cannot_hold_is_made_storable(database: Database) -> None:
    from engine.report import Outcome
    from tests.support.samples import sample_failure
    from tests.support.studies import claimed, started

    study = claimed(database)
    trial = started(database, study)
    with database.begin() as tx:
        tx.trials.finish(study.id, 1, trial.number, sample_failure(Outcome.CRASHED, "bad \x00 byte \ud800"),
                         log="line\x00\n")
    with database.read() as tx:
        assert tx.trials.get(study.id, 0).detail == "bad \ufffd byte ?"
        assert tx.trials.log(study.id, 0) == "line\ufffd\n"


def test_tokens_are_replaced_and_verified(database: Database) -> None:
    with database.begin() as tx:
        assert not tx.tokens.verify("hash-1")
        assert tx.tokens.add_first("hash-1")
        assert not tx.tokens.add_first("hash-0"), "there is one"
        assert tx.tokens.verify("hash-1")
        tx.tokens.replace("hash-2")
    with database.read() as tx:
        assert tx.tokens.verify("hash-2")
        assert not tx.tokens.verify("hash-1")


def test_conflicts_are_the_products_own_errors(database: Database) -> None:
    with database.begin() as tx:
        tx.studies.add(sample_request(), idempotency_key="key")
    with pytest.raises(ConflictError, match="'key' was used before"), database.begin() as tx:
        tx.studies.add(sample_request("other"), idempotency_key="key")
