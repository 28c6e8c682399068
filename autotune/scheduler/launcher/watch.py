"""How one request to a group ends: decided from what its ranks say and from what can be seen of them. No I/O."""

import signal
from dataclasses import dataclass, field

from autotune.scheduler.launcher.base import Report
from autotune.scheduler.launcher.rank import RankGone
from engine.report import MAYBE_FROM_OUTSIDE, FailureReport, Outcome, TrialProgress, TrialReport, WorkerRequest
from engine.wire import RankBaseline, RankMessage, RankVerdict

GRACE_SECONDS = 0.3
"""After the first failure, so long other ranks may still tell theirs: an echo can arrive before its cause."""

_GUARD_FACTOR = 1.25
_GUARD_BYTES = 256 * 2**20
"""A rank measures its own memory after each step. One that exceeds its limit by this much within a step is ended."""

_LOW_FACTOR = 2
"""A host had little memory left where it was less than so many times its reserve when last looked at, just before."""


@dataclass(frozen=True, kw_only=True)
class WatchLimits:
    """When a request is given up.

    Attributes:
        deadline_seconds: since it was sent.
        stall_seconds: since the last sign of life.
        guarded_bytes: resident growth of one rank; None: not guarded.
        host_reserve_bytes: the host must keep as much available.
    """

    deadline_seconds: float
    stall_seconds: float
    guarded_bytes: int | None
    host_reserve_bytes: int

    @staticmethod
    def guard_for(memory_limit_bytes: int | None) -> int | None:
        return None if memory_limit_bytes is None else int(memory_limit_bytes * _GUARD_FACTOR) + _GUARD_BYTES


@dataclass
class _Seen:
    """One rank, from outside."""

    step: int | None = None
    phase: str = "start"
    baseline_bytes: int = 0
    resident_bytes: int = 0
    verdict: RankVerdict | None = None

    @property
    def grown_bytes(self) -> int:
        return max(self.resident_bytes - self.baseline_bytes, 0)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong on one rank; the cause is the first one that is not an echo of another."""

    rank: int
    at_seconds: float
    echo: bool
    outcome: Outcome
    detail: str
    step: int | None

    @property
    def text(self) -> str:
        """`detail` without the rank."""
        return self.detail.removeprefix(f"rank {self.rank}: ")


@dataclass
class Watch:
    """Follows one request from sending to its report.

    Attributes:
        report: set once it is decided.
        failure: the cause, where it failed; its log's tail belongs into the report.
        clean: all ranks can serve another request.
    """

    request: WorkerRequest
    world_size: int
    limits: WatchLimits
    started_at: float
    report: Report | None = None
    failure: Failure | None = None
    timed_out: bool = False
    _ranks: list[_Seen] = field(init=False)
    _failures: list[Failure] = field(default_factory=list)
    _first_failure_at: float | None = None
    _last_sign_at: float = field(init=False)
    _available_bytes: int | None = None

    def __post_init__(self) -> None:
        self._ranks = [_Seen() for _ in range(self.world_size)]
        self._last_sign_at = self.started_at

    @property
    def clean(self) -> bool:
        return self.failure is None and all(seen.verdict is not None and seen.verdict.clean for seen in self._ranks)

    # -- what happens

    def hear(self, rank: int, message: "RankMessage | RankGone", now: float) -> None:
        """Take in what a rank said, or that it is gone."""
        seen = self._ranks[rank]
        self._last_sign_at = now
        if isinstance(message, RankGone):
            self._fail(self._gone(rank, message), now)
        elif isinstance(message, RankBaseline):
            seen.baseline_bytes = seen.resident_bytes = message.resident_bytes
        elif isinstance(message, TrialProgress):
            seen.phase, seen.step = message.phase, None if message.phase == "setup" else message.step
        elif isinstance(message, RankVerdict):
            seen.verdict = message
            failure = _failure_in(rank, message)
            if failure is not None:
                self._fail(failure, now)
        self._decide(now)

    def see_memory(self, rank: int, resident_bytes: int, now: float) -> None:
        """Take in how much a rank holds; 0 of one that has ended tells nothing."""
        seen = self._ranks[rank]
        if not resident_bytes:
            return
        seen.resident_bytes = resident_bytes
        limit = self.limits.guarded_bytes
        if limit is not None and seen.baseline_bytes and seen.grown_bytes > limit:
            detail = f"rank {rank}: grew by {_mib(seen.grown_bytes)} within a step, far over the memory limit"
            self._conclude(Failure(rank=rank, at_seconds=now, echo=False, outcome=Outcome.OOM_DEVICE, detail=detail,
                                   step=seen.step))

    def see_host(self, available_bytes: int, now: float) -> None:
        """Take in how much memory the host has left."""
        self._available_bytes = available_bytes
        rank = max(range(self.world_size), key=lambda index: self._ranks[index].grown_bytes)
        seen = self._ranks[rank]
        if available_bytes >= self.limits.host_reserve_bytes or seen.grown_bytes < _GUARD_BYTES:
            return
        detail = (f"rank {rank}: stopped because the host has only {_mib(available_bytes)} of memory left; it held "
                  f"{_mib(seen.resident_bytes)}")
        self._conclude(Failure(rank=rank, at_seconds=now, echo=False, outcome=Outcome.OOM_HOST, detail=detail,
                               step=seen.step))

    def see_time(self, now: float) -> None:
        """Take in that time has passed."""
        self._decide(now)
        if self.report is not None or self._failures:
            return
        if now - self.started_at >= self.limits.deadline_seconds:
            self._time_out(f"not finished after {self.limits.deadline_seconds:g} s", now)
        elif now - self._last_sign_at >= self.limits.stall_seconds:
            self._time_out(f"no sign of life for {self.limits.stall_seconds:g} s", now)

    # -- what follows

    def _fail(self, failure: Failure, now: float) -> None:
        if not any(known.rank == failure.rank for known in self._failures):
            self._failures.append(failure)
            self._first_failure_at = self._first_failure_at or now

    def _gone(self, rank: int, gone: RankGone) -> Failure:
        code, outcome = gone.exit_code, Outcome.CRASHED
        if code == -signal.SIGKILL:
            outcome, what = Outcome.OOM_HOST, self._killed(self._ranks[rank])
        elif code is None:
            what = "broke off the conversation with its launcher"
        elif code < 0:
            what = f"killed (signal {-code}, {signal.strsignal(-code)})"
        else:
            what = f"exited with code {code}"
        return Failure(rank=rank, at_seconds=gone.at_seconds, echo=False, outcome=outcome,
                       detail=f"rank {rank}: {what}", step=self._ranks[rank].step)

    def _killed(self, seen: _Seen) -> str:
        """The kernel kills like this for lack of memory, and says nothing to its victim; so does anybody else."""
        limit = self.request.memory_limit_bytes if self.request.kind == "trial" else None
        available = self._available_bytes
        left = "" if available is None else f"; the host had {_mib(available)} of memory left"
        if available is None or available >= _LOW_FACTOR * self.limits.host_reserve_bytes:
            left += f"; {MAYBE_FROM_OUTSIDE}"
        return (f"killed (signal 9): probably host memory; last seen resident {_mib(seen.resident_bytes)}, memory "
                f"limit {'none' if limit is None else _mib(limit)}{left}")

    def _decide(self, now: float) -> None:
        if self.report is not None:
            return
        if self._failures:
            assert self._first_failure_at is not None
            all_told = len(self._failures) == self.world_size
            if all_told or now - self._first_failure_at >= GRACE_SECONDS:
                self._conclude(_cause(self._failures))
        elif all(seen.verdict is not None for seen in self._ranks):
            first = self._ranks[0].verdict
            assert first is not None
            assert first.report is not None
            assert not isinstance(first.report, TrialProgress)
            self.report = first.report

    def _time_out(self, what: str, now: float) -> None:
        steps = [-1 if seen.step is None else seen.step for seen in self._ranks]
        behind = steps.index(min(steps))
        seen = self._ranks[behind]
        where = f"step {seen.step}" if seen.step is not None else f"phase {seen.phase}"
        self.timed_out = True
        self._conclude(Failure(rank=behind, at_seconds=now, echo=False, outcome=Outcome.TIMEOUT,
                               detail=f"{what}: rank {behind} is in {where}", step=seen.step))

    def _conclude(self, failure: Failure) -> None:
        if self.report is None:
            self.failure = failure
            self.report = report_of(failure, self.request, log_tail="")


def report_of(failure: Failure, request: WorkerRequest, *, log_tail: str) -> Report:
    """The report of a failed request."""
    if request.kind != "trial":
        return FailureReport(detail=failure.detail, log_tail=log_tail)
    detail = f"{failure.detail}\n\nEnd of the log:\n{log_tail}" if log_tail.strip() else failure.detail
    return TrialReport(outcome=failure.outcome, detail=detail, failed_rank=failure.rank, failed_step=failure.step)


def _cause(failures: list[Failure]) -> Failure:
    """The first failure that echoes no other; of ranks that fail alike the lowest, to tell it alike each time."""
    first = min(failures, key=lambda failure: (failure.echo, failure.at_seconds))
    alike = [failure for failure in failures if failure.text == first.text and failure.echo == first.echo]
    return min(alike, key=lambda failure: failure.rank)


def _failure_in(rank: int, verdict: RankVerdict) -> Failure | None:
    """The exception that a verdict tells of; None where all ranks agreed on how the request ended."""
    report = verdict.report
    if isinstance(report, FailureReport):
        return Failure(rank=rank, at_seconds=verdict.at_seconds, echo=verdict.secondary, outcome=Outcome.CRASHED,
                       detail=report.detail, step=None)
    if isinstance(report, TrialReport) and report.failed_rank is not None:
        return Failure(rank=rank, at_seconds=verdict.at_seconds, echo=verdict.secondary, outcome=report.outcome,
                       detail=report.detail, step=report.failed_step)
    return None


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
