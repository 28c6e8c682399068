"""Studies on this machine's cores: real worker processes, the real engine, the real sampler in its own process."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from autotune.domain.study import StudyState
from autotune.scheduler.launcher.local import LocalLauncher
from autotune.scheduler.loop import Scheduler
from autotune.store import Database
from engine.report import Outcome
from tests.support.scheduling import finished, in_loop, study_of, submit, trials_of, until

QUICK_POLICY = {"max_warmup_steps": 2, "min_steps": 2, "max_steps": 3}
RANKS = min(2, len(os.sched_getaffinity(0)))


def workers() -> set[int]:
    """Process ids of this process's worker ranks."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if b"engine.worker" in command and parent == os.getpid():
            found.add(int(folder.name))
    return found


@in_loop
async def test_a_study_of_the_real_engine_ends_with_a_measured_winner(database: Database) -> None:
    study = submit(
        database, hardware={"device": "cpu", "devices": RANKS}, budget={"max_trials": 4, "max_seconds": 300},
        search={"sampler": "tpe", "space": {"zero_stage": [0, 1, 2], "micro_batch_size": [1, 2, 4]},
                "finalists": 2, "confirm_rounds": 1, "policy": QUICK_POLICY})
    stop = asyncio.Event()
    working = asyncio.create_task(Scheduler(database, LocalLauncher(device_type="cpu")).run(stop))
    ended = await finished(database, study)
    stop.set()
    await working
    assert (ended.state, ended.error) == (StudyState.SUCCEEDED, None)
    assert ended.note is not None
    assert ended.note.startswith("budget of 4 trials spent")
    trials = trials_of(database, study)
    assert [trial.outcome for trial in trials] == [Outcome.OK] * 4
    assert len({trial.config for trial in trials}) == 4
    assert all(trial.config.global_batch_size(RANKS) == 8 for trial in trials)
    assert ended.best is not None
    assert ended.best.model_profile.parameters > 0
    assert ended.best.hardware_profile.world_size == RANKS
    assert sum(bool(trial.repeats) for trial in trials) >= 2
    assert workers() == set()


@in_loop
async def test_cancelling_ends_real_workers_within_seconds(database: Database) -> None:
    study = submit(
        database, hardware={"device": "cpu", "devices": RANKS}, budget={"max_trials": 4, "max_seconds": 300},
        search={"sampler": "random", "space": {"micro_batch_size": [1, 2, 4]},
                "policy": {"max_warmup_steps": 8, "min_steps": 100_000, "max_steps": 100_000}})
    stop = asyncio.Event()
    working = asyncio.create_task(Scheduler(database, LocalLauncher(device_type="cpu")).run(stop))
    await until(lambda: len(trials_of(database, study)) == 1)
    assert len(workers()) == RANKS
    with database.begin() as tx:
        tx.studies.request_cancel(study.id)
    asked_at = time.monotonic()
    await until(lambda: study_of(database, study).state is StudyState.CANCELLED)
    assert time.monotonic() - asked_at < 5
    assert workers() == set()
    with database.read() as tx:
        assert tx.leases.live() == ()
    stop.set()
    await working


@in_loop
async def test_a_task_that_raises_fails_its_study_with_the_exception(
        database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_ALLOWED_TASKS", "tests.support.failing_tasks")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    study = submit(database, model={"kind": "python", "entry_point": "tests.support.failing_tasks:refuses"})
    stop = asyncio.Event()
    working = asyncio.create_task(Scheduler(database, LocalLauncher(device_type="cpu")).run(stop))
    ended = await finished(database, study)
    stop.set()
    await working
    assert ended.state is StudyState.FAILED
    assert ended.error is not None
    assert "ValueError: bad arg" in ended.error
