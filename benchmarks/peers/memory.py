"""A process's memory, told without the help of the engine in it: a preloaded counter's heap, the kernel's mappings."""

import ctypes
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.values import Segment

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (?P<mode>\S{4}) [0-9a-f]+ (?P<device>\S+) (?P<inode>\d+) *(?P<path>.*)$")
_PROPORTIONAL = re.compile(r"^Pss: +(?P<kib>\d+) kB$")
_SHARED_MEMORY = re.compile(r"^/dev/shm/|^/memfd:|^/SYSV|^/dev/zero| \(deleted\)$")
"""Shared mappings of other files are the page cache's."""


class HeapCounter:
    """The counter of `heap_counter.c` in this process.

    Raises:
        RuntimeError: it is not preloaded.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        try:
            for name in ("heap_live_bytes", "heap_peak_bytes"):
                getattr(self._library, name).restype = ctypes.c_long
        except AttributeError as error:
            raise RuntimeError("the heap counter is not loaded: LD_PRELOAD must name it") from error

    def live_bytes(self) -> int:
        return int(self._library.heap_live_bytes())

    def peak_bytes(self) -> int:
        """The most that was live since the last `reset_peak`."""
        return int(self._library.heap_peak_bytes())

    def reset_peak(self) -> None:
        self._library.heap_reset_peak()


def shared_segments() -> list[Segment]:
    """The shared memory that this process maps now."""
    segments = parse_smaps(Path("/proc/self/smaps").read_text())
    return [replace(segment, allocated_bytes=_allocated_bytes(segment)) for segment in segments]


def parse_smaps(text: str) -> list[Segment]:
    """The shared memory in the text of a process's `/proc/.../smaps`, one entry for each file."""
    segments: dict[tuple[str, int], Segment] = {}
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


def shared_bytes(ranks: Sequence[Iterable[Segment]]) -> int:
    """Bytes of all distinct segments that the ranks map, each counted once.

    A file may hold pages that nobody has mapped, because they were written and not touched since: they count too.
    """
    proportional: dict[tuple[str, int], int] = {}
    allocated: dict[tuple[str, int], int] = {}
    for segment in (segment for segments in ranks for segment in segments):
        proportional[segment.key] = proportional.get(segment.key, 0) + segment.proportional_bytes
        allocated[segment.key] = max(allocated.get(segment.key, 0), segment.allocated_bytes)
    return sum(max(proportional[key], allocated[key]) for key in proportional)


def _allocated_bytes(segment: Segment) -> int:
    with suppress(OSError):
        status = os.stat(segment.path)
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        if (device, status.st_ino) == segment.key:
            return status.st_blocks * 512
    return 0
