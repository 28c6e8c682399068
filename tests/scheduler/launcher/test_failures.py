"""Whatever becomes of a rank, the request ends in a typed report that names the cause, and nothing is left running."""

import asyncio
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from autotune.domain.errors import LaunchError
from autotune.scheduler.launcher import LocalLauncher
from engine.report import FailureReport, MeasurePolicy, Outcome, ProbeRequest, TrialReport
from tests.support import tasks
from tests.support.trials import QUICK, TINY_GPT, alive, group, run, run_once, trial

LONG = MeasurePolicy(max_warmup_steps=4, min_steps=4, max_steps=4)


def test_the_first_failing_ranks_exception_is_the_cause() -> None:
    async def scenario() -> None:
        async with group(2) as started:
            begun = time.monotonic()
            report = await started.run(trial(tasks.spec("raises", rank=1, step=2), ranks=2), deadline_seconds=60)
            assert time.monotonic() - begun < 20
            assert isinstance(report, TrialReport)
            assert report.outcome is Outcome.CRASHED
            assert report.detail.splitlines()[0] == "rank 1: ValueError: boom"
            assert 'raise ValueError(message)' in report.detail
            assert (report.failed_rank, report.failed_step) == (1, 2)
            assert not started.healthy
            assert not any(alive(pid) for pid in started.pids)

    run(scenario())


def test_a_killed_rank_is_probably_host_memory() -> None:
    request = trial(tasks.spec("sends_itself", rank=1, step=0), ranks=2, memory_limit_bytes=10**9)
    report = run(run_once(request, ranks=2))
    assert report.outcome is Outcome.OOM_HOST
    assert re.fullmatch(r"rank 1: killed \(signal 9\): probably host memory; last seen resident [1-9]\d* MiB, "
                        r"memory limit 954 MiB; the host had \d+ MiB of memory left(; it may have been killed .*)?",
                        report.detail.splitlines()[0])
    assert (report.failed_rank, report.failed_step) == (1, 0)


@pytest.mark.parametrize(("task", "ranks", "first_line"), [
    (tasks.spec("sends_itself", rank=0, step=1, signal_number=11), 2, "rank 0: killed (signal 11, Segmentation fault)"),
    (tasks.spec("exits", rank=1, step=1), 2, "rank 1: exited with code 3"),
    (tasks.spec("calls_sys_exit", step=1), 1, "rank 0: SystemExit: 5"),
    (tasks.spec("fails_at_build"), 2, "rank 0: ValueError: bad arg"),
    (tasks.spec("loss_is_a_list"), 1,
     "rank 0: TaskError: Broken.loss must return a scalar tensor, the mean over the batch, not list"),
])
def test_crashes_say_what_happened(task: tasks.PythonSpec, ranks: int, first_line: str) -> None:
    report = run(run_once(trial(task, ranks=ranks), ranks=ranks))
    assert report.outcome is Outcome.CRASHED
    assert report.detail.splitlines()[0] == first_line


def test_a_task_that_is_not_allowed_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_task.py").write_text(f"open({str(tmp_path / 'was here')!r}, 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = tasks.PythonSpec(kind="python", entry_point="evil_task:make")
    report = run(run_once(trial(spec)))
    assert report.outcome is Outcome.CRASHED
    assert "TaskError: entry point evil_task:make is not allowed here" in report.detail
    assert not (tmp_path / "was here").exists()


def test_a_timed_out_trial_is_dead_before_the_next_one() -> None:
    async def scenario() -> None:
        async with group(2) as started:
            report = await started.run(trial(tasks.spec("burns", rank=1), ranks=2), deadline_seconds=2)
            assert not any(alive(pid) for pid in started.pids)
            assert isinstance(report, TrialReport)
            assert report.outcome is Outcome.TIMEOUT
            assert report.detail.startswith("not finished after 2 s")
            assert report.failed_step == 1
            assert not started.healthy
            with pytest.raises(LaunchError, match="not healthy"):
                await started.run(trial(TINY_GPT, ranks=2), deadline_seconds=2)

    run(scenario())


def test_the_log_of_a_hanging_trial_shows_where_it_hangs() -> None:
    report = run(run_once(trial(tasks.spec("burns")), deadline_seconds=2))
    assert "tests/support/tasks.py" in report.detail
    assert "in action" in report.detail


def test_a_trial_without_a_sign_of_life_is_given_up_before_its_deadline() -> None:
    report = run(run_once(trial(tasks.spec("hangs_deaf")), deadline_seconds=600, stall_seconds=1.5))
    assert report.outcome is Outcome.TIMEOUT
    assert report.detail.startswith("no sign of life for 1.5 s: rank 0 is in step 1")


def test_close_ends_a_rank_that_ignores_sigterm() -> None:
    async def scenario() -> None:
        async with group(1) as started:
            request = trial(tasks.spec("hangs_deaf", step=0))
            running = asyncio.create_task(started.run(request, deadline_seconds=600))
            await asyncio.sleep(1.5)
            await started.close()
            assert not any(alive(pid) for pid in started.pids)
            report = await running
            assert isinstance(report, TrialReport)
            assert report.outcome is Outcome.CANCELLED
            assert report.detail == "the worker group was closed meanwhile"

    run(scenario())


def test_cancelling_kills_the_ranks_at_once() -> None:
    async def scenario() -> None:
        async with group(2) as started:
            running = asyncio.create_task(
                started.run(trial(tasks.spec("hangs_deaf"), ranks=2), deadline_seconds=600))
            await asyncio.sleep(1.0)
            begun = time.monotonic()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert time.monotonic() - begun < 5
            assert not started.healthy
            assert not any(alive(pid) for pid in started.pids)

    run(scenario())


def test_what_a_rank_started_dies_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    report = run(run_once(trial(tasks.spec("spawns_child", pid_file=str(pid_file))), deadline_seconds=3))
    assert report.outcome is Outcome.TIMEOUT
    assert not alive(int(pid_file.read_text()))


@pytest.mark.parametrize("then", ["hangs", "exits", "goes on"])
def test_a_process_that_a_task_put_into_a_session_of_its_own_is_ended_too(tmp_path: Path, then: str) -> None:
    pid_file = tmp_path / "pid"
    spec = tasks.spec("spawns_child", pid_file=str(pid_file), own_session=True, then=then)
    run(run_once(trial(spec), deadline_seconds=3 if then == "hangs" else 60))
    assert not alive(int(pid_file.read_text()))


def test_a_rank_killed_while_idle_fails_the_next_request() -> None:
    async def scenario() -> None:
        async with group(1) as started:
            os.kill(started.pids[0], signal.SIGKILL)
            report = await started.run(trial(TINY_GPT), deadline_seconds=30)
            assert isinstance(report, TrialReport)
            assert report.outcome is Outcome.OOM_HOST
            assert not started.healthy

    run(scenario())


def test_what_a_killed_launcher_left_is_cleared_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    dead, living = (tmp_path / f"autotune-group-{pid}-x" for pid in (int(ended.stdout), os.getpid()))
    orphans = []
    for directory in (dead, living):
        directory.mkdir()
        mark = {"ENGINE_WORKER_GROUP": str(directory / "rendezvous")}
        orphans.append(subprocess.Popen(["sleep", "60"], env=os.environ | mark, start_new_session=True))
    try:
        LocalLauncher(device_type="cpu")
        assert orphans[0].wait(10) == -signal.SIGKILL
        assert orphans[1].poll() is None
        assert [path.name for path in tmp_path.iterdir()] == [living.name]
    finally:
        orphans[1].kill()
        orphans[1].wait()


def test_a_group_that_lost_a_rank_while_idle_is_not_healthy() -> None:
    async def scenario() -> None:
        async with group(2) as started:
            assert started.healthy
            os.kill(started.pids[1], signal.SIGKILL)
            async with asyncio.timeout(10):
                while started.healthy:
                    await asyncio.sleep(0.01)

    run(scenario())


def test_a_failed_probe_is_a_failure_report() -> None:
    async def scenario() -> None:
        async with group(1) as started:
            report = await started.run(ProbeRequest(model=tasks.spec("fails_at_build")), deadline_seconds=60)
            assert isinstance(report, FailureReport)
            assert report.detail == "rank 0: ValueError: bad arg"
            assert "Traceback" in report.log_tail

    run(scenario())


def test_running_out_of_memory_leads_to_fresh_processes() -> None:
    async def scenario() -> None:
        async with group(1) as started:
            report = await started.run(trial(tasks.spec("raises_memory_error", step=1)), deadline_seconds=60)
            assert isinstance(report, TrialReport)
            assert report.outcome is Outcome.OOM_DEVICE
            assert report.failed_step == 1
            assert "Tried to allocate 20.00 GiB" in report.detail
            assert not started.healthy
            assert not any(alive(pid) for pid in started.pids)

    run(scenario())


def test_a_failure_that_all_ranks_share_leaves_the_group_warm() -> None:
    async def scenario() -> None:
        async with group(2) as started:
            report = await started.run(trial(tasks.spec("becomes_nan", step=3), ranks=2, policy=LONG),
                                       deadline_seconds=60)
            assert isinstance(report, TrialReport)
            assert report.outcome is Outcome.NON_FINITE
            assert report.failed_step == 3
            assert started.healthy
            again = await started.run(trial(TINY_GPT, ranks=2, policy=QUICK), deadline_seconds=60)
            assert isinstance(again, TrialReport)
            assert again.outcome is Outcome.OK

    run(scenario())
