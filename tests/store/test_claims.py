"""Claims by real processes that compete: each study and each device has one owner."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from autotune.domain.hardware import Device
from autotune.domain.study import StudyState
from autotune.store import Database
from tests.support.samples import sample_request

PROCESSES, STUDIES, DEVICES = 6, 60, 4


def _claim_all(url: str, barrier: Any, results: Any) -> None:
    """Claim until nothing is left; take a device for each study, and note whom it was taken from."""
    try:
        database = Database(url)
        claims, together = [], 0
        barrier.wait(timeout=60)
        while True:
            with database.begin() as tx:
                study = tx.studies.claim(str(os.getpid()), lease_seconds=600, max_devices=1)
                waiting = tx.studies.count()[StudyState.QUEUED]
                if study is not None:
                    claims.append((study.id, study.lease_epoch))
            if study is None:
                if not waiting:
                    break
                continue
            device = Device(host="here", device_type="cpu", index=len(claims) % DEVICES)
            with database.begin() as tx:
                taken = tx.leases.acquire([device], study_id=study.id, epoch=1, seconds=600)
            if taken:
                with database.read() as tx:
                    holders = [lease.study_id for lease in tx.leases.live() if lease.device == device]
                together += holders != [study.id]
                with database.begin() as tx:
                    tx.leases.release(study.id)
        database.close()
        results.put(("ok", claims, together))
    except Exception as error:  # noqa: BLE001 - reported to the test
        results.put((repr(error), [], 0))


def test_competing_processes_never_claim_the_same_study_or_device(new_url: Callable[[], str]) -> None:
    url = new_url()
    database = Database(url)
    database.upgrade()
    with database.begin() as tx:
        ids = [tx.studies.add(sample_request(f"study-{number}")).id for number in range(STUDIES)]
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(PROCESSES), spawn.Queue()
    processes = [spawn.Process(target=_claim_all, args=(url, barrier, results)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    verdicts = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    results.close()
    results.join_thread()
    assert [verdict[0] for verdict in verdicts] == ["ok"] * PROCESSES
    assert sorted(claim for verdict in verdicts for claim in verdict[1]) == sorted((study, 1) for study in ids)
    assert sum(verdict[2] for verdict in verdicts) == 0, "a device had two holders"
    database.close()


def _submit(url: str, barrier: Any, results: Any) -> None:
    try:
        database = Database(url)
        barrier.wait(timeout=60)
        with database.begin() as tx:
            results.put(tx.studies.add(sample_request(), idempotency_key="same").id)
        database.close()
    except Exception as error:  # noqa: BLE001 - reported to the test
        results.put(repr(error))


def test_one_key_from_many_processes_makes_one_study(new_url: Callable[[], str]) -> None:
    url = new_url()
    database = Database(url)
    database.upgrade()
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(PROCESSES), spawn.Queue()
    processes = [spawn.Process(target=_submit, args=(url, barrier, results)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    ids = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(timeout=60)
    results.close()
    results.join_thread()
    with database.read() as tx:
        assert ids == {study.id for study in tx.studies.page().items}
        assert len(ids) == 1
    database.close()
