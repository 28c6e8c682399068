"""Groups on this machine: where they run, what they see, what they print, and that they share nothing."""

import ast
import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from autotune.domain.errors import LaunchError
from autotune.domain.hardware import Device
from autotune.scheduler.launcher import LocalLauncher
from autotune.scheduler.launcher.environment import worker_environment
from engine.report import (
    CalibrateReport,
    CalibrateRequest,
    Outcome,
    ProbeReport,
    ProbeRequest,
    TrialProgress,
    TrialReport,
)
from tests.support import tasks
from tests.support.trials import TINY_GPT, alive, group, run, run_once, trial


def test_two_groups_at_once_do_not_collide() -> None:
    """Also while the port that others would use is taken."""

    async def scenario() -> None:
        launcher = LocalLauncher(device_type="cpu")
        first, second = await asyncio.gather(
            launcher.start(launcher.devices()[:1]), launcher.start(launcher.devices()[1:2]))
        try:
            reports = await asyncio.gather(*(
                started.run(trial(TINY_GPT), deadline_seconds=60) for started in (first, second)))
        finally:
            await asyncio.gather(first.close(), second.close())
        assert [report.outcome for report in reports] == [Outcome.OK, Outcome.OK]  # type: ignore[union-attr]

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", 29500))
            listener.listen()
        except OSError:
            pass  # someone else has it already
        run(scenario())


def test_a_group_needs_no_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")

    async def scenario() -> None:
        launcher = LocalLauncher(device_type="cpu")
        assert launcher.devices()[0].host == "no-such-host.invalid"
        started = await launcher.start(launcher.devices()[:2])
        report = await started.run(trial(TINY_GPT, ranks=2), deadline_seconds=60)
        await started.close()
        assert isinstance(report, TrialReport)
        assert report.measurement is not None
        assert report.measurement.world_size == 2

    run(scenario())


@pytest.mark.parametrize("threads", [None, "1", "7"])
def test_threads_and_core_do_not_depend_on_how_the_service_was_started(
    threads: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if threads is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setenv("AUTOTUNE_TOKEN", "secret")
    monkeypatch.setenv("AUTOTUNE_DATABASE", "postgresql://user:password@host/db")
    seen = tmp_path / "seen"

    async def scenario() -> tuple[TrialReport, Device]:
        launcher = LocalLauncher(device_type="cpu")
        device = launcher.devices()[-1]
        started = await launcher.start([device])
        report = await started.run(trial(tasks.spec("tells_environment", file=str(seen))), deadline_seconds=60)
        await started.close()
        assert isinstance(report, TrialReport)
        return report, device

    report, device = run(scenario())
    told = ast.literal_eval(seen.read_text())
    assert report.measurement is not None
    assert report.measurement.threads_per_rank == told["threads"] == 1
    assert told["cores"] == [device.index]
    assert not any(name.startswith("AUTOTUNE_") and name != "AUTOTUNE_ALLOWED_TASKS" for name in told["environment"])
    assert "password" not in seen.read_text()


def test_the_environment_is_an_allow_list() -> None:
    parent = {"PATH": "/bin", "HOME": "/root", "DATABASE_URL": "postgresql://x", "AWS_SECRET_ACCESS_KEY": "x",
              "CUDA_VISIBLE_DEVICES": "1", "AUTOTUNE_ALLOWED_TASKS": "mine", "PGPASSWORD": "x", "OMP_NUM_THREADS": "64"}
    made = worker_environment(parent)
    assert {"PATH": "/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "1", "AUTOTUNE_ALLOWED_TASKS": "mine",
            "OMP_NUM_THREADS": "1"}.items() <= made.items()
    assert not {"DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"} & set(made)


def test_a_hundred_megabytes_of_output_block_nothing_and_are_bounded() -> None:
    async def scenario() -> None:
        async with group(1, log_limit_bytes=64 * 1024) as started:
            report = await started.run(trial(tasks.spec("prints", megabytes=100)), deadline_seconds=120)
            assert isinstance(report, TrialReport)
            assert report.outcome is Outcome.OK
            await asyncio.sleep(0.2)
            log = started.take_log()
            assert len(log) < 70 * 1024
            assert "bytes left out" in log
            assert log.rstrip().endswith("the last word")
            assert started.take_log() == ""

    run(scenario())


def test_logs_hold_no_nul_and_tell_ranks_apart() -> None:
    async def scenario() -> None:
        async with group(2) as started:
            await started.run(trial(tasks.spec("prints_nul"), ranks=2), deadline_seconds=60)
            await asyncio.sleep(0.2)
            log = started.take_log()
            assert log == "--- rank 0\nbefore\N{REPLACEMENT CHARACTER}after\n"

    run(scenario())


def test_a_group_serves_probe_calibration_and_trials_warm() -> None:
    """The second trial of a small model costs well under 1.5 s beyond its measured steps."""
    heard: list[TrialProgress] = []

    async def scenario() -> None:
        async with group(2) as started:
            probed = await started.run(ProbeRequest(model=TINY_GPT, precisions=("fp32",)), deadline_seconds=60)
            assert isinstance(probed, ProbeReport)
            assert probed.profile.block_count == 2
            calibrated = await started.run(CalibrateRequest(), deadline_seconds=60)
            assert isinstance(calibrated, CalibrateReport)
            assert calibrated.profile.world_size == 2
            assert calibrated.profile.allreduce_bytes_per_second is not None
            assert 1e6 < calibrated.profile.allreduce_bytes_per_second < 1e12
            assert calibrated.profile.allreduce_latency_seconds is not None
            assert 0 < calibrated.profile.allreduce_latency_seconds < 1
            overheads = []
            for _ in range(4):
                begun = time.monotonic()
                report = await started.run(trial(TINY_GPT, ranks=2), deadline_seconds=60, on_progress=heard.append)
                seconds = time.monotonic() - begun
                assert isinstance(report, TrialReport)
                assert report.measurement is not None
                overheads.append(seconds - sum(report.measurement.step_seconds))
                assert started.healthy
            assert min(overheads[1:]) < 1.5

    run(scenario())
    first = heard[: len(heard) // 4]
    assert [(progress.phase, progress.step) for progress in first] == [
        ("setup", 0), ("warmup", 0), ("warmup", 1), ("measuring", 2), ("measuring", 3)]


def test_a_device_is_never_shared() -> None:
    async def scenario() -> None:
        launcher = LocalLauncher(device_type="cpu")
        first = await launcher.start(launcher.devices()[:1])
        with pytest.raises(LaunchError, match="still held by another group"):
            await launcher.start(launcher.devices())
        await first.close()
        second = await launcher.start(launcher.devices()[:1])
        await second.close()

    run(scenario())


def test_devices_that_are_not_there_are_refused() -> None:
    async def scenario() -> None:
        launcher = LocalLauncher(device_type="cpu", host="here")
        stranger = Device(host="elsewhere", device_type="cpu", index=0)
        for devices, message in (([], "at least one"), ([stranger], "no such device on here"),
                                 ([launcher.devices()[0]] * 2, "named twice")):
            with pytest.raises(LaunchError, match=message):
                await launcher.start(devices)

    run(scenario())


def test_a_group_that_does_not_come_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def scenario() -> None:
        launcher = LocalLauncher(device_type="cpu")
        with pytest.raises(LaunchError, match=r"rank \d ended while starting[\s\S]*this torch is broken"):
            await launcher.start(launcher.devices()[:2])
        monkeypatch.delenv("PYTHONPATH")
        started = await launcher.start(launcher.devices()[:1])  # the devices are free again
        await started.close()

    run(scenario())


def test_workers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import asyncio
        from autotune.scheduler.launcher import LocalLauncher

        async def main():
            launcher = LocalLauncher(device_type="cpu")
            group = await launcher.start(launcher.devices()[:2])
            print(*group.pids, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        pids = [int(pid) for pid in service.stdout.readline().split()]
        assert len(pids) == 2
        assert all(os.getsid(pid) == pid for pid in pids)
        service.send_signal(signal.SIGKILL)
    end = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_a_closed_group_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = run(run_once(trial(TINY_GPT)))
    assert report.outcome is Outcome.OK
    assert list(tmp_path.iterdir()) == []
