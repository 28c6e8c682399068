"""Kill the service, cancel a study, queue two: what a running system goes through."""

import time
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.live import LiveService, alive, assert_gone, live_service, study_request, wait_for

SLOW = {"max_warmup_steps": 2, "min_steps": 100_000, "max_steps": 100_000, "max_seconds": 300}
"""A trial that measures for minutes."""


def finished(trials: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {trial["number"]: trial for trial in trials if trial["state"] == "finished"}


def test_a_killed_service_loses_nothing_and_leaves_no_worker(tmp_path: Path) -> None:
    with live_service(tmp_path) as service:
        study_id = service.submit(study_request())
        service.wait_until(study_id, lambda study: study["progress"]["trials_finished"] >= 2, 120)
        wait_for(lambda: any(trial["state"] == "running" for trial in service.trials(study_id)), 30,
                 lambda: "no trial runs")
        before = finished(service.trials(study_id))
        workers = service.kill()
        assert workers, "a trial was running, so there must be workers"
        assert_gone(workers)

        service.start()
        study = service.wait_for_end(study_id)
        assert study["state"] == "succeeded", study["error"]
        trials = service.trials(study_id)
        after = finished(trials)
        for number, trial in before.items():
            kept = {name: after[number][name] for name in ("config", "outcome", "measurement", "started_at")}
            assert kept == {name: trial[name] for name in kept}
        assert [trial["number"] for trial in trials] == list(range(len(trials)))
        points = [(trial["config"]["zero_stage"], trial["config"]["micro_batch_size"]) for trial in trials]
        assert len(set(points)) == len(points)
        assert {(stage, micro) for stage in range(4) for micro in (2, 4)} <= set(points)
        assert {trial["outcome"] for trial in trials} == {"ok"}, [trial["detail"] for trial in trials]
        left = service.workers()
    assert_gone(left)


def held_devices(service: LiveService) -> list[str]:
    devices = service.get("/api/v1/hardware")["devices"]
    return [device["study_id"] for device in devices if device["study_id"] is not None]


def test_cancelling_frees_the_devices_within_seconds(tmp_path: Path) -> None:
    with live_service(tmp_path) as service:
        request = study_request()
        study_id = service.submit({**request, "search": {**request["search"], "policy": SLOW},
                                   "budget": {**request["budget"], "trial_timeout_seconds": 300}})
        wait_for(lambda: any(trial["state"] == "running" for trial in service.trials(study_id)), 120,
                 lambda: f"no trial runs: {service.study(study_id)}")
        assert held_devices(service) == [study_id] * 2
        workers = service.workers()
        assert len(workers) >= 2
        start = time.monotonic()
        assert service.http.post(f"/api/v1/studies/{study_id}/cancel").status_code in (200, 202)
        study = service.wait_until(study_id, lambda study: study["state"] == "cancelled", 5)
        wait_for(lambda: not held_devices(service), 5 - (time.monotonic() - start), lambda: "devices are still held")
        assert_gone(workers)
        assert study["finished_at"] is not None
        assert service.http.post(f"/api/v1/studies/{study_id}/cancel").status_code == 409

        # And they are usable: the next study runs to its end.
        after = service.wait_for_end(service.submit(
            study_request(search={**request["search"], "space": {"zero_stage": [0, 1]}})))
        assert after["state"] == "succeeded", after["error"]


def test_studies_queue_for_busy_devices(tmp_path: Path) -> None:
    every_device = {"device": "cpu", "devices": max(2, len(psutil.Process().cpu_affinity()))}
    batch = {"global_batch_size": 4 * every_device["devices"]}
    space = {"space": {"zero_stage": [0, 2]}}
    with live_service(tmp_path) as service:
        policy = {"sampler": "grid", "policy": study_request()["search"]["policy"], **space}
        first, second = (service.submit(study_request(name=name, training=batch, hardware=every_device, search=policy))
                         for name in ("first", "second"))
        service.wait_until(first, lambda study: study["state"] == "running", 60)
        assert service.study(second)["state"] == "queued"
        ended = [service.wait_for_end(study_id) for study_id in (first, second)]
        assert [study["state"] for study in ended] == ["succeeded"] * 2, [study["error"] for study in ended]
        spans = [sorted(trial["started_at"] for trial in service.trials(study_id)) for study_id in (first, second)]
        last_of_first = max(trial["finished_at"] for trial in service.trials(first))
        assert last_of_first <= min(spans[1])


def test_stopping_the_service_hands_the_study_to_the_next_start(tmp_path: Path) -> None:
    with live_service(tmp_path) as service:
        study_id = service.submit(study_request())
        service.wait_until(study_id, lambda study: study["progress"]["trials_finished"] >= 1, 120)
        family = service.family()
        assert service.stop() == 0
        assert not alive(family)
        service.start()
        study = service.wait_for_end(study_id)
        assert study["state"] == "succeeded", study["error"]
