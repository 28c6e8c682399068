"""`python -m engine.worker SETTINGS`: one rank of a warm group. Serves requests until its launcher closes the socket.

Started by a launcher alone. A verdict is left for every request: the report itself, or what went wrong here. What a
rank can no longer tell, because it hangs or was killed, its launcher tells.
"""

import faulthandler
import io
import os
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING

from engine.process import die_with_parent, pin_to_core, prefer_for_oom_kill, resident_memory
from engine.report import FailureReport, TrialProgress, TrialReport, TrialRequest
from engine.values import Value
from engine.wire import Command, RankBaseline, RankReady, RankVerdict, WorkerSettings, encode

if TYPE_CHECKING:
    from engine.ranks import RankContext
    from engine.report import WorkerReport

_MAX_DETAIL = 4000


class Channel:
    """This rank's end of the socket to the launcher."""

    def __init__(self, control_fd: int) -> None:
        self._socket = socket.socket(fileno=control_fd)
        self._socket.set_inheritable(False)
        self._lines = self._socket.makefile("rb")

    def send(self, message: Value) -> None:
        self._socket.sendall(encode(message))

    def commands(self) -> "CommandIterator":
        return CommandIterator(self._lines)


class CommandIterator:
    """Commands as they come, until the launcher closes the socket."""

    def __init__(self, lines: io.BufferedReader) -> None:
        self._lines = lines

    def __iter__(self) -> "CommandIterator":
        return self

    def __next__(self) -> Command:
        line = self._lines.readline()
        if not line:
            raise StopIteration
        return Command.model_validate_json(line)


class ChannelReporter:
    """Tells the launcher how far a trial is, and remembers it for the verdict."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.step: int | None = None

    def baseline(self) -> None:
        self._channel.send(RankBaseline(resident_bytes=resident_memory().now))

    def progress(self, progress: TrialProgress) -> None:
        self.step = None if progress.phase == "setup" else progress.step
        self._channel.send(progress)


def main() -> None:
    """The process's entry. Never returns: it leaves without running the interpreter's exit handlers, which may hang."""
    settings = WorkerSettings.model_validate_json(sys.argv[1])
    die_with_parent(settings.parent_pid)
    prefer_for_oom_kill()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    if settings.device_type == "cpu":
        pin_to_core(settings.device_index)
    channel = Channel(settings.control_fd)
    code = 0
    try:
        context = _join(settings)
        channel.send(RankReady(baseline_bytes=resident_memory().now))
        for command in channel.commands():
            channel.send(_serve(command, context, channel))
    except (BrokenPipeError, ConnectionResetError):
        code = 1
    except BaseException:  # noqa: BLE001  the entry: whatever it is goes to the log, and the process ends
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(settings: WorkerSettings) -> "RankContext":
    """Enter the group and warm up: what is loaded or allocated once is not to count as a trial's."""
    import gc

    from engine.ranks import RankContext, control_group, default_device, join_group, set_threads
    from engine.trial import warm_up_engine

    device = default_device(settings.device_type, settings.device_index)
    set_threads(settings.threads)
    join_group(rank=settings.rank, world_size=settings.world_size, device=device,
               rendezvous_file=settings.rendezvous_file)
    context = RankContext(
        rank=settings.rank, world_size=settings.world_size, device=device, control=control_group(settings.world_size),
        core=settings.device_index if device.type == "cpu" else None, host_devices=settings.host_devices)
    warm_up_engine(context)
    gc.collect()
    gc.freeze()
    return context


def _serve(command: Command, context: "RankContext", channel: Channel) -> RankVerdict:
    """Run one request to its verdict."""
    from engine.failure import describe, is_echo, outcome_of

    reporter = ChannelReporter(channel)
    try:
        report, clean = _run(command, context, reporter)
        return RankVerdict(report=report, clean=clean, at_seconds=time.monotonic())
    except (Exception, SystemExit) as error:  # noqa: BLE001  the entry: every failure becomes a verdict
        at_seconds = time.monotonic()
        traceback.print_exc()
        detail = describe(error, context.rank)[:_MAX_DETAIL]
        failure: WorkerReport = FailureReport(detail=detail)
        if isinstance(command.request, TrialRequest):
            failure = TrialReport(outcome=outcome_of(error, context.device.type), detail=detail,
                                  failed_rank=context.rank, failed_step=reporter.step)
        return RankVerdict(report=failure, clean=False, secondary=is_echo(error), at_seconds=at_seconds)


def _run(command: Command, context: "RankContext", reporter: ChannelReporter) -> "tuple[WorkerReport | None, bool]":
    """The report, None where the first rank's is enough, and whether this rank may serve another request."""
    request = command.request
    if request.kind == "trial":
        from engine.trial import run_trial

        return run_trial(request, context, reporter, deadline_seconds=command.deadline_seconds)
    if request.kind == "probe":
        if context.rank > 0:
            return None, True
        from engine.probe import probe
        from engine.report import ProbeReport

        return ProbeReport(profile=probe(request.model, precisions=request.precisions)), True
    from engine.calibrate import calibrate
    from engine.report import CalibrateReport

    return CalibrateReport(profile=calibrate(context)), True


if __name__ == "__main__":
    main()
