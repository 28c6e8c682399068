"""Worker groups on this machine: one process per rank, talked to over sockets."""

import asyncio
import logging
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from autotune.domain.errors import LaunchError
from autotune.domain.hardware import Device
from autotune.scheduler.launcher.base import Report, ignore_progress
from autotune.scheduler.launcher.devices import DeviceType, find_devices, threads_per_rank
from autotune.scheduler.launcher.rank import Event, RankGone, RankProcess
from autotune.scheduler.launcher.stragglers import (
    RENDEZVOUS,
    clear_after_dead_launchers,
    end_stragglers,
    group_directory,
)
from autotune.scheduler.launcher.watch import Watch, WatchLimits, report_of
from engine.process import available_memory_bytes, host_memory_bytes, resident_memory
from engine.report import Outcome, TrialProgress, WorkerRequest
from engine.wire import Command, RankReady, WorkerSettings

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
_TERM_SECONDS = 2.0
_LOG_TAIL_BYTES = 2000
_STACK_SECONDS = 0.2


class LocalLauncher:
    """Starts groups on the devices of this machine.

    Args:
        host: name of this machine in devices; by default its host name, which need not resolve.
        device_type: cpu, cuda, or auto: accelerators where there are any.
        log_limit_bytes: kept of what each rank prints between two calls of `take_log`.
        start_timeout_seconds: a group that is not ready by then failed to start.
        stall_seconds: a request without a sign of life for so long has timed out.

    Raises:
        LaunchError: there is no device of the type asked for.
    """

    def __init__(self, *, host: str | None = None, device_type: DeviceType = "auto", log_limit_bytes: int = 256 * 1024,
                 start_timeout_seconds: float = 120.0, stall_seconds: float = 300.0) -> None:
        found = find_devices(device_type)
        self._host = host or socket.gethostname()
        self._device_type, self._device_name = found.device_type, found.device_name
        self._devices = tuple(
            Device(host=self._host, device_type=found.device_type, index=index) for index in found.indices)
        self._log_limit_bytes = log_limit_bytes
        self._start_timeout_seconds = start_timeout_seconds
        self._stall_seconds = stall_seconds
        self._groups: list[LocalWorkerGroup] = []
        clear_after_dead_launchers()

    @property
    def host(self) -> str:
        return self._host

    @property
    def device_type(self) -> str:
        return self._device_type

    @property
    def device_name(self) -> str:
        return self._device_name

    def devices(self) -> tuple[Device, ...]:
        return self._devices

    async def start(self, devices: Sequence[Device]) -> "LocalWorkerGroup":
        """Start a group. Groups of one launcher never share a device."""
        self._require_free(devices)
        group = LocalWorkerGroup(devices, stall_seconds=self._stall_seconds)
        self._groups.append(group)
        try:
            await group.spawn(host_devices=len(self._devices), log_limit_bytes=self._log_limit_bytes,
                              start_timeout_seconds=self._start_timeout_seconds)
        except BaseException:
            await group.kill()
            raise
        return group

    def _require_free(self, devices: Sequence[Device]) -> None:
        if not devices:
            raise LaunchError("a group needs at least one device")
        if len(set(devices)) != len(devices):
            raise LaunchError("a device is named twice: one rank runs on each")
        unknown = [device for device in devices if device not in self._devices]
        if unknown:
            raise LaunchError(f"no such device on {self._host}: {unknown[0].device_type} {unknown[0].index}")
        self._groups = [group for group in self._groups if not group.gone]
        held = {device for group in self._groups for device in group.devices}
        for device in devices:
            if device in held:
                raise LaunchError(f"{device.device_type} {device.index} is still held by another group: close it first")


class LocalWorkerGroup:
    """The processes of one group."""

    def __init__(self, devices: Sequence[Device], *, stall_seconds: float) -> None:
        self.devices = tuple(devices)
        self._stall_seconds = stall_seconds
        self._ranks: list[RankProcess] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._directory = group_directory()
        self._rendezvous_file = str(self._directory / RENDEZVOUS)
        self._healthy = False
        self._closing = False
        self._gone = False

    @property
    def healthy(self) -> bool:
        return self._healthy and all(rank.alive for rank in self._ranks)

    @property
    def gone(self) -> bool:
        """Whether no process of it is left."""
        return self._gone

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(rank.pid for rank in self._ranks)

    async def spawn(self, *, host_devices: int, log_limit_bytes: int, start_timeout_seconds: float) -> None:
        """Start the processes and wait until all are ready.

        Raises:
            LaunchError: one of them is not.
        """
        for number, device in enumerate(self.devices):
            settings = WorkerSettings(
                rank=number, world_size=len(self.devices), device_type=device.device_type, device_index=device.index,
                parent_pid=0, control_fd=0, rendezvous_file=self._rendezvous_file,
                threads=threads_per_rank(device.device_type, host_devices), host_devices=host_devices)
            try:
                self._ranks.append(await RankProcess.spawn(settings, self._events, log_limit_bytes=log_limit_bytes))
            except OSError as error:
                raise LaunchError(f"cannot start a worker process: {error}") from error
        try:
            async with asyncio.timeout(start_timeout_seconds):
                await self._until_ready()
        except TimeoutError:
            raise LaunchError(f"workers were not ready within {start_timeout_seconds:g} s") from None
        self._healthy = True

    async def run(
        self, request: WorkerRequest, *, deadline_seconds: float,
        on_progress: Callable[[TrialProgress], None] = ignore_progress,
    ) -> Report:
        if not self._healthy:
            raise LaunchError("the worker group is not healthy: close it and start another")
        limit = request.memory_limit_bytes if request.kind == "trial" else None
        on_cpu = self.devices[0].device_type == "cpu"
        limits = WatchLimits(
            deadline_seconds=deadline_seconds, stall_seconds=self._stall_seconds,
            guarded_bytes=WatchLimits.guard_for(limit) if on_cpu else None,
            host_reserve_bytes=min(host_memory_bytes() // 20, 4 * 2**30))
        watch = Watch(request, len(self._ranks), limits, time.monotonic())
        self._healthy = False
        try:
            for rank in self._ranks:
                rank.send(Command(request=request, deadline_seconds=deadline_seconds))
            await self._follow(watch, on_progress)
            if watch.timed_out:
                await self._print_stacks()
        finally:
            if watch.clean:
                self._healthy = True
            else:
                await asyncio.shield(self.kill())
        assert watch.report is not None
        if watch.failure is None:
            return watch.report
        if self._closing:
            closed = replace(watch.failure, outcome=Outcome.CANCELLED, detail="the worker group was closed meanwhile")
            return report_of(closed, request, log_tail="")
        tail = self._ranks[watch.failure.rank].log.last(_LOG_TAIL_BYTES)
        return report_of(watch.failure, request, log_tail=tail)

    def take_log(self) -> str:
        texts = [(rank.rank, rank.log.take()) for rank in self._ranks]
        if len(texts) == 1:
            return texts[0][1]
        return "".join(f"--- rank {number}\n{text.rstrip()}\n" for number, text in texts if text.strip())

    async def close(self) -> None:
        self._healthy = False
        self._closing = True
        if self._gone:
            return
        for rank in self._ranks:
            rank.hang_up()
            rank.signal_group(signal.SIGTERM)
        await asyncio.gather(*(rank.wait(_TERM_SECONDS) for rank in self._ranks))
        await self.kill()

    async def kill(self) -> None:
        """End every process at once, and what they started, and wait until they are gone. May be called again."""
        self._healthy = False
        await asyncio.gather(*(rank.kill() for rank in self._ranks))
        left = await asyncio.to_thread(end_stragglers, self._rendezvous_file)
        if left:
            _log.warning("ended %d processes that the task had started and left behind", left)
        self._gone = True
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _until_ready(self) -> None:
        waiting = {rank.rank for rank in self._ranks}
        while waiting:
            number, message = await self._events.get()
            if isinstance(message, RankReady):
                waiting.discard(number)
            elif isinstance(message, RankGone):
                await self.kill()
                tail = self._ranks[number].log.last(_LOG_TAIL_BYTES)
                raise LaunchError(f"rank {number} ended while starting (exit code {message.exit_code}):\n{tail}")

    async def _follow(self, watch: Watch, on_progress: Callable[[TrialProgress], None]) -> None:
        """Feed the watch with messages and observations until it has a report."""
        pending = asyncio.ensure_future(self._events.get())
        observed_at = 0.0
        try:
            while watch.report is None:
                done, _ = await asyncio.wait({pending}, timeout=_TICK_SECONDS)
                now = time.monotonic()
                if done:
                    number, message = pending.result()
                    pending = asyncio.ensure_future(self._events.get())
                    watch.hear(number, message, now)
                    if number == 0 and isinstance(message, TrialProgress):
                        on_progress(message)
                if now - observed_at >= _TICK_SECONDS:
                    self._observe(watch, now)
                    observed_at = now
                watch.see_time(now)
        finally:
            pending.cancel()

    def _observe(self, watch: Watch, now: float) -> None:
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                watch.see_memory(rank.rank, resident_memory(rank.pid).now, now)
        available = available_memory_bytes()
        if available is not None:
            watch.see_host(available, now)

    async def _print_stacks(self) -> None:
        """Have every rank print where it is, for the log of a trial that hangs."""
        for rank in self._ranks:
            rank.signal_process(signal.SIGUSR1)
        await asyncio.sleep(_STACK_SECONDS)
