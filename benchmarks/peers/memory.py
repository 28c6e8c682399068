"""A process's memory, told without the help of the engine in it: the heap by a preloaded counter, else by the kernel.

The heap's peaks are exact. Shared memory is what files in memory hold (memfd, /dev/shm), mapped or written: cheap to
ask for as long as they are open, so it is followed while an engine trains, because what is given back within a step
cannot be seen after it. Mappings whose file is closed are found in smaps, between steps.
"""

import ctypes
import os
import re
import stat
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.values import Key, MemoryPeaks, RankReady, Segment

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (?P<mode>\S{4}) [0-9a-f]+ (?P<device>\S+) (?P<inode>\d+) *(?P<path>.*)$")
_PROPORTIONAL = re.compile(r"^Pss: +(?P<kib>\d+) kB$")
_SHARED_MEMORY = re.compile(r"^/dev/shm/|^/memfd:|^/SYSV|^/dev/zero| \(deleted\)$")
"""Shared mappings of other files are the page cache's."""
_TICK_SECONDS = 0.001


class HeapCounter:
    """The counter of `heap_counter.c` in this process.

    Raises:
        RuntimeError: it is not preloaded.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        try:
            for name in ("heap_live_bytes", "heap_take_peak_bytes"):
                getattr(self._library, name).restype = ctypes.c_long
        except AttributeError as error:
            raise RuntimeError("the heap counter is not loaded: LD_PRELOAD must name it") from error

    def live_bytes(self) -> int:
        return int(self._library.heap_live_bytes())

    def take_peak_bytes(self) -> int:
        """The most that was live since the last call."""
        return int(self._library.heap_take_peak_bytes())


class MemoryWatch:
    """Follows heap and shared memory together, from `start` to `stop`, by a thread of its own.

    Between two looks, which are about a millisecond apart, the heap's exact peak is held to meet the larger of the two
    amounts of shared memory.

    Args:
        heap: this process's.
        base_bytes: of the heap, which do not count.
        ranks: that share memory evenly.
        known: files in memory that do not count.
    """

    def __init__(self, heap: HeapCounter, *, base_bytes: int, ranks: int, known: frozenset[Key]) -> None:
        self._heap, self._base, self._ranks, self._known = heap, base_bytes, ranks, known
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._stopping = threading.Event()
        self._peaks = MemoryPeaks()
        self._shared = 0

    def start(self) -> None:
        self._shared = self._share()
        self._heap.take_peak_bytes()
        self._thread.start()

    def stop(self) -> MemoryPeaks:
        self._stopping.set()
        self._thread.join()
        self._look()
        return self._peaks

    def _follow(self) -> None:
        while not self._stopping.wait(_TICK_SECONDS):
            self._look()

    def _look(self) -> None:
        before, self._shared = self._shared, self._share()
        self._peaks = self._peaks.with_interval(
            heap_bytes=self._heap.take_peak_bytes() - self._base, shared_bytes=max(before, self._shared))

    def _share(self) -> int:
        return sum(size for key, size in open_files_in_memory().items() if key not in self._known) // self._ranks


def open_files_in_memory() -> dict[Key, int]:
    """Bytes held by the memfd and /dev/shm files that this process has open, by file."""
    sizes = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.stat(f"/proc/self/fd/{descriptor}")
            if stat.S_ISREG(status.st_mode) and status.st_dev in _DEVICES_IN_MEMORY:
                sizes[_key(status)] = status.st_blocks * 512
    return sizes


def mapped_segments() -> list[Segment]:
    """The shared memory that this process maps now."""
    return parse_smaps(Path("/proc/self/smaps").read_text())


def parse_smaps(text: str) -> list[Segment]:
    """The shared memory in the text of a process's `/proc/.../smaps`, one entry for each file."""
    segments: dict[Key, Segment] = {}
    current: Segment | None = None
    for line in text.splitlines():
        if mapping := _MAPPING.match(line):
            key = (mapping["device"], int(mapping["inode"]))
            current = None
            if mapping["mode"].endswith("s") and _SHARED_MEMORY.search(mapping["path"]):
                current = segments.get(key, Segment(key=key, path=mapping["path"], proportional_bytes=0))
        elif current and (pages := _PROPORTIONAL.match(line)):
            segments[current.key] = replace(
                current, proportional_bytes=current.proportional_bytes + int(pages["kib"]) * 1024)
    return list(segments.values())


def closed_bytes(ranks: Sequence[Iterable[Segment]]) -> int:
    """Bytes of all segments that ranks map and whose files none of them has open, each counted once."""
    mapped = [segment for segments in ranks for segment in segments]
    followed = {segment.key for segment in mapped if segment.is_open}
    return sum(segment.proportional_bytes for segment in mapped if segment.key not in followed)


def join_peaks(ranks: Sequence[RankReady]) -> MemoryPeaks:
    """The peaks of the ranks that need most, with an even share of segments that could not be followed."""
    closed = closed_bytes([rank.segments for rank in ranks]) // len(ranks)
    return MemoryPeaks(heap_bytes=max(rank.peaks.heap_bytes for rank in ranks),
                       shared_bytes=max(rank.peaks.shared_bytes for rank in ranks) + closed,
                       together_bytes=max(rank.peaks.together_bytes for rank in ranks) + closed)


def _key(status: os.stat_result) -> Key:
    """As smaps writes it."""
    return (f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino)


def _devices_in_memory() -> frozenset[int]:
    descriptor = os.memfd_create("probe")
    try:
        return frozenset((os.fstat(descriptor).st_dev, os.stat("/dev/shm").st_dev))
    finally:
        os.close(descriptor)


_DEVICES_IN_MEMORY = _devices_in_memory()
