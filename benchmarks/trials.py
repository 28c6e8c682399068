"""Requests run one after another in a warm worker on one device, as a study runs its trials."""

from collections.abc import AsyncGenerator, Iterable

from autotune.scheduler.launcher.base import Report, WorkerGroup
from autotune.scheduler.launcher.local import LocalLauncher
from engine.config import OptimizerConfig, TrainConfig
from engine.report import MeasurePolicy, TrialRequest, WorkerRequest
from engine.spec import ModelSpec

DEADLINE_SECONDS = 300.0


def trial(model: ModelSpec, config: TrainConfig, policy: MeasurePolicy) -> TrialRequest:
    """One configuration on one device."""
    return TrialRequest(model=model, optimizer=OptimizerConfig(), config=config, policy=policy,
                        global_batch_size=config.global_batch_size(1))


async def reports(launcher: LocalLauncher, requests: Iterable[WorkerRequest]) -> AsyncGenerator[Report]:
    """Each request's report, as it comes; a worker that a request spoiled is replaced before the next."""
    group: WorkerGroup | None = None
    try:
        for request in requests:
            if group is not None and not group.healthy:
                await group.close()
                group = None
            if group is None:
                group = await launcher.start(launcher.devices()[:1])
            yield await group.run(request, deadline_seconds=DEADLINE_SECONDS)
    finally:
        if group is not None:
            await group.close()
