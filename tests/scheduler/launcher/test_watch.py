"""Decisions about a request, from scripted observations."""

from typing import Any

from autotune.scheduler.launcher.log import BoundedLog
from autotune.scheduler.launcher.rank import RankGone
from autotune.scheduler.launcher.watch import GRACE_SECONDS, Watch, WatchLimits
from engine.report import FailureReport, Outcome, ProbeRequest, TrialProgress, TrialReport
from engine.wire import RankBaseline, RankVerdict
from tests.support.trials import TINY_GPT, trial

MIB = 2**20


def _watch(*, ranks: int = 2, **limits: Any) -> Watch:
    given = {"deadline_seconds": 60.0, "stall_seconds": 30.0, "guarded_bytes": None, "host_reserve_bytes": 0, **limits}
    return Watch(trial(TINY_GPT, ranks=ranks), ranks, WatchLimits(**given), 0.0)


def _crash(rank: int, text: str, at_seconds: float, *, echo: bool = False) -> RankVerdict:
    report = TrialReport(outcome=Outcome.CRASHED, detail=f"rank {rank}: {text}", failed_rank=rank, failed_step=4)
    return RankVerdict(report=report, clean=False, secondary=echo, at_seconds=at_seconds)


def _ok(*, clean: bool = True) -> RankVerdict:
    return RankVerdict(report=TrialReport(outcome=Outcome.OK), clean=clean, at_seconds=1.0)


def test_an_echo_that_arrives_first_is_not_the_cause() -> None:
    watch = _watch()
    watch.hear(0, _crash(0, "RuntimeError: Connection closed by peer", 1.0, echo=True), 1.0)
    assert watch.report is None
    watch.hear(1, RankGone(exit_code=-9, at_seconds=1.1), 1.1)
    assert isinstance(watch.report, TrialReport)
    assert watch.report.outcome is Outcome.OOM_HOST
    assert watch.report.failed_rank == 1


def test_the_earlier_of_two_failures_is_the_cause_whatever_arrives_first() -> None:
    watch = _watch()
    watch.hear(0, _crash(0, "ValueError: late", 1.02), 1.05)
    watch.hear(1, _crash(1, "ValueError: early", 1.01), 1.06)
    assert isinstance(watch.report, TrialReport)
    assert watch.report.detail == "rank 1: ValueError: early"


def test_one_failure_is_enough_after_the_grace() -> None:
    watch = _watch()
    watch.hear(1, _crash(1, "ValueError: boom", 1.0), 1.0)
    watch.see_time(1.0 + GRACE_SECONDS / 2)
    assert watch.report is None
    watch.see_time(1.0 + GRACE_SECONDS)
    assert isinstance(watch.report, TrialReport)
    assert watch.report.detail == "rank 1: ValueError: boom"


def test_ranks_that_fail_alike_are_told_alike() -> None:
    watch = _watch()
    watch.hear(1, _crash(1, "ValueError: same", 1.0), 1.0)
    watch.hear(0, _crash(0, "ValueError: same", 1.1), 1.1)
    assert isinstance(watch.report, TrialReport)
    assert watch.report.detail == "rank 0: ValueError: same"


def test_all_verdicts_are_needed_and_the_first_ranks_is_taken() -> None:
    watch = _watch()
    watch.hear(1, RankVerdict(report=None, clean=True, at_seconds=1.0), 1.0)
    assert watch.report is None
    watch.hear(0, _ok(), 1.0)
    assert watch.report == TrialReport(outcome=Outcome.OK)
    assert watch.clean


def test_a_rank_that_leaks_makes_the_group_unfit() -> None:
    watch = _watch()
    watch.hear(0, _ok(), 1.0)
    watch.hear(1, _ok(clean=False), 1.0)
    assert watch.report is not None
    assert not watch.clean


def test_deadline_and_stall_name_the_rank_that_is_behind() -> None:
    for limits, seconds, text in (({"deadline_seconds": 5.0}, 5.0, "not finished after 5 s: rank 1 is in step 2"),
                                  ({"stall_seconds": 3.0}, 4.5, "no sign of life for 3 s: rank 1 is in step 2")):
        watch = _watch(**limits)
        watch.hear(0, TrialProgress(phase="measuring", step=3), 1.0)
        watch.hear(1, TrialProgress(phase="measuring", step=2), 1.0)
        watch.see_time(3.9)
        assert watch.report is None
        watch.see_time(seconds)
        assert isinstance(watch.report, TrialReport)
        assert watch.report.outcome is Outcome.TIMEOUT
        assert watch.report.detail == text
        assert watch.timed_out


def test_a_rank_in_setup_is_behind_one_in_the_first_step() -> None:
    watch = _watch(deadline_seconds=5.0)
    watch.hear(0, TrialProgress(phase="warmup", step=0), 1.0)
    watch.hear(1, TrialProgress(phase="setup", step=0), 1.0)
    watch.see_time(5.0)
    assert watch.failure is not None
    assert watch.failure.rank == 1
    assert "rank 1 is in phase setup" in watch.failure.detail


def test_memory_is_guarded_within_a_step() -> None:
    watch = _watch(guarded_bytes=WatchLimits.guard_for(100 * MIB))
    watch.hear(1, RankBaseline(resident_bytes=300 * MIB), 1.0)
    watch.hear(1, TrialProgress(phase="warmup", step=1), 1.0)
    watch.see_memory(1, (300 + 125 + 255) * MIB, 2.0)
    assert watch.report is None
    watch.see_memory(1, (300 + 125 + 257) * MIB, 2.0)
    assert isinstance(watch.report, TrialReport)
    assert watch.report.outcome is Outcome.OOM_DEVICE
    assert (watch.report.failed_rank, watch.report.failed_step) == (1, 1)


def test_what_is_read_of_a_dead_process_does_not_count() -> None:
    watch = _watch()
    watch.see_memory(1, 500 * MIB, 1.0)
    watch.see_memory(1, 0, 1.1)
    watch.hear(1, RankGone(exit_code=-9, at_seconds=1.1), 1.1)
    watch.see_time(2.0)
    assert isinstance(watch.report, TrialReport)
    assert watch.report.detail == ("rank 1: killed (signal 9): probably host memory; last seen resident 500 MiB, "
                                   "memory limit none; it may have been killed from outside")


def test_a_kill_is_put_down_to_the_hosts_memory_only_where_that_was_low() -> None:
    for available, known in ((399, True), (400, False)):
        watch = _watch(ranks=1, host_reserve_bytes=200 * MIB)
        watch.see_host(available * MIB, 1.0)
        watch.hear(0, RankGone(exit_code=-9, at_seconds=1.1), 1.1)
        assert isinstance(watch.report, TrialReport)
        assert watch.report.outcome is Outcome.OOM_HOST
        text = f"limit none; the host had {available} MiB of memory left"
        assert watch.report.detail.endswith(text if known else f"{text}; it may have been killed from outside")


def test_a_host_about_to_run_out_ends_the_trial_that_grew() -> None:
    watch = _watch(host_reserve_bytes=200 * MIB)
    watch.hear(0, RankBaseline(resident_bytes=300 * MIB), 1.0)
    watch.see_host(100 * MIB, 1.0)
    assert watch.report is None  # it was not this trial
    watch.see_memory(0, 900 * MIB, 1.0)
    watch.see_host(100 * MIB, 1.0)
    assert isinstance(watch.report, TrialReport)
    assert watch.report.outcome is Outcome.OOM_HOST
    assert "rank 0: stopped because the host has only 100 MiB of memory left; it held 900 MiB" in watch.report.detail


def test_a_failed_probe_has_no_outcome() -> None:
    watch = Watch(ProbeRequest(model=TINY_GPT), 1, _watch().limits, 0.0)
    watch.hear(0, RankGone(exit_code=1, at_seconds=1.0), 1.0)
    assert watch.report == FailureReport(detail="rank 0: exited with code 1")


def test_a_log_keeps_its_beginning_and_its_end() -> None:
    log = BoundedLog(100)
    log.write(b"begin ")
    for number in range(100):
        log.write(b"line %d\n" % number)
    log.write(b"end")
    text = log.take()
    assert text.startswith("begin line 0\n")
    assert text.endswith("line 99\nend")
    assert len(text) < 100 + 50
    dropped = int(text.partition("[... ")[2].split()[0])
    assert dropped == len(b"begin end") + sum(len(b"line %d\n" % number) for number in range(100)) - 100


def test_a_short_log_is_whole() -> None:
    log = BoundedLog(1000)
    log.write(b"a\x00b\xff")
    assert log.last(2) == "b\N{REPLACEMENT CHARACTER}"
    assert log.take() == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    assert log.take() == ""


def test_one_huge_write_is_cut() -> None:
    log = BoundedLog(40)
    log.write(b"x" * 1000 + b"end")
    text = log.take()
    assert text.endswith("end")
    assert len(text) < 100
