"""Requests run one after another in warm workers, as a study runs its trials."""

from collections.abc import AsyncGenerator, Iterable

from autotune.scheduler.launcher.base import Report, WorkerGroup
from autotune.scheduler.launcher.local import LocalLauncher
from engine.config import OptimizerConfig, TrainConfig
from engine.report import MeasurePolicy, TrialRequest, WorkerRequest
from engine.spec import ModelSpec

DEADLINE_SECONDS = 300.0


def trial(model: ModelSpec, config: TrainConfig, policy: MeasurePolicy, *, devices: int = 1) -> TrialRequest:
    """One configuration on so many devices."""
    return TrialRequest(model=model, optimizer=OptimizerConfig(), config=config, policy=policy,
                        global_batch_size=config.global_batch_size(devices))


async def reports(launcher: LocalLauncher, requests: Iterable[WorkerRequest], *,
                  devices: int = 1) -> AsyncGenerator[Report]:
    """Each request's report, as it comes; a group that a request spoiled is replaced before the next.

    Raises:
        LaunchError: there are not so many free devices, or their ranks do not start.
    """
    group: WorkerGroup | None = None
    try:
        for request in requests:
            if group is not None and not group.healthy:
                await group.close()
                group = None
            if group is None:
                group = await launcher.start(launcher.devices()[:devices])
            yield await group.run(request, deadline_seconds=DEADLINE_SECONDS)
    finally:
        if group is not None:
            await group.close()
