"""What the scheduler knows of the processes that run trials, wherever they are."""

from collections.abc import Callable, Sequence
from typing import Protocol

from autotune.domain.hardware import Device
from engine.report import CalibrateReport, FailureReport, ProbeReport, TrialProgress, TrialReport, WorkerRequest

Report = TrialReport | ProbeReport | CalibrateReport | FailureReport


def ignore_progress(progress: TrialProgress) -> None:
    """The listener that does not."""


class WorkerGroup(Protocol):
    """Warm processes, one rank on each device, that serve requests one after another.

    Guarantees:

    - Every request ends in a report, whatever becomes of the processes. The first line of a failure's `detail` names
      the rank that failed first and its exception, and is the same for the same failure; the log's tail follows.
    - When `run` has returned anything but a clean outcome, or was cancelled, no process of the group is alive, and
      `healthy` is False: close the group and start another.
    """

    @property
    def healthy(self) -> bool:
        """Whether the group can serve another request."""

    async def run(
        self, request: WorkerRequest, *, deadline_seconds: float,
        on_progress: Callable[[TrialProgress], None] = ignore_progress,
    ) -> Report:
        """Serve one request.

        Args:
            deadline_seconds: then the processes are killed, and the outcome is `timeout`.
            on_progress: called with what rank 0 tells, as it arrives.

        Returns:
            A `TrialReport` for a trial; for a probe or calibration its own report, or a `FailureReport`.

        Raises:
            LaunchError: the group is not healthy.
            asyncio.CancelledError: cancelled; the processes are dead.
        """

    def take_log(self) -> str:
        """What the ranks printed since the last call, bounded."""

    async def close(self) -> None:
        """End the processes, politely where possible, and wait until they are gone. May be called again."""


class Launcher(Protocol):
    """Starts worker groups."""

    @property
    def host(self) -> str:
        """Name of the host that the devices belong to."""

    @property
    def device_type(self) -> str:
        """cpu, cuda, ..."""

    @property
    def device_name(self) -> str:
        """What the device is sold as."""

    def devices(self) -> tuple[Device, ...]:
        """All devices that groups can be started on, held or not."""

    async def start(self, devices: Sequence[Device]) -> WorkerGroup:
        """Start a group with one rank on each device, in this order.

        Raises:
            LaunchError: it did not come up; nothing is left of it.
        """
