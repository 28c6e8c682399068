"""A launcher whose groups answer from a script instead of training: for the scheduler's own behaviour."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune.domain.errors import LaunchError
from autotune.domain.hardware import Device
from autotune.scheduler.launcher.base import Report, ignore_progress
from engine.report import (
    CalibrateReport,
    FailureReport,
    Outcome,
    ProbeReport,
    TrialProgress,
    TrialReport,
    TrialRequest,
    WorkerRequest,
)
from tests.support.samples import sample_hardware_profile, sample_model_profile, sample_report

Script = Callable[[TrialRequest], TrialReport]


def by_micro_batch(request: TrialRequest) -> TrialReport:
    """Larger micro-batches are faster, sharding costs a little."""
    seconds = 0.1 / request.config.micro_batch_size + 0.01 * request.config.zero_stage
    return sample_report(seconds)


def never_ready() -> asyncio.Event:
    """For trials that last until they are killed."""
    return asyncio.Event()


@dataclass
class Run:
    """One request that a group served."""

    request: WorkerRequest
    devices: tuple[Device, ...]
    group: int
    deadline_seconds: float
    started_at: float
    ended_at: float | None = None
    cancelled: bool = False


@dataclass
class FakeLauncher:
    """Devices that exist in name only.

    Attributes:
        script: answers trials.
        hold: trials wait for this event before they answer.
        probe_failure: instead of a profile.
        starts_that_fail: so many starts from now on raise LaunchError.
        is_busy: other work runs beside calibrations.
        runs: everything that groups served, in order.
        open_groups: started and not closed.
    """

    script: Script = by_micro_batch
    count: int = 2
    hold: asyncio.Event | None = None
    probe_failure: FailureReport | None = None
    starts_that_fail: int = 0
    is_busy: bool = False
    seconds: float = 0.0
    runs: list[Run] = field(default_factory=list)
    started: int = 0
    open_groups: set[int] = field(default_factory=set)
    in_use: list[Device] = field(default_factory=list)
    shared_device: bool = False
    trial_started: asyncio.Event = field(default_factory=asyncio.Event)
    host: str = "here"
    device_type: str = "cpu"
    device_name: str = "test core"

    def devices(self) -> tuple[Device, ...]:
        return tuple(Device(host=self.host, device_type="cpu", index=index) for index in range(self.count))

    async def start(self, devices: Sequence[Device]) -> "FakeGroup":
        if self.starts_that_fail:
            self.starts_that_fail -= 1
            raise LaunchError("no room for workers")
        self.shared_device |= any(device in self.in_use for device in devices)
        self.in_use.extend(devices)
        self.started += 1
        self.open_groups.add(self.started)
        return FakeGroup(self, tuple(devices), self.started)

    @property
    def trials(self) -> list[Run]:
        return [run for run in self.runs if run.request.kind == "trial"]


class FakeGroup:
    """Serves requests as its launcher says."""

    def __init__(self, launcher: FakeLauncher, devices: tuple[Device, ...], number: int) -> None:
        self._launcher, self._devices, self._number = launcher, devices, number
        self._log = ""
        self.healthy = True

    async def run(self, request: WorkerRequest, *, deadline_seconds: float,
                  on_progress: Callable[[TrialProgress], None] = ignore_progress) -> Report:
        if not self.healthy:
            raise LaunchError("the worker group is not healthy: close it and start another")
        run = Run(request, self._devices, self._number, deadline_seconds, time.monotonic())
        self._launcher.runs.append(run)
        try:
            report = await self._serve(request, on_progress)
        except asyncio.CancelledError:
            run.cancelled = True
            self.healthy = False
            raise
        finally:
            run.ended_at = time.monotonic()
        self._log += f"served {request.kind} in group {self._number}\n"
        clean = report.outcome is Outcome.OK if isinstance(report, TrialReport) else not isinstance(
            report, FailureReport)
        self.healthy = self.healthy and clean
        return report

    async def _serve(self, request: WorkerRequest, on_progress: Callable[[TrialProgress], None]) -> Report:
        launcher = self._launcher
        if request.kind == "probe":
            return launcher.probe_failure or ProbeReport(profile=sample_model_profile())
        if request.kind == "calibrate":
            return CalibrateReport(profile=sample_hardware_profile(
                world_size=len(self._devices), contended=launcher.is_busy))
        on_progress(TrialProgress(phase="measuring", step=1, step_seconds=0.1))
        launcher.trial_started.set()
        if launcher.hold is not None:
            await launcher.hold.wait()
        await asyncio.sleep(launcher.seconds)
        return launcher.script(request)

    def take_log(self) -> str:
        log, self._log = self._log, ""
        return log

    async def close(self) -> None:
        self.healthy = False
        if self._number in self._launcher.open_groups:
            self._launcher.open_groups.remove(self._number)
            for device in self._devices:
                self._launcher.in_use.remove(device)
