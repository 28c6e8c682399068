"""What a worker answers to each kind of request: its verdict, and the reports in it."""

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from engine import worker
from engine.errors import RankFailedError
from engine.profile import HardwareProfile
from engine.ranks import RankContext
from engine.report import (
    CalibrateReport,
    CalibrateRequest,
    FailureReport,
    Outcome,
    ProbeReport,
    ProbeRequest,
    TrialProgress,
    TrialReport,
    WorkerRequest,
)
from engine.wire import Command, RankBaseline, RankVerdict, decode_message, encode
from tests.engine.training import RanksOf, over_shared_memory
from tests.support import tasks
from tests.support.trials import TINY_GPT, trial


def _context() -> RankContext:
    size = dist.get_world_size()
    return RankContext(rank=dist.get_rank(), world_size=size, device=torch.device("cpu"), host_devices=2,
                       control=dist.group.WORLD if size > 1 else None)


def _serve(*requests: WorkerRequest) -> list[Any]:
    """All messages of this rank's worker, which serves the requests and finds its launcher gone."""
    os.environ["AUTOTUNE_ALLOWED_TASKS"] = tasks.MODULE
    launcher, own = socket.socketpair()
    with launcher:
        channel = worker.Channel(own.detach())
        for request in requests:
            launcher.sendall(encode(Command(request=request, deadline_seconds=60)))
        launcher.shutdown(socket.SHUT_WR)
        for command in channel.commands():
            channel.send(worker._serve(command, _context(), channel))
        channel._lines.close()
        channel._socket.close()
        return [decode_message(line) for line in launcher.makefile("rb")]


def _verdicts(messages: list[Any]) -> list[RankVerdict]:
    return [message for message in messages if isinstance(message, RankVerdict)]


@over_shared_memory
def test_a_probe_is_the_first_ranks(ranks: RanksOf) -> None:
    request = ProbeRequest(model=TINY_GPT, precisions=("fp32",))
    (first,), (second,) = (_verdicts(messages) for messages in ranks(2).run(_serve, request))
    assert isinstance(first.report, ProbeReport)
    hidden, vocab = TINY_GPT.hidden, TINY_GPT.vocab
    assert first.report.profile.parameters > vocab * hidden + TINY_GPT.layers * 12 * hidden**2
    assert (second.report, second.clean, first.clean) == (None, True, True)


@over_shared_memory
def test_two_ranks_measure_one_hardware(ranks: RanksOf) -> None:
    profiles: list[HardwareProfile] = []
    for messages in ranks(2).run(_serve, CalibrateRequest()):
        (verdict,) = _verdicts(messages)
        assert isinstance(verdict.report, CalibrateReport)
        profiles.append(verdict.report.profile)
    assert profiles[0] == profiles[1]
    profile = profiles[0]
    assert profile.world_size == 2
    assert profile.allreduce_latency_seconds is not None
    assert profile.allreduce_bytes_per_second is not None
    assert 1e-6 < profile.allreduce_latency_seconds < 0.1
    assert 1e7 < profile.allreduce_bytes_per_second < 1e11


@over_shared_memory
def test_a_failed_trial_says_where_and_how_and_the_next_request_is_heard(ranks: RanksOf) -> None:
    messages, = ranks(1).run(_serve, trial(tasks.spec("raises", rank=0, step=1, message="boom"), ranks=1),
                             ProbeRequest(model=tasks.spec("fails_at_build"), precisions=("fp32",)))
    assert [type(message) for message in messages[:2]] == [TrialProgress, RankBaseline]
    failed, probed = _verdicts(messages)
    assert isinstance(failed.report, TrialReport)
    assert (failed.report.outcome, failed.report.detail) == (Outcome.CRASHED, "rank 0: ValueError: boom")
    assert (failed.report.failed_rank, failed.report.failed_step) == (0, 1)
    assert (failed.clean, failed.secondary) == (False, False)
    assert probed.report == FailureReport(detail="rank 0: ValueError: bad arg")
    assert failed.at_seconds < probed.at_seconds


def _serve_an_echo() -> list[Any]:
    def fail(*_: Any) -> None:
        raise RankFailedError("rank 1 has left" + " and left" * 1000)

    worker._run = fail  # type: ignore[assignment]
    return _serve(CalibrateRequest())


@over_shared_memory
def test_an_echo_is_marked_and_long_messages_are_cut(ranks: RanksOf) -> None:
    try:
        (verdict,), = ranks(1).run(_serve_an_echo)
    finally:
        ranks(1).restart()
    assert verdict.secondary
    assert isinstance(verdict.report, FailureReport)
    assert len(verdict.report.detail) == 4000
    assert verdict.report.detail.startswith("rank 0: RankFailedError: rank 1 has left and left")
