"""A rank that fails in a step, killed or raising: the others end soon, and what is reported is its own error."""

import contextlib
import datetime
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from engine import TrainConfig, failure
from engine.collectives import SOCKETS
from engine.errors import RankFailedError
from engine.failure import describe, is_echo
from engine.run_file import RunFile
from tests.engine.training import (
    RanksOf,
    Setup,
    Tower,
    loss_of,
    micro_batches,
    over_shared_memory,
    run_step,
    stages,
    start,
)
from tests.support import tasks
from tests.support.ranks import rank_context

FAILING = 1

SOON_SECONDS = 5.0
"""From the end of the rank that failed to the end of the others, on a busy machine; they notice within 0.2."""

GROUP_TIMEOUT = datetime.timedelta(seconds=10)
"""gloo now and then misses that a peer is gone, and ends at the group's timeout."""


def _raise(*_: object) -> NoReturn:
    raise ValueError("boom")


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _train_until_one_fails(stage: int, where: str, fail: Callable[..., None]) -> None:
    trainer = start(Setup(Tower, TrainConfig(zero_stage=stage, reduce_bucket_size=300, gradient_clipping=1.0)))
    fails = trainer.rank == FAILING
    run_step(trainer, 0)
    (inputs, target), = micro_batches(1, accumulation=1)
    if fails and where == "forward":
        fail()
    output = trainer(inputs)
    if fails and where == "backward":
        trainer.module.blocks[1].up.bias.register_hook(fail)
    trainer.backward(loss_of(output, target))
    if fails and where == "step":
        trainer.optimizer.register_step_pre_hook(fail)
    trainer.step()
    run_step(trainer, 2)


def _be_a_rank(rank: int, world_size: int, folder: Path, sockets: bool, *arguments: Any) -> NoReturn:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if sockets:
        os.environ[SOCKETS] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=rank,
                            world_size=world_size, timeout=GROUP_TIMEOUT)
    try:
        _train_until_one_fails(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is, is the answer
        (folder / str(rank)).write_text(json.dumps([is_echo(error), describe(error, rank)]))
    os._exit(0)  # gloo's threads end with the process


def _errors_of(world_size: int, folder: Path, sockets: bool, *arguments: Any) -> tuple[list[Any], float]:
    """Each rank's (is it an echo, error), None of one that was killed; seconds that the others lived on."""
    processes = [rank_context().Process(target=_be_a_rank, args=(rank, world_size, folder, sockets, *arguments))
                 for rank in range(world_size)]
    for process in processes:
        process.start()
    try:
        processes[FAILING].join(30)
        begun = time.monotonic()
        for process in processes:
            process.join(2 * GROUP_TIMEOUT.total_seconds())
        seconds = time.monotonic() - begun
        assert None not in [process.exitcode for process in processes], "they hang"
    finally:
        for process in processes:
            process.kill()
            process.join()
    files = [folder / str(rank) for rank in range(world_size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files], seconds


@stages
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("fail", [_raise, _die])
def test_the_others_end_soon_when_a_rank_fails(tmp_path: Path, transport: str, stage: int, where: str,
                                               fail: Callable[..., None]) -> None:
    sockets = transport == "sockets"
    (other, failing), seconds = _errors_of(2, tmp_path, sockets, stage, where, fail)
    assert failing == (None if fail is _die else [False, "rank 1: ValueError: boom"])
    echo, error = other
    assert echo, error
    assert seconds < SOON_SECONDS + (GROUP_TIMEOUT.total_seconds() if sockets else 0)


@pytest.mark.parametrize("transport", ["shared"])
@pytest.mark.parametrize("stage", [1, 3])
def test_two_others_end_soon_when_a_rank_is_killed(tmp_path: Path, transport: str, stage: int) -> None:
    (first, killed, last), seconds = _errors_of(3, tmp_path, False, stage, "backward", _die)
    assert killed is None
    assert (first[0], last[0]) == (True, True)
    assert seconds < SOON_SECONDS


def _end_with(errors: list[Exception | None]) -> tuple[str, float]:
    """What a rank that ends with its exception writes, and the seconds that it takes to end."""
    begun, sys.last_value = time.monotonic(), errors[dist.get_rank()]
    failure._LINGER_SECONDS = 0.5
    with contextlib.redirect_stderr(io.StringIO()) as written:
        failure._tell(os.getpid())
    del sys.last_value
    return written.getvalue(), time.monotonic() - begun


@over_shared_memory
def test_a_rank_tells_the_others_why_it_ends_and_they_end_later(ranks: RanksOf) -> None:
    errors = [RankFailedError("rank 1 has left"), ValueError("boom"), None]
    (told, lingered), (silent, at_once), untold = ranks(3).run(_end_with, errors)
    assert told == "rank 0 stops because another failed: rank 1: ValueError: boom\n"
    assert lingered > 0.5
    assert (silent, untold[0]) == ("", "")
    assert max(at_once, untold[1]) < 0.5


def _torchrun(*arguments: str, sockets: bool) -> str:
    """What is told of a run on two ranks that fails."""
    begun = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node",
         "2", "-m", *arguments],
        env=os.environ | {SOCKETS: "1" if sockets else ""}, capture_output=True, text=True, timeout=100, check=False)
    assert time.monotonic() - begun < 60
    assert result.returncode == 1
    return result.stderr


def _assert_rank_1_is_reported(told: str) -> str:
    cause = told.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"rank +: 1 ", cause), told
    assert re.search(r"exitcode +: 1 ", cause)
    return cause


def test_torchrun_reports_the_rank_whose_task_failed(tmp_path: Path) -> None:
    """By its error."""
    config = TrainConfig(zero_stage=2, micro_batch_size=2)
    run_file = RunFile.model_validate({
        "model": tasks.spec("raises", rank=1, step=2).model_dump(), "optimizer": {}, "config": config.model_dump(),
        "global_batch_size": 4, "world_size": 2, "seed": 7})
    path = tmp_path / "run.json"
    path.write_text(run_file.model_dump_json())
    told = _torchrun("engine.run", str(path), "--steps", "9", "--device", "cpu", "--allow-tasks", tasks.MODULE,
                     sockets=False)
    assert "ValueError: boom" in _assert_rank_1_is_reported(told)


def test_torchrun_reports_the_rank_that_failed_in_a_users_loop() -> None:
    """And not the peer that noticed, though gloo tells it at once."""
    told = _torchrun(__name__, "1", "forward", sockets=True)
    _assert_rank_1_is_reported(told)
    assert "[rank1]: ValueError: boom" in told


if __name__ == "__main__":
    _train_until_one_fails(int(sys.argv[1]), sys.argv[2], _raise)
