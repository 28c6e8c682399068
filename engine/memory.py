"""Peak bytes of a trial, measured: by the accelerator's allocator, or on CPU by the process's resident memory."""

from typing import Protocol

import torch

from engine.errors import DeviceMemoryLimitError
from engine.process import give_back_memory, reset_peak_resident, resident_memory

LEFT_BEHIND_BYTES = 48 * 2**20
"""A trial that leaves more than this behind makes its worker unfit for the next."""


class MemoryMeter(Protocol):
    """Measures from `start` on. Bytes that were there before do not count."""

    def start(self, limit_bytes: int | None) -> None:
        """Forget earlier peaks; from now on a device may hold `limit_bytes`."""

    def look(self) -> None:
        """Something else begins now: what ranks share may be taken and given back."""

    def peak_device_bytes(self, *, host_bytes: int, shared_bytes: int) -> int:
        """The most that was in use at once since `start`.

        Args:
            host_bytes: of offloaded state, which lies in the same memory on CPU and is counted apart.
            shared_bytes: this rank's part of memory that ranks share, held throughout.
        """

    def finish(self) -> int:
        """Give back what is free, lift the limit, and tell how many bytes are still held since `start`."""


def meter_for(device: torch.device) -> MemoryMeter:
    return ResidentMeter() if device.type == "cpu" else AcceleratorMeter(device)


def check_limit(peak_bytes: int, limit_bytes: int | None) -> None:
    """Hold a peak against the limit.

    Raises:
        DeviceMemoryLimitError: it is exceeded.
    """
    if limit_bytes is not None and peak_bytes > limit_bytes:
        raise DeviceMemoryLimitError(f"peak of {peak_bytes} device bytes exceeds the memory limit of {limit_bytes}")


class ResidentMeter:
    """Resident memory that this process filled itself.

    The kernel keeps the peak of all resident pages. Those of files, such as library code that is touched for the first
    time, hardly ever shrink, and are taken off as they stand afterwards. Those of memory that ranks share, where a
    rank's pages are the other ranks' too, come and go within a step: peaks are taken between two looks, and the most of
    such pages at either is taken off, which is exact where they were as many throughout, and never too little.
    """

    def __init__(self) -> None:
        self._baseline_bytes = self._peak_bytes = self._shared_bytes = 0

    def start(self, limit_bytes: int | None) -> None:
        give_back_memory()
        reset_peak_resident()
        memory = resident_memory()
        self._baseline_bytes, self._shared_bytes, self._peak_bytes = memory.anonymous, memory.shared, 0

    def look(self) -> None:
        memory, before = resident_memory(), self._shared_bytes
        reset_peak_resident()
        self._shared_bytes = memory.shared
        self._peak_bytes = max(self._peak_bytes, memory.peak - memory.file - max(before, memory.shared))

    def peak_device_bytes(self, *, host_bytes: int, shared_bytes: int) -> int:
        self.look()
        return max(self._peak_bytes - self._baseline_bytes - host_bytes, 0) + shared_bytes

    def finish(self) -> int:
        give_back_memory()
        return max(resident_memory().anonymous - self._baseline_bytes, 0)


class AcceleratorMeter:
    """The caching allocator's own statistics."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._baseline_bytes = 0

    def start(self, limit_bytes: int | None) -> None:
        give_back_memory()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._baseline_bytes = torch.accelerator.memory_allocated(self._device)
        if limit_bytes is not None:
            self._limit(min(limit_bytes / self._total_bytes(), 1.0))

    def look(self) -> None:
        pass

    def peak_device_bytes(self, *, host_bytes: int, shared_bytes: int) -> int:
        return max(torch.accelerator.max_memory_allocated(self._device) - self._baseline_bytes, 0)

    def finish(self) -> int:
        give_back_memory()
        torch.accelerator.empty_cache()
        self._limit(1.0)
        return max(torch.accelerator.memory_allocated(self._device) - self._baseline_bytes, 0)

    def _limit(self, fraction: float) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def _total_bytes(self) -> int:
        return int(torch.accelerator.get_memory_info(self._device)[1])
