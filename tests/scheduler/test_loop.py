"""Claiming, sharing devices, cancelling, stopping, and surviving the death of schedulers."""

import asyncio
import signal
import subprocess
import sys
import time

import pytest
from sqlalchemy import text

from autotune.domain.errors import StoreUnavailableError
from autotune.domain.study import Progress, StudyState, TrialState
from autotune.scheduler.loop import Scheduler
from autotune.scheduler.owner import Owner
from autotune.store import Database
from engine.report import Outcome, TrialReport, TrialRequest
from tests.support.launcher import FakeLauncher, by_micro_batch
from tests.support.samples import sample_report
from tests.support.scheduling import (
    QUICK,
    DirectSuggester,
    Working,
    finished,
    in_loop,
    scheduler,
    study_of,
    submit,
    trials_of,
    until,
    until_state,
)

ONE_POINT = {"search": {"sampler": "random", "space": {"micro_batch_size": [8]}}}
THREE_POINTS = {"search": {"sampler": "random", "space": {"micro_batch_size": [1, 2, 4]}, "confirm_rounds": 0}}
DEAD_OWNER = Owner(host="here", pid=2**22 + 1, started=1, namespace=Owner.current("here").namespace)


def claim_as(database: Database, owner: str, *, seconds: float = 600.0) -> None:
    """Claim the oldest study and device 0 for another process."""
    with database.begin() as tx:
        study = tx.studies.claim(owner, lease_seconds=seconds, max_devices=1)
        assert study is not None
        assert tx.leases.acquire(FakeLauncher().devices()[:1], study_id=study.id, epoch=study.lease_epoch,
                                 seconds=seconds)


@in_loop
async def test_studies_wait_their_turn_when_devices_are_busy(database: Database) -> None:
    launcher = FakeLauncher(count=2, hold=asyncio.Event())
    first = submit(database, "first", **ONE_POINT)
    large = submit(database, "large", hardware={"device": "cpu", "devices": 2}, search=THREE_POINTS["search"])
    last = submit(database, "last", **ONE_POINT)
    async with scheduler(database, launcher):
        await launcher.trial_started.wait()
        await asyncio.sleep(0.2)
        assert [study_of(database, study).state for study in (first, large, last)] == [
            StudyState.RUNNING, StudyState.QUEUED, StudyState.QUEUED], "a free device does not let the last overtake"
        launcher.hold.set()
        for study in (first, large, last):
            assert (await finished(database, study)).state is StudyState.SUCCEEDED
    started = [study_of(database, study).started_at for study in (first, large, last)]
    assert started == sorted(started)
    assert not launcher.shared_device


@in_loop
async def test_studies_run_at_once_where_devices_allow(database: Database) -> None:
    launcher = FakeLauncher(count=2, hold=asyncio.Event())
    studies = [submit(database, name, **ONE_POINT) for name in ("first", "second", "third")]
    async with scheduler(database, launcher):
        await until(lambda: len(launcher.trials) == 2)
        with database.read() as tx:
            assert {lease.study_id for lease in tx.leases.live()} == {study.id for study in studies[:2]}
        launcher.hold.set()
        for study in studies:
            await finished(database, study)
    assert not launcher.shared_device


@in_loop
async def test_two_schedulers_of_one_host_never_share_a_device(any_database: Database) -> None:
    launcher = FakeLauncher(count=3, seconds=0.01)  # one machine: both schedulers see the same devices
    studies = [submit(any_database, f"study-{number}", **THREE_POINTS,
                      hardware={"device": "cpu", "devices": 1 + number % 2}) for number in range(8)]
    async with scheduler(any_database, launcher), scheduler(any_database, launcher):
        for study in studies:
            assert (await finished(any_database, study)).state is StudyState.SUCCEEDED
    assert not launcher.shared_device
    assert [study_of(any_database, study).lease_epoch for study in studies] == [1] * 8
    assert launcher.open_groups == set()


@in_loop
async def test_a_host_reports_its_devices(database: Database) -> None:
    async with scheduler(database, FakeLauncher(count=2)) as working:
        def hosts() -> list[str]:
            with database.read() as tx:
                return [host.owner for host in tx.hosts.list()]

        await until(lambda: hosts() == [str(working.scheduler._owner)])
        with database.read() as tx:
            (host,) = tx.hosts.list()
        assert (host.host, host.device_name, host.device_indices) == ("here", "test core", (0, 1))


@in_loop
async def test_cancelling_stops_the_trial_and_frees_the_devices(database: Database) -> None:
    launcher = FakeLauncher(hold=asyncio.Event())
    study = submit(database, **THREE_POINTS)
    async with scheduler(database, launcher):
        await launcher.trial_started.wait()
        with database.begin() as tx:
            tx.studies.request_cancel(study.id)
        asked_at = time.monotonic()
        cancelled = await until_state(database, study, StudyState.CANCELLED)
        assert time.monotonic() - asked_at < 5
        with database.read() as tx:
            assert tx.leases.live() == ()
        assert launcher.open_groups == set()
        assert launcher.trials[0].cancelled
    (trial,) = trials_of(database, study)
    assert (trial.state, trial.outcome) == (TrialState.FINISHED, Outcome.CANCELLED)
    assert cancelled.finished_at is not None


@in_loop
async def test_the_next_study_starts_when_one_is_cancelled(database: Database) -> None:
    launcher = FakeLauncher(count=1, hold=asyncio.Event())
    first, second = submit(database, "first", **ONE_POINT), submit(database, "second", **ONE_POINT)
    async with scheduler(database, launcher):
        await launcher.trial_started.wait()
        with database.begin() as tx:
            tx.studies.request_cancel(first.id)
        await until_state(database, second, StudyState.RUNNING)
        launcher.hold.set()
        assert (await finished(database, second)).state is StudyState.SUCCEEDED
    assert study_of(database, first).state is StudyState.CANCELLED


def hold_after(launcher: FakeLauncher, trials: int) -> None:
    """Let so many trials end; the next waits until `launcher.hold` is lifted."""
    def script(request: TrialRequest) -> TrialReport:
        if len(launcher.trials) == trials:
            launcher.hold = asyncio.Event()
        return by_micro_batch(request)

    launcher.script = script


@in_loop
async def test_a_stopped_scheduler_leaves_its_study_to_the_next(database: Database) -> None:
    launcher = FakeLauncher()
    hold_after(launcher, trials=1)
    study = submit(database, **THREE_POINTS)
    working = Working(database, launcher)
    await until(lambda: len(launcher.trials) == 2)
    await working.end()
    left = study_of(database, study)
    kept = trials_of(database, study)
    assert left.state is StudyState.RUNNING
    assert all(trial.state is TrialState.FINISHED for trial in kept), "the one under way is dropped"
    assert launcher.open_groups == set()
    with database.read() as tx:
        assert tx.studies.leases() == ()
        assert tx.leases.live() == ()
    launcher.hold = None
    async with scheduler(database, launcher):
        ended = await finished(database, study)
    trials = trials_of(database, study)
    assert ended.state is StudyState.SUCCEEDED
    assert ended.lease_epoch == 2
    assert trials[:len(kept)] == kept
    assert [trial.number for trial in trials] == [0, 1, 2]
    assert len({trial.config for trial in trials}) == 3
    assert ended.started_at == left.started_at


@in_loop
async def test_confirming_goes_on_where_it_stopped(database: Database) -> None:
    launcher = FakeLauncher()
    hold_after(launcher, trials=7)
    study = submit(database, search={"sampler": "random", "space": {"micro_batch_size": [1, 2, 4]}})
    working = Working(database, launcher)
    await until(lambda: len(launcher.trials) == 8)
    await working.end()
    before = {trial.number: len(trial.repeats) for trial in trials_of(database, study)}
    launcher.hold = None
    async with scheduler(database, launcher):
        ended = await finished(database, study)
    trials = trials_of(database, study)
    assert sum(before.values()) == 4, "of the fifth repeat nothing is kept"
    assert [len(trial.repeats) for trial in trials] == [2, 2, 2]
    served = [run for run in launcher.trials if run.ended_at is not None and not run.cancelled]
    assert len(served) == 3 + 6, "nothing that was recorded is measured again"
    assert ended.best is not None
    assert ended.best.confirmed


@in_loop
async def test_a_study_taken_over_is_dropped_and_late_reports_change_nothing(database: Database) -> None:
    launcher = FakeLauncher(hold=asyncio.Event())
    study = submit(database, **THREE_POINTS)
    async with scheduler(database, launcher) as working:
        await launcher.trial_started.wait()
        with database.begin() as tx:  # as if this process had been suspended for longer than its lease
            tx.studies.expire_lease(study.id, 1)
            tx.leases.release(study.id)
            assert tx.studies.claim("another process", lease_seconds=600, max_devices=9) is not None
            tx.trials.discard_running(study.id, 2)
            taken = tx.studies.get(study.id)
        launcher.hold.set()
        await until(lambda: launcher.open_groups == set())
        await asyncio.sleep(0.2)
        assert not working.task.done(), "the scheduler itself goes on"
        assert trials_of(database, study) == ()
        assert study_of(database, study) == taken
        other = submit(database, "other", **ONE_POINT)
        assert (await finished(database, other)).state is StudyState.SUCCEEDED


@in_loop
async def test_a_lost_device_stops_the_study(database: Database) -> None:
    launcher = FakeLauncher(hold=asyncio.Event())
    study = submit(database, **THREE_POINTS)
    async with scheduler(database, launcher):
        await launcher.trial_started.wait()
        with database.begin() as tx:
            tx.leases.release(study.id)
        await until(lambda: launcher.trials[0].cancelled)


@in_loop
async def test_leases_are_renewed_while_a_trial_takes_longer_than_one(database: Database) -> None:
    policy = QUICK.model_copy(update={"lease": 2.0, "renew": 0.1})
    launcher = FakeLauncher(seconds=3.0)
    study = submit(database, **ONE_POINT)
    async with scheduler(database, launcher, policy=policy), scheduler(database, launcher, policy=policy):
        ended = await finished(database, study)
    assert (ended.state, ended.lease_epoch, len(trials_of(database, study))) == (StudyState.SUCCEEDED, 1, 1)


@in_loop
async def test_studies_of_a_dead_process_of_this_host_are_taken_at_once(database: Database) -> None:
    study = submit(database, **ONE_POINT)
    claim_as(database, str(DEAD_OWNER))
    async with scheduler(database, FakeLauncher(count=1)):
        ended = await finished(database, study)
    assert (ended.state, ended.lease_epoch) == (StudyState.SUCCEEDED, 2)


@in_loop
async def test_a_study_that_ends_its_scheduler_every_time_does_not_do_so_for_ever(database: Database) -> None:
    study = submit(database, **ONE_POINT)
    for epoch in (1, 2, 3):
        claim_as(database, str(DEAD_OWNER.model_copy(update={"pid": DEAD_OWNER.pid + epoch})))
        with database.begin() as tx:
            tx.leases.release(study.id)
            tx.studies.expire_lease(study.id, epoch)
    async with scheduler(database, FakeLauncher(count=1)):
        assert "lost 3 times in a row" in ((await finished(database, study)).error or "")


@in_loop
@pytest.mark.parametrize("owner", ["what is this", str(DEAD_OWNER.model_copy(update={"host": "elsewhere"})),
                                   str(Owner.current("here"))])
async def test_studies_of_processes_that_may_live_are_left_alone(database: Database, owner: str) -> None:
    study = submit(database, **ONE_POINT)
    claim_as(database, owner)
    async with scheduler(database, FakeLauncher(count=2)):
        await asyncio.sleep(0.5)
        assert study_of(database, study).lease_epoch == 1


@in_loop
async def test_a_study_of_another_host_is_taken_when_its_lease_has_expired(database: Database) -> None:
    study = submit(database, **ONE_POINT)
    claim_as(database, "elsewhere", seconds=1.0)
    async with scheduler(database, FakeLauncher(count=1)):
        ended = await finished(database, study)
    assert (ended.state, ended.lease_epoch) == (StudyState.SUCCEEDED, 2)
    assert ended.finished_at is not None
    assert ended.started_at is not None
    assert (ended.finished_at - ended.started_at).total_seconds() > 1.0


@in_loop
async def test_a_wish_to_cancel_outlives_the_scheduler_it_was_meant_for(database: Database) -> None:
    study = submit(database, **THREE_POINTS)
    claim_as(database, str(DEAD_OWNER))
    with database.begin() as tx:
        assert tx.studies.request_cancel(study.id).state is StudyState.RUNNING
    async with scheduler(database, FakeLauncher(count=1, hold=asyncio.Event())):
        await until_state(database, study, StudyState.CANCELLED)


@in_loop
async def test_leases_that_expired_while_the_machine_slept_are_renewed_not_claimed_twice(database: Database) -> None:
    launcher = FakeLauncher(count=1, hold=asyncio.Event())
    study, waiting = submit(database, **ONE_POINT), submit(database, "waiting", **ONE_POINT)
    async with scheduler(database, launcher, policy=QUICK.model_copy(update={"renew": 1.0})):
        await launcher.trial_started.wait()
        with database.begin() as tx:
            tx.studies.expire_lease(study.id, 1)
            tx.leases.renew(study.id, 1, seconds=-1)
        await until(lambda: bool(leases(database)))
        assert study_of(database, study).lease_epoch == 1
        assert study_of(database, waiting).state is StudyState.QUEUED
        launcher.hold.set()
        for each in (study, waiting):
            assert (await finished(database, each)).state is StudyState.SUCCEEDED
    assert not launcher.shared_device


def leases(database: Database) -> list[str]:
    with database.read() as tx:
        return [lease.study_id for lease in tx.leases.live()]


@in_loop
async def test_time_spent_before_a_restart_counts_towards_the_budget(database: Database) -> None:
    study = submit(database, **THREE_POINTS, budget={"max_trials": 20, "max_seconds": 100})
    claim_as(database, str(DEAD_OWNER))
    with database.begin() as tx:
        tx.studies.set_progress(study.id, 1, Progress(elapsed_seconds=99.9))
    async with scheduler(database, FakeLauncher(count=1, seconds=0.2)):
        ended = await finished(database, study)
    assert ended.note == "budget of 100 seconds spent"
    assert len(trials_of(database, study)) == 1
    assert ended.progress.elapsed_seconds > 100


@in_loop
async def test_a_bug_in_one_study_fails_it_and_leaves_the_others(database: Database) -> None:
    def script(request: object) -> object:
        if not broken.is_set():
            broken.set()
            raise ZeroDivisionError("a bug")
        return sample_report()

    broken = asyncio.Event()
    launcher = FakeLauncher(count=1, script=script)  # type: ignore[arg-type]
    first, second = submit(database, "first", **ONE_POINT), submit(database, "second", **ONE_POINT)
    async with scheduler(database, launcher):
        failed = await finished(database, first)
        assert (await finished(database, second)).state is StudyState.SUCCEEDED
    assert (failed.state, failed.error) == (StudyState.FAILED, "internal error: ZeroDivisionError: a bug")


@in_loop
async def test_an_unreadable_study_does_not_end_the_scheduler(database: Database) -> None:
    launcher = FakeLauncher(count=2, hold=asyncio.Event())
    study = submit(database, **ONE_POINT)
    async with scheduler(database, launcher) as working:
        await launcher.trial_started.wait()
        submit(database, "spoilt")
        with database._writing.begin() as connection:
            connection.execute(text("UPDATE studies SET request = '{}' WHERE name = 'spoilt'"))
        await asyncio.sleep(0.3)
        launcher.hold.set()
        assert (await finished(database, study)).state is StudyState.SUCCEEDED
        assert not working.task.done()
        with database.begin() as tx:
            tx.studies._connection.execute(text("DELETE FROM studies WHERE name = 'spoilt'"))
        last = submit(database, "last", **ONE_POINT)
        assert (await finished(database, last)).state is StudyState.SUCCEEDED


class UnreliableDatabase(Database):
    """Cannot be reached while `down`."""

    down = False

    def begin(self):  # type: ignore[no-untyped-def]
        if self.down:
            raise StoreUnavailableError("down")
        return super().begin()

    def read(self):  # type: ignore[no-untyped-def]
        if self.down:
            raise StoreUnavailableError("down")
        return super().read()


@in_loop
async def test_a_database_that_goes_away_for_a_while_costs_at_most_the_trial_under_way(database: Database) -> None:
    unreliable = UnreliableDatabase(database._url.render_as_string(hide_password=False))
    launcher = FakeLauncher(hold=asyncio.Event())
    study = submit(database, **THREE_POINTS)
    policy = QUICK.model_copy(update={"lease": 1.0, "renew": 0.1})
    async with scheduler(unreliable, launcher, policy=policy):
        await launcher.trial_started.wait()
        unreliable.down = True
        hold, launcher.hold = launcher.hold, None
        hold.set()
        await until(lambda: launcher.open_groups == set())
        await asyncio.sleep(0.2)
        unreliable.down = False
        ended = await finished(database, study)
    assert ended.state is StudyState.SUCCEEDED
    assert [trial.number for trial in trials_of(database, study)] == [0, 1, 2]
    unreliable.close()


@in_loop
async def test_a_short_outage_does_not_disturb_a_trial(database: Database) -> None:
    unreliable = UnreliableDatabase(database._url.render_as_string(hide_password=False))
    launcher = FakeLauncher(hold=asyncio.Event())
    study = submit(database, **ONE_POINT)
    async with scheduler(unreliable, launcher):
        await launcher.trial_started.wait()
        await asyncio.sleep(0.3)
        unreliable.down = True
        await asyncio.sleep(0.5)
        unreliable.down = False
        launcher.hold.set()
        ended = await finished(database, study)
    assert (ended.state, ended.lease_epoch) == (StudyState.SUCCEEDED, 1)
    unreliable.close()


_VICTIM = """
import asyncio, sys
from autotune.scheduler.loop import Scheduler
from autotune.store import Database
from tests.support.launcher import FakeLauncher, by_micro_batch
from tests.support.scheduling import QUICK, DirectSuggester

trials = 0

def script(request):
    global trials
    trials += 1
    if trials == 3:
        launcher.hold = asyncio.Event()  # the next one never ends
    return by_micro_batch(request)

async def main():
    global launcher
    launcher = FakeLauncher(script=script, count=1)
    await Scheduler(Database(sys.argv[1]), launcher, policy=QUICK, suggester=DirectSuggester()).run(asyncio.Event())

asyncio.run(main())
"""


@in_loop
async def test_a_killed_scheduler_costs_nothing_but_the_trial_under_way(any_database: Database) -> None:
    study = submit(any_database, budget={"max_trials": 6, "max_seconds": 600})
    url = any_database._url.render_as_string(hide_password=False)
    victim = subprocess.Popen([sys.executable, "-c", _VICTIM, url])
    try:
        await until(lambda: [trial.state for trial in trials_of(any_database, study)] == [
            *[TrialState.FINISHED] * 3, TrialState.RUNNING])
        victim.send_signal(signal.SIGKILL)
    finally:
        victim.kill()
        victim.wait()
    kept = trials_of(any_database, study)[:3]
    killed_at = time.monotonic()
    async with scheduler(any_database, FakeLauncher(count=1)):
        await until(lambda: study_of(any_database, study).lease_epoch == 2)
        assert time.monotonic() - killed_at < QUICK.lease, "its death is seen, the lease need not run out"
        ended = await finished(any_database, study)
    trials = trials_of(any_database, study)
    assert ended.state is StudyState.SUCCEEDED
    assert trials[:3] == tuple(trial.model_copy(update={"repeats": after.repeats})
                               for trial, after in zip(kept, trials[:3], strict=True))
    assert [trial.number for trial in trials] == list(range(6))
    assert len({trial.config for trial in trials}) == 6
    assert {trial.outcome for trial in trials} == {Outcome.OK}


@in_loop
async def test_the_search_goes_on_after_a_kill_as_if_nothing_had_happened(database: Database) -> None:
    """Same seed, same history, same suggestions: a killed study tries the same configurations as an undisturbed one."""
    undisturbed, again = submit(database, "undisturbed"), submit(database, "again")
    launcher = FakeLauncher(count=1)
    async with scheduler(database, launcher):
        await finished(database, undisturbed)
        await finished(database, again)
    disturbed = submit(database, "disturbed")
    with database.begin() as tx:
        tx.studies.claim(str(DEAD_OWNER), lease_seconds=600, max_devices=1)
        for trial in tx.trials.list(undisturbed.id)[:2]:
            tx.trials.start(disturbed.id, 1, role=trial.role, config=trial.config, prediction=trial.prediction)
            tx.trials.finish(disturbed.id, 1, trial.number, sample_report().model_copy(update={
                "measurement": trial.measurement}), log="")
        third = tx.trials.list(undisturbed.id)[2]
        tx.trials.start(disturbed.id, 1, role=third.role, config=third.config, prediction=third.prediction)
    async with scheduler(database, launcher):
        await finished(database, disturbed)
    tried = [[trial.config for trial in trials_of(database, study)] for study in (undisturbed, again, disturbed)]
    assert tried[0] == tried[1] == tried[2]


def test_a_scheduler_names_its_process(database: Database) -> None:
    made = Scheduler(database, FakeLauncher(), suggester=DirectSuggester())
    assert Owner.parse(str(made._owner)) == Owner.current("here")
