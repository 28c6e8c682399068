"""Peak bytes of a trial, measured: by the accelerator's allocator, or on CPU by the process's resident memory."""

from typing import Protocol

import torch

from engine.errors import DeviceMemoryLimitError
from engine.process import (
    bytes_in_use,
    give_back_memory,
    keep_freed_blocks,
    reset_peak_resident,
    resident_memory,
    return_blocks_at_once,
)

LEFT_BEHIND_BYTES = 48 * 2**20
"""A trial that leaves more than this behind makes its worker unfit for the next."""


_GROWTH = 1.0
"""From step to step the gaps of a heap grow by less than this share of what is in use; two thirds were seen."""

_LEAST_GROWTH_BYTES = 64 * 2**20

_NEW_NEED_SHARE, _LEAST_NEW_NEED_BYTES, _NEW_NEED_BYTES = 0.1, 8 * 2**20, 64 * 2**20
"""What is in use when a phase ends has no gaps, and is as much in each step: so much more, of what it was when watched
or in bytes, is a need that was not watched. Less than the few megabytes that code takes is none."""


class MemoryMeter(Protocol):
    """Measures while it watches, from `start` on. Bytes that were there before do not count."""

    def start(self, limit_bytes: int | None) -> None:
        """Forget earlier peaks, and watch; from now on a device may hold `limit_bytes`."""

    def watch(self) -> None:
        """What comes next may need more than what has been."""

    def rest(self) -> None:
        """What comes next should need no more than what has been, and shall take no longer than without a meter."""

    def look(self) -> None:
        """Something else begins now: what ranks share may be taken and given back."""

    def end_phase(self) -> None:
        """A phase of a step is over: as `look`, and notes how much is in use, at rest too."""

    def has_grown(self) -> bool:
        """Whether what came at rest needed more than what was watched, so that the like is to be watched."""

    def peak_device_bytes(self, *, host_bytes: int, shared_bytes: int) -> int:
        """The most that was in use at once while the meter watched.

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

    While it watches, the allocator gives back what is freed: by itself it keeps a heap whose gaps make peaks of equal
    trials differ by 6 to 12 %; so they agree within 1 %. As that takes time, it does not while the meter rests. The
    first peak at rest then stands for the watched one, gaps and all, and what later ones are beyond it counts if it is
    more than gaps explain. Less shows in what is in use when a phase ends, and is to be watched.
    """

    def __init__(self) -> None:
        self._baseline_bytes = self._shared_bytes = 0
        self._peak_bytes = self._watched_bytes = 0
        self._rested_bytes: int | None = None
        self._baseline_in_use = self._watched_in_use = self._rested_in_use = 0
        self._watches = False

    def start(self, limit_bytes: int | None) -> None:
        self.watch()
        self._baseline_bytes, self._peak_bytes = resident_memory().anonymous, 0
        self._watched_in_use = self._rested_in_use = self._baseline_in_use = bytes_in_use()

    def watch(self) -> None:
        return_blocks_at_once()
        reset_peak_resident()
        self._shared_bytes, self._watches = resident_memory().shared, True
        self._watched_in_use = max(self._watched_in_use, self._rested_in_use)

    def rest(self) -> None:
        self.look()
        keep_freed_blocks()
        self._watched_bytes, self._rested_bytes, self._watches = self._peak_bytes, None, False

    def look(self) -> None:
        if self._watches:
            self._peak_bytes = max(self._peak_bytes, self._peak_since_last())

    def end_phase(self) -> None:
        self.look()
        if self._watches:
            self._watched_in_use = max(self._watched_in_use, bytes_in_use())
        else:
            self._rested_in_use = max(self._rested_in_use, bytes_in_use())

    def has_grown(self) -> bool:
        share = max(_NEW_NEED_SHARE * (self._watched_in_use - self._baseline_in_use), _LEAST_NEW_NEED_BYTES)
        return self._rested_in_use - self._watched_in_use > min(share, _NEW_NEED_BYTES)

    def peak_device_bytes(self, *, host_bytes: int, shared_bytes: int) -> int:
        self.look()
        if not self._watches:
            self._look_at_rest()
        return max(self._peak_bytes - self._baseline_bytes - host_bytes, 0) + shared_bytes

    def finish(self) -> int:
        self._watches = False
        keep_freed_blocks()
        give_back_memory()
        return max(resident_memory().anonymous - self._baseline_bytes, 0)

    def _look_at_rest(self) -> None:
        peak = self._peak_since_last()
        if self._rested_bytes is None:
            self._rested_bytes = peak
        beyond = peak - self._rested_bytes
        explained = max(_LEAST_GROWTH_BYTES, _GROWTH * (self._watched_bytes - self._baseline_bytes))
        if beyond > explained and not self.has_grown():  # which is to be watched
            self._peak_bytes = max(self._peak_bytes, self._watched_bytes + beyond)

    def _peak_since_last(self) -> int:
        memory, before = resident_memory(), self._shared_bytes
        reset_peak_resident()
        self._shared_bytes = memory.shared
        return memory.peak - memory.file - max(before, memory.shared)


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

    def watch(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def look(self) -> None:
        pass

    def end_phase(self) -> None:
        pass

    def has_grown(self) -> bool:
        return False

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
