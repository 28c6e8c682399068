"""The operating system's side of a rank: dying with its parent, pinning, resident memory, CPU time. Linux; torch-free.

What other systems lack is left out there: no pinning, no parent watch, and resident memory unknown (0).
"""

import ctypes
import functools
import gc
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
SINGLE_BLOCK_BYTES = 256 * 2**10
"""From this size on glibc maps a block by itself, and gives it back when it is freed, in `return_blocks_at_once`."""
_LARGEST_FILLER_BYTES = 2**30
_MOST_FILLERS = 1000
_fillers: dict[int, int] = {}
"""Sizes of blocks by their address."""
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def die_with_parent(parent_pid: int, signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends; leave at once if it already has."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os._exit(1)


def prefer_for_oom_kill() -> None:
    """Have the kernel end this process before the service or a database when the host runs out of memory."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def pin_to_core(core: int) -> None:
    """Run on one core alone, threads started later included."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def give_back_memory() -> None:
    """Collect garbage and return the allocator's free pages to the system."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def return_blocks_at_once() -> None:
    """Have glibc give every larger block back when it is freed: resident memory is what is in use, at the price of
    page faults that can double the time of a step. What is free now is given back, and not used for such blocks."""
    keep_freed_blocks()
    _set_heap(mmap_threshold=SINGLE_BLOCK_BYTES, trim_threshold=16 * 2**20)
    give_back_memory()
    _occupy_gaps()


def keep_freed_blocks() -> None:
    """Have glibc keep freed memory for the next block, as it does by itself in a process that trains: these are the
    largest thresholds that it comes to (mallopt(3))."""
    _set_heap(mmap_threshold=32 * 2**20, trim_threshold=64 * 2**20)
    while _fillers:
        _libc().free(_fillers.popitem()[0])


def _set_heap(*, mmap_threshold: int, trim_threshold: int) -> None:
    with suppress(AttributeError):  # another C library
        mallopt = _libc().mallopt
        mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
        mallopt(_M_TRIM_THRESHOLD, trim_threshold)


def _occupy_gaps() -> None:
    """Take the free blocks of the heap, untouched and so without memory, lest allocations fill and keep them."""
    with suppress(AttributeError):
        libc, size = _libc(), _LARGEST_FILLER_BYTES
        while size >= SINGLE_BLOCK_BYTES:
            before = libc.mallinfo2().mapped_blocks
            filler = libc.malloc(size)
            if filler and libc.mallinfo2().mapped_blocks == before and len(_fillers) < _MOST_FILLERS:
                _fillers[filler] = size
            else:  # no gap is so large
                libc.free(filler)
                size //= 2


def bytes_in_use() -> int:
    """Bytes of the blocks that glibc has given out and not got back, gaps between them left out; else 0."""
    try:
        blocks = _libc().mallinfo2()
    except AttributeError:  # another C library
        return 0
    return int(blocks.in_use + blocks.mapped_bytes) - sum(_fillers.values())


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    with suppress(AttributeError):
        libc.mallinfo2.restype = _MallocInfo
    return libc


class _MallocInfo(ctypes.Structure):
    """mallinfo(3): number and bytes of the blocks that were mapped singly, bytes in use of the others."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "mapped_blocks", "mapped_bytes", "usmblks", "fsmblks", "in_use", "fordblks",
        "keepcost"))


class ResidentMemory(NamedTuple):
    """Resident bytes of a process, in all and at most, and the parts that are mapped files and shared memory."""

    now: int
    peak: int
    file: int
    shared: int

    @property
    def anonymous(self) -> int:
        """Memory that the process itself filled."""
        return self.now - self.file - self.shared


def resident_memory(pid: int | None = None) -> ResidentMemory:
    """Resident memory of a process, by default this one.

    Raises:
        ProcessLookupError: it is gone.
    """
    try:
        text = Path(f"/proc/{pid or 'self'}/status").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        if sys.platform != "linux":
            return ResidentMemory(0, 0, 0, 0)
        raise ProcessLookupError(f"no process {pid}") from error
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def read(name: str) -> int:
        return int(fields.get(name, "0 kB").split()[0]) * 1024

    return ResidentMemory(read("VmRSS"), read("VmHWM"), read("RssFile"), read("RssShmem"))


def reset_peak_resident() -> None:
    """Start the peak of `resident_memory` anew from what is resident now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class CpuTimes(NamedTuple):
    """Seconds up to now: of this process on any core, of its core in use by anyone, and by the clock."""

    own: float
    core_busy: float | None
    wall: float


def cpu_times(core: int | None) -> CpuTimes:
    """The present readings; `core_busy` is None where the core is not known or the system does not tell."""
    return CpuTimes(time.process_time(), None if core is None else _core_busy_seconds(core), time.perf_counter())


def _core_busy_seconds(core: int) -> float | None:
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, *fields = line.split()
        if name == f"cpu{core}":
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
            return (user + nice + system + irq + softirq + steal) / _CLOCK_TICKS
    return None


def foreign_share(before: CpuTimes, after: CpuTimes) -> float:
    """Share of the wall time in which something else ran on this process's core; 0 where that is unknown."""
    wall = after.wall - before.wall
    if before.core_busy is None or after.core_busy is None or wall <= 0:
        return 0.0
    foreign = (after.core_busy - before.core_busy) - (after.own - before.own)
    return min(max(foreign / wall, 0.0), 1.0)


CONTENTION_SHARE = 0.1
"""From this share of foreign work on a core on, a measurement counts as contended."""

CONTENTION_SECONDS = 0.05
"""Less foreign work than this is within the clock ticks that the system counts in."""


def is_contended(before: CpuTimes, after: CpuTimes) -> bool:
    """Whether something else took a noticeable part of this process's core between two readings."""
    share = foreign_share(before, after)
    return share >= CONTENTION_SHARE and share * (after.wall - before.wall) >= CONTENTION_SECONDS


def cpu_name() -> str:
    """The processor's model name, as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Hardware", "CPU part")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return os.uname().machine


def host_memory_bytes() -> int:
    """Bytes of memory that this host, or the container around us, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for limit in _cgroup_limits() if 0 < limit < total]
    return min([total, *limits])


def available_memory_bytes() -> int | None:
    """Bytes that the host can still give without swapping; None where it does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_limits() -> list[int]:
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return limits
