"""The devices of this host, found without loading torch."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

from autotune.domain.errors import LaunchError
from engine.process import cpu_name

DeviceType = Literal["auto", "cpu", "cuda"]


class HostDevices(NamedTuple):
    """Devices of one kind."""

    device_type: str
    device_name: str
    indices: tuple[int, ...]


def find_devices(device_type: DeviceType = "auto") -> HostDevices:
    """The accelerators of this host where there are any, else its cores; or what is asked for.

    Raises:
        LaunchError: cuda was asked for and there is no such device.
    """
    if device_type != "cpu":
        names = _cuda_names()
        if names:
            return HostDevices("cuda", names[0], tuple(range(len(names))))
        if device_type == "cuda":
            raise LaunchError("no CUDA device found: nvidia-smi lists none, or CUDA_VISIBLE_DEVICES hides them")
    return HostDevices("cpu", cpu_name(), _cores())


def threads_per_rank(device_type: str, host_devices: int) -> int:
    """On CPU a device is a core and has one thread; beside an accelerator, its share of the host's cores."""
    return 1 if device_type == "cpu" else max(len(_cores()) // max(host_devices, 1), 1)


def _cores() -> tuple[int, ...]:
    """Cores that this process may use, as many as a container's quota pays for."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = _cpu_quota()
    return tuple(cores if quota is None else cores[: max(int(quota), 1)])


def _cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        return limit / int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()) if limit > 0 else None
    except (OSError, ValueError):
        return None


def _cuda_names() -> list[str]:
    """Names of the visible CUDA devices, in the order in which a worker numbers them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return []
    names = [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    return [names[int(part)] if part.isdigit() and int(part) < len(names) else names[0]
            for part in chosen if part != "-1"] if names else []
