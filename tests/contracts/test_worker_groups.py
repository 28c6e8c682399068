"""What every launcher's worker groups promise, whatever is behind them: the scheduler counts on nothing else."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.domain.errors import LaunchError
from autotune.scheduler.launcher.base import Launcher
from autotune.scheduler.launcher.local import LocalLauncher
from engine.config import OptimizerConfig, TrainConfig
from engine.report import (
    CalibrateReport,
    CalibrateRequest,
    MeasurePolicy,
    Outcome,
    ProbeReport,
    ProbeRequest,
    TrialProgress,
    TrialReport,
    TrialRequest,
)
from engine.spec import GptSpec, PythonSpec
from tests.support.launcher import FakeLauncher
from tests.support.samples import sample_failure, sample_report
from tests.support.scheduling import in_loop

SPEC = GptSpec(kind="gpt", layers=1, hidden=16, heads=2, vocab=32, sequence_length=8)
BROKEN = PythonSpec(kind="python", entry_point="tests.support.failing_tasks:refuses")
DEADLINE = 120.0


def trial(*, spec: GptSpec | PythonSpec = SPEC, endless: bool = False) -> TrialRequest:
    policy = MeasurePolicy(max_warmup_steps=2, min_steps=2, max_steps=1_000_000 if endless else 3,
                           target_relative_interval=1e-12 if endless else 1.0, max_seconds=1e6)
    return TrialRequest(model=spec, optimizer=OptimizerConfig(), config=TrainConfig(micro_batch_size=2),
                        global_batch_size=2, policy=policy)


def fake_launcher() -> FakeLauncher:
    launcher = FakeLauncher(count=1)

    def script(request: TrialRequest) -> TrialReport:
        if request.model == BROKEN:
            return sample_failure(Outcome.CRASHED, "rank 0: ValueError: bad arg")
        return sample_report()

    launcher.script = script
    return launcher


@pytest.fixture(params=["fake", "local"])
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    monkeypatch.setenv("AUTOTUNE_ALLOWED_TASKS", "tests.support.failing_tasks")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    makers: dict[str, Callable[[], Launcher]] = {"fake": fake_launcher,
                                                 "local": lambda: LocalLauncher(device_type="cpu")}
    return makers[request.param]()


def hold_trials(launcher: Launcher) -> None:
    """Make the fake's trials last; real ones are asked for endless steps."""
    if isinstance(launcher, FakeLauncher):
        launcher.hold = asyncio.Event()


@in_loop
async def test_a_group_serves_requests_one_after_another_and_stays_healthy(launcher: Launcher) -> None:
    group = await launcher.start(launcher.devices()[:1])
    try:
        heard: list[TrialProgress] = []
        probed = await group.run(ProbeRequest(model=SPEC, precisions=("fp32",)), deadline_seconds=DEADLINE)
        assert isinstance(probed, ProbeReport)
        assert probed.profile.parameters > 0
        for _ in range(2):
            report = await group.run(trial(), deadline_seconds=DEADLINE, on_progress=heard.append)
            assert isinstance(report, TrialReport)
            assert (report.outcome, report.detail) == (Outcome.OK, "")
            assert report.measurement is not None
            assert group.healthy
        assert heard
    finally:
        await group.close()
    assert not group.healthy


@in_loop
async def test_a_calibration_is_about_the_devices_of_the_group(launcher: Launcher) -> None:
    group = await launcher.start(launcher.devices()[:1])
    try:
        report = await group.run(CalibrateRequest(), deadline_seconds=DEADLINE)
    finally:
        await group.close()
    assert isinstance(report, CalibrateReport)
    assert report.profile.world_size == 1
    assert report.profile.device_type == launcher.device_type


@in_loop
async def test_a_failure_is_a_report_and_the_group_is_spent(launcher: Launcher) -> None:
    group = await launcher.start(launcher.devices()[:1])
    try:
        report = await group.run(trial(spec=BROKEN), deadline_seconds=DEADLINE)
        assert isinstance(report, TrialReport)
        assert report.outcome is Outcome.CRASHED
        assert "ValueError: bad arg" in report.detail.partition("\n")[0]
        assert not group.healthy
    finally:
        await group.close()


@in_loop
async def test_a_cancelled_request_ends_the_group_and_frees_its_devices(launcher: Launcher) -> None:
    devices = launcher.devices()[:1]
    group = await launcher.start(devices)
    hold_trials(launcher)
    begun = asyncio.Event()
    running = asyncio.create_task(group.run(
        trial(endless=True), deadline_seconds=DEADLINE, on_progress=lambda progress: begun.set()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not group.healthy
    await group.close()
    await group.close()
    again = await launcher.start(devices)
    assert again.healthy
    await again.close()


@in_loop
async def test_a_spent_group_refuses_work(launcher: Launcher) -> None:
    group = await launcher.start(launcher.devices()[:1])
    await group.close()
    with pytest.raises(LaunchError):
        await group.run(trial(), deadline_seconds=DEADLINE)


@in_loop
async def test_logs_are_handed_over_once(launcher: Launcher) -> None:
    group = await launcher.start(launcher.devices()[:1])
    try:
        await group.run(trial(spec=BROKEN), deadline_seconds=DEADLINE)
        assert group.take_log() != ""
        assert group.take_log() == ""
    finally:
        await group.close()


def test_a_launcher_describes_its_host(launcher: Launcher) -> None:
    devices = launcher.devices()
    assert devices
    assert {(device.host, device.device_type) for device in devices} == {(launcher.host, launcher.device_type)}
    assert len({device.index for device in devices}) == len(devices)
    assert launcher.device_name
    if isinstance(launcher, LocalLauncher):
        assert {device.index for device in devices} <= os.sched_getaffinity(0)
