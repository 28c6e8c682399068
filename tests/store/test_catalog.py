"""Best configurations, profiles, hosts and device leases."""

from datetime import timedelta

import pytest
from sqlalchemy import text

from autotune.domain.errors import NotFoundError
from autotune.domain.hardware import Device
from autotune.domain.study import StudyState
from autotune.store import Database
from tests.support.samples import (
    START,
    FakeClock,
    sample_best,
    sample_hardware_profile,
    sample_model_profile,
    sample_request,
)
from tests.support.studies import claimed


def cores(*indices: int, host: str = "here") -> list[Device]:
    return [Device(host=host, device_type="cpu", index=index) for index in indices]


def test_the_fastest_is_stored_per_model_training_and_hardware(database: Database) -> None:
    slow = sample_best("1" * 32, tokens_per_second=900.0)
    fast = sample_best("2" * 32, tokens_per_second=1100.0, created_at=START + timedelta(hours=1))
    later = sample_best("3" * 32, tokens_per_second=1000.0, created_at=START + timedelta(hours=2))
    other_hardware = sample_best("4" * 32, hardware_fingerprint="hardware-2", tokens_per_second=10.0)
    other_training = sample_best("5" * 32, training_fingerprint="training-2", tokens_per_second=20.0)
    other_model = sample_best("6" * 32, model_name="vit")
    with database.begin() as tx:
        for best in (slow, fast, later, other_hardware, other_training, other_model):
            tx.best.put(best)
        assert {best.study_id for best in tx.best.for_model("gpt-tiny")} == {
            fast.study_id, other_hardware.study_id, other_training.study_id}
        assert tx.best.for_model("gpt-tiny")[0] == fast, "the latest first"
        assert tx.best.for_model("vit") == (other_model,)
        assert tx.best.for_model("unknown") == ()
        assert tx.best.get(slow.study_id) == slow


def test_a_study_stores_one_best(database: Database) -> None:
    with database.begin() as tx:
        tx.best.put(sample_best(tokens_per_second=1.0))
        tx.best.put(sample_best(tokens_per_second=0.5))
        assert [best.tokens_per_second for best in tx.best.for_model("gpt-tiny")] == [0.5]
        with pytest.raises(NotFoundError):
            tx.best.get("f" * 32)


def test_models_are_summarised(database: Database, clock: FakeClock) -> None:
    with database.begin() as tx:
        tx.studies.add(sample_request("b"))
    clock.advance(60)
    with database.begin() as tx:
        tx.studies.add(sample_request("b"))
        tx.best.put(sample_best("1" * 32, model_name="b", tokens_per_second=10.0))
        tx.best.put(sample_best("2" * 32, model_name="b", hardware_fingerprint="h2", tokens_per_second=20.0))
        tx.best.put(sample_best("3" * 32, model_name="a"))
        models = tx.best.models()
    assert [(model.name, model.kind, model.studies, model.best_configs, model.best_tokens_per_second)
            for model in models] == [("a", "gpt", 0, 1, 1000.0), ("b", "gpt", 2, 2, 20.0)]
    assert models[1].last_study_at == clock.now
    assert models[0].last_study_at is None


def test_profiles_are_found_by_key(database: Database, clock: FakeClock) -> None:
    with database.begin() as tx:
        assert tx.profiles.model("model-1") is None
        assert tx.profiles.hardware("key") is None
        tx.profiles.put_model(sample_model_profile())
        tx.profiles.put_hardware(sample_hardware_profile(), key="key")
        clock.advance(1)
        tx.profiles.put_hardware(sample_hardware_profile("hardware-2"), key="key-2")
        tx.profiles.put_hardware(sample_hardware_profile(memory_bytes=5), key="key")
    with database.read() as tx:
        assert tx.profiles.model("model-1") == sample_model_profile()
        assert tx.profiles.hardware("key") == sample_hardware_profile(memory_bytes=5)
        assert tx.profiles.hardware("hardware-1") is None
        assert [profile.fingerprint for profile in tx.profiles.list_hardware()] == ["hardware-1", "hardware-2"]


def test_what_cannot_be_read_is_as_if_it_were_not_there(database: Database) -> None:
    with database.begin() as tx:
        tx.profiles.put_model(sample_model_profile())
        tx.profiles.put_hardware(sample_hardware_profile(), key="key")
        tx.best.put(sample_best())
        for table, column in (("model_profiles", "profile"), ("hardware_profiles", "profile"),
                              ("best_configs", "best")):
            tx.best._connection.execute(text(f"UPDATE {table} SET {column} = '{{}}'"))
    with database.read() as tx:
        assert tx.profiles.model("model-1") is None
        assert tx.profiles.hardware("key") is None
        assert tx.profiles.list_hardware() == ()
        assert tx.best.for_model("gpt-tiny") == tx.best.models() == ()
        with pytest.raises(NotFoundError, match="can be read"):
            tx.best.get(sample_best().study_id)


def test_hosts_report_that_they_are_there(database: Database, clock: FakeClock) -> None:
    with database.begin() as tx:
        tx.hosts.register("b", device_type="cpu", device_name="cores", device_count=2, owner="o")
        tx.hosts.register("a", device_type="cuda", device_name="H200", device_count=8, owner="o")
        clock.advance(5)
        tx.hosts.register("b", device_type="cpu", device_name="cores", device_count=4, owner="o2",
                          device_indices=[2, 3, 6, 7])
    with database.read() as tx:
        hosts = tx.hosts.list()
    assert [(host.host, host.device_type, host.device_count, host.owner) for host in hosts] == [
        ("a", "cuda", 8, "o"), ("b", "cpu", 4, "o2")]
    assert [host.device_indices for host in hosts] == [tuple(range(8)), (2, 3, 6, 7)]
    assert hosts[1].last_seen_at == clock.now == hosts[0].last_seen_at + timedelta(seconds=5)


def test_devices_are_taken_all_or_none(database: Database) -> None:
    first, second = claimed(database, name="first"), claimed(database, name="second")
    with database.begin() as tx:
        assert tx.leases.acquire(cores(1), study_id=first.id, epoch=1, seconds=10)
    with database.begin() as tx:
        assert not tx.leases.acquire(cores(0, 1, 2), study_id=second.id, epoch=1, seconds=10)
        assert tx.leases.acquire(cores(1, host="elsewhere"), study_id=second.id, epoch=1, seconds=10)
    with database.read() as tx:
        assert [(lease.device, lease.study_id) for lease in tx.leases.live()] == [
            (cores(1, host="elsewhere")[0], second.id), (cores(1)[0], first.id)]


def test_a_transaction_survives_a_refusal(database: Database) -> None:
    first, second = claimed(database, name="first"), claimed(database, name="second")
    with database.begin() as tx:
        tx.leases.acquire(cores(0), study_id=first.id, epoch=1, seconds=10)
        assert not tx.leases.acquire(cores(0), study_id=second.id, epoch=1, seconds=10)
        tx.settings.put("after", "refusal")
    with database.read() as tx:
        assert tx.settings.get("after") == "refusal"
        assert len(tx.leases.live()) == 1


def test_devices_come_free_when_released_or_expired(database: Database, clock: FakeClock) -> None:
    first, second = claimed(database, name="first"), claimed(database, name="second")
    with database.begin() as tx:
        tx.leases.acquire(cores(0, 1), study_id=first.id, epoch=1, seconds=10)
    clock.advance(8)
    with database.begin() as tx:
        assert tx.leases.renew(first.id, 1, seconds=10) == 2
    clock.advance(8)
    with database.begin() as tx:
        assert not tx.leases.acquire(cores(0), study_id=second.id, epoch=1, seconds=10)
    clock.advance(3)
    with database.begin() as tx:
        assert tx.leases.live() == ()
        assert tx.leases.acquire(cores(0), study_id=second.id, epoch=1, seconds=10)
        assert tx.leases.renew(first.id, 1, seconds=10) == 1, "one of two is lost"
        assert tx.leases.release(first.id) == 1
        assert [lease.study_id for lease in tx.leases.live()] == [second.id]


def test_a_new_epoch_takes_over_its_own_studys_devices(database: Database) -> None:
    study = claimed(database)
    with database.begin() as tx:
        assert tx.leases.acquire(cores(0), study_id=study.id, epoch=1, seconds=10)
        assert not tx.leases.acquire(cores(0), study_id=study.id, epoch=1, seconds=10)
        assert tx.leases.acquire(cores(0), study_id=study.id, epoch=2, seconds=10)
        assert tx.leases.release(study.id, 1) == 0
        assert tx.leases.renew(study.id, 1, seconds=10) == 0
        assert tx.leases.release(study.id, 2) == 1


def test_leases_end_with_their_study(database: Database) -> None:
    study = claimed(database)
    with database.begin() as tx:
        tx.leases.acquire(cores(0), study_id=study.id, epoch=1, seconds=10)
        tx.studies.finish(study.id, 1, StudyState.CANCELLED)
        tx.studies.delete(study.id)
        assert tx.leases.live() == ()
