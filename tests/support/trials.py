"""Worker groups and trial requests for tests."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from autotune.scheduler.launcher import LocalLauncher
from autotune.scheduler.launcher.local import LocalWorkerGroup
from engine.config import OptimizerConfig, TrainConfig
from engine.report import MeasurePolicy, TrialReport, TrialRequest
from engine.spec import GptSpec, ModelSpec
from tests.support import tasks

QUICK = MeasurePolicy(max_warmup_steps=2, min_steps=2, max_steps=2)
TINY_GPT = GptSpec(kind="gpt", layers=2, hidden=64, heads=2, vocab=256, sequence_length=32)


def trial(model: ModelSpec, *, ranks: int = 1, micro: int = 2, policy: MeasurePolicy = QUICK, config: Any = None,
          memory_limit_bytes: int | None = None) -> TrialRequest:
    """A request for so many ranks, without accumulation unless the configuration says so."""
    config = config or TrainConfig(micro_batch_size=micro)
    return TrialRequest(model=model, optimizer=OptimizerConfig(), config=config, policy=policy,
                        global_batch_size=config.global_batch_size(ranks), memory_limit_bytes=memory_limit_bytes)


@contextlib.asynccontextmanager
async def group(ranks: int = 1, **options: Any) -> AsyncIterator[LocalWorkerGroup]:
    """A started group on the first devices of this machine, closed at the end."""
    launcher = LocalLauncher(device_type="cpu", **options)
    started = await launcher.start(launcher.devices()[:ranks])
    try:
        yield started
    finally:
        await started.close()


async def run_once(request: TrialRequest, *, ranks: int = 1, deadline_seconds: float = 60, **options: Any
                   ) -> TrialReport:
    """One trial on a fresh group."""
    async with group(ranks, **options) as started:
        report = await started.run(request, deadline_seconds=deadline_seconds)
        assert isinstance(report, TrialReport)
        return report


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in an event loop of its own; tasks of `tests.support.tasks` are allowed."""
    os.environ["AUTOTUNE_ALLOWED_TASKS"] = tasks.MODULE
    try:
        return asyncio.run(coroutine)
    finally:
        del os.environ["AUTOTUNE_ALLOWED_TASKS"]


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
