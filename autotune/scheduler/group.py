"""A study's worker group: warm between requests, replaced when it is not healthy any more."""

import logging
from collections.abc import Callable, Sequence

from autotune.domain.errors import LaunchError
from autotune.domain.hardware import Device
from autotune.scheduler.launcher.base import Launcher, Report, WorkerGroup, ignore_progress
from engine.report import TrialProgress, WorkerRequest

_log = logging.getLogger(__name__)

_STARTS = 2
"""How often starting a group is tried before giving up."""


class GroupKeeper:
    """The group on one set of devices; started when first needed."""

    def __init__(self, launcher: Launcher, devices: Sequence[Device]) -> None:
        self._launcher = launcher
        self._devices = tuple(devices)
        self._group: WorkerGroup | None = None

    async def run(self, request: WorkerRequest, *, deadline_seconds: float,
                  on_progress: Callable[[TrialProgress], None] = ignore_progress) -> tuple[Report, str]:
        """Have a healthy group serve the request.

        Returns:
            The report, and what the ranks printed meanwhile.

        Raises:
            LaunchError: no group could be started.
        """
        group = await self._healthy_group()
        report = await group.run(request, deadline_seconds=deadline_seconds, on_progress=on_progress)
        log = group.take_log()
        if not group.healthy:
            await self.close()
        return report, log

    async def close(self) -> None:
        """End the processes; the devices are unused when this returns."""
        if self._group is not None:
            await self._group.close()  # known until it is gone: a cancelled close can be repeated
            self._group = None

    async def _healthy_group(self) -> WorkerGroup:
        if self._group is not None and self._group.healthy:
            return self._group
        await self.close()
        for attempt in range(1, _STARTS + 1):
            try:
                self._group = await self._launcher.start(self._devices)
                return self._group
            except LaunchError as error:
                if attempt == _STARTS:
                    raise
                _log.warning("starting workers failed, trying once more: %s", error)
        raise AssertionError("unreachable")
