"""`Scheduler`: claims studies, runs them on this host's devices, and keeps what it holds."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from autotune.domain.errors import LeaseLostError, StoreUnavailableError
from autotune.domain.hardware import Device
from autotune.domain.study import Study, StudyState
from autotune.scheduler.group import GroupKeeper
from autotune.scheduler.launcher.base import Launcher
from autotune.scheduler.lease import Interruption, SchedulerPolicy, keep_lease
from autotune.scheduler.owner import Owner
from autotune.scheduler.record import Record, in_thread
from autotune.scheduler.study import StudyRun, Workplace
from autotune.scheduler.suggester import HelperSuggester, Suggester
from autotune.scheduler.verdict import Verdict
from autotune.store import Database, Transaction

_log = logging.getLogger(__name__)


class Claim(NamedTuple):
    """A study and the devices it was given."""

    study: Study
    devices: tuple[Device, ...]


class Scheduler:
    """Runs studies, several at once where devices allow, the oldest first; nobody overtakes.

    Any number of schedulers may share a database and a host: leases in the database decide who has what. Must be run
    by an event loop on the main thread, as the workers die with the thread that started them.

    Args:
        launcher: starts worker groups on this host's devices.
        owner: names this process in leases.
        suggester: proposes configurations; by default in a helper process.
    """

    def __init__(self, database: Database, launcher: Launcher, *, owner: Owner | None = None,
                 policy: SchedulerPolicy | None = None, suggester: Suggester | None = None) -> None:
        self._database = database
        self._launcher = launcher
        self._owner = owner or Owner.current(launcher.host)
        self._policy = policy or SchedulerPolicy()
        self._helper = HelperSuggester()
        self._suggester = suggester or self._helper
        self._running: dict[asyncio.Task[None], Claim] = {}
        self._reported_at: float | None = None
        self._trouble = False

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; studies under way are then left to the next scheduler, at once claimable."""
        try:
            while not stop.is_set():
                claim = await self._next_claim()
                if claim is not None:
                    task = asyncio.create_task(self._run_claimed(claim, stop))
                    self._running[task] = claim
                    task.add_done_callback(self._running.pop)
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._policy.report if self._trouble else self._policy.poll):
                        await stop.wait()
        finally:
            stop.set()
            while self._running:
                await asyncio.wait(self._running)
            await self._helper.close()

    # Claiming

    async def _next_claim(self) -> Claim | None:
        """Report this host where it is time, then claim. Trouble with the database is waited out."""
        try:
            now = asyncio.get_running_loop().time()
            if self._reported_at is None or now - self._reported_at >= self._policy.report:
                await in_thread(self._report_host)
                self._reported_at = now
            claims = tuple(self._running.values())
            claim = await in_thread(lambda: self._claim(claims))
            self._trouble = False
            return claim
        except StoreUnavailableError as error:
            _log.warning("no study could be claimed: %s", error)
        except Exception:  # noqa: BLE001 - running studies must go on, and the next look may find another state
            _log.exception("no study could be claimed")
        self._trouble = True
        return None

    def _report_host(self) -> None:
        """Say that this host is there, and free what dead processes of this host held."""
        devices = self._launcher.devices()
        with self._database.begin() as tx:
            tx.hosts.register(
                self._launcher.host, device_type=self._launcher.device_type, device_name=self._launcher.device_name,
                device_count=len(devices), device_indices=[device.index for device in devices], owner=str(self._owner))
            for lease in tx.studies.leases():
                holder = Owner.parse(lease.owner)
                if holder is not None and holder.is_dead(self._owner):
                    _log.warning("study %s: its scheduler %s is dead", lease.study_id, lease.owner)
                    tx.studies.expire_lease(lease.study_id, lease.epoch)
                    tx.leases.release(lease.study_id, lease.epoch)

    def _claim(self, running: Sequence[Claim]) -> Claim | None:
        """The next study together with its devices, or neither.

        What this process is still running is not claimed a second time, should its leases have expired because the
        machine was suspended: renewing them, or stopping, is up to `keep_lease`.
        """
        devices = self._launcher.devices()
        mine = {device for claim in running for device in claim.devices}
        try:
            with self._database.begin() as tx:
                held = mine | {lease.device for lease in tx.leases.live()}
                free = [device for device in devices if device not in held]
                study = tx.studies.claim(
                    str(self._owner), lease_seconds=self._policy.lease, max_devices=len(free),
                    total_devices=len(devices), device_type=self._launcher.device_type)
                if study is None:
                    return None
                if any(study.id == claim.study.id for claim in running):
                    raise _NotFreeError
                chosen = tuple(free[: study.request.devices_needed])
                if not tx.leases.acquire(chosen, study_id=study.id, epoch=study.lease_epoch,
                                         seconds=self._policy.lease):
                    raise _NotFreeError
        except _NotFreeError:  # nothing was written
            return None
        _log.info("study %s: claimed with %d devices", study.id, len(chosen))
        return Claim(study, chosen)

    # Running

    async def _run_claimed(self, claim: Claim, stop: asyncio.Event) -> None:
        """Run one study until it ends or must be interrupted, then settle it. Never raises."""
        study, devices = claim
        record = Record(self._database, study.id, study.lease_epoch)
        workplace = Workplace(record=record, group=GroupKeeper(self._launcher, devices), launcher=self._launcher,
                              suggester=self._suggester, policy=self._policy)
        work = asyncio.create_task(StudyRun(study, workplace).run())
        watch = asyncio.create_task(keep_lease(record, len(devices), self._policy, stop))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            interruption = None if work.done() else watch.result()
            work.cancel()
            await asyncio.wait({work})
            await workplace.group.close()  # the work closes it, but may have been cancelled while it did
            settle = self._settlement(study, work, interruption)
            watch.cancel()  # lest it find the study ended, and take the lease for lost
            await record.write(lambda tx: settle(tx, study))
        except LeaseLostError as error:
            _log.warning("study %s: left to its new owner: %s", study.id, error)
        except StoreUnavailableError as error:
            _log.warning("study %s: left until its lease expires: %s", study.id, error)
        except Exception:  # noqa: BLE001 - one study's failure must not end the others
            _log.exception("study %s: could not be settled; its lease will expire", study.id)
        finally:
            work.cancel()
            watch.cancel()
            await asyncio.wait({work, watch})

    def _settlement(self, study: Study, work: "asyncio.Task[Verdict]",
                    interruption: Interruption | None) -> Callable[[Transaction, Study], None]:
        """What is to be written at the end of the work, given how it ended."""
        if interruption is not None:
            _log.info("study %s: interrupted: %s", study.id, interruption.value)
            return {Interruption.CANCELLED: _settle_cancelled, Interruption.STOPPING: _settle_stopped,
                    Interruption.LOST: _settle_lost}[interruption]
        if work.cancelled():
            return _settle_stopped
        error = work.exception()
        if isinstance(error, LeaseLostError):
            _log.warning("study %s: %s", study.id, error)
            return _settle_lost
        if isinstance(error, StoreUnavailableError):
            _log.warning("study %s: given back: %s", study.id, error)
            return _settle_stopped
        if error is not None:
            _log.error("study %s: failed", study.id, exc_info=error)
            verdict = Verdict(state=StudyState.FAILED, error=f"internal error: {type(error).__name__}: {error}")
        else:
            verdict = work.result()
        return lambda tx, study: _settle_ended(tx, study, verdict)


class _NotFreeError(Exception):
    """The study is still being run here, or another scheduler of this host took the devices since we looked."""


def _settle_ended(tx: Transaction, study: Study, verdict: Verdict) -> None:
    tx.studies.finish(study.id, study.lease_epoch, verdict.state, error=verdict.error, note=verdict.note)
    tx.leases.release(study.id, study.lease_epoch)


def _settle_cancelled(tx: Transaction, study: Study) -> None:
    tx.studies.finish(study.id, study.lease_epoch, StudyState.CANCELLED)
    tx.leases.release(study.id, study.lease_epoch)


def _settle_stopped(tx: Transaction, study: Study) -> None:
    """The next scheduler runs the trial under way again, under the same number."""
    tx.leases.release(study.id, study.lease_epoch)
    tx.trials.discard_running(study.id, study.lease_epoch)
    tx.studies.give_back(study.id, study.lease_epoch)


def _settle_lost(tx: Transaction, study: Study) -> None:
    """The study is another's; only devices that still carry our epoch are given back."""
    tx.leases.release(study.id, study.lease_epoch)
