"""Memory that the ranks of one host all map.

Segments are anonymous files: they have no name that could be left behind, no limit but the host's memory, and go with
the last process that maps them.
"""

import itertools
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GatherObjects = Callable[[Any], list[Any]]
"""Every rank's picklable value, in rank order. Collective."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of memory that several processes map; zeros at first.

    Attributes:
        data: (size,) bytes.
    """

    data: Tensor
    _map: mmap.mmap

    def part(self, start: int, size: int) -> Tensor:
        """(size,) of its bytes, as a storage of its own: saving a tensor of them saves no others."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start) if size else self.data[:0]

    def words(self) -> "memoryview[int]":
        """It as 64-bit numbers, each of which is read and written whole."""
        return memoryview(self._map).cast("q")

    def clear(self) -> None:
        """Give the memory back to the host until it is used again; it is zeros afterwards."""
        self._map.madvise(mmap.MADV_REMOVE)


_numbers = itertools.count()


class SharedMemory:
    """Makes segments. Made by `share_memory`.

    Attributes:
        number: another one for each made by the first rank's process; equal on all ranks.
    """

    def __init__(self, gather: GatherObjects, *, rank: int) -> None:
        self._gather, self._rank = gather, rank
        members = gather((os.getpid(), next(_numbers)))
        self._pids: list[int] = [pid for pid, _ in members]
        self.number: int = members[0][1]

    def is_alive(self, rank: int) -> bool:
        """Whether a rank's process still runs."""
        try:
            status = Path(f"/proc/{self._pids[rank]}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] not in ("Z", "X")

    def mirrored(self, size: int) -> list[Segment]:
        """A segment of `size` bytes for each rank, all mapped here, by rank. Collective; `size` is equal everywhere.

        Raises:
            RuntimeError: on every rank, when one cannot map another's.
        """
        return self._open(size, makers=None)

    def common(self, size: int) -> Segment:
        """One segment of `size` bytes for all ranks. Collective.

        Raises:
            RuntimeError: on every rank, when one cannot map it.
        """
        return self._open(size, makers=(0,))[0]

    def _open(self, size: int, *, makers: Sequence[int] | None) -> list[Segment]:
        descriptor, problem = None, ""
        try:
            if makers is None or self._rank in makers:
                try:
                    descriptor = os.memfd_create("engine")
                    os.ftruncate(descriptor, size)
                except OSError as error:
                    problem = f"rank {self._rank}: {error}"
            descriptors = self._gather(descriptor)
            segments = []
            try:
                segments = [_map(pid, number, size) for pid, number in zip(self._pids, descriptors, strict=True)
                            if number is not None]
            except (OSError, ValueError) as error:
                problem = problem or f"rank {self._rank}: {error}"
            # Also keeps every segment's descriptor open until all have mapped it.
            problems = [text for text in self._gather(problem) if text]
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if problems:
            raise RuntimeError(f"cannot map {size} bytes that ranks share: {problems[0]}")
        return segments


def share_memory(gather: GatherObjects, *, rank: int, allowed: bool) -> SharedMemory | None:
    """Memory shared among all ranks; None on every rank where some cannot map another's or may not. Collective."""
    memory, mark = SharedMemory(gather, rank=rank), secrets.token_bytes(16)
    marks = gather(mark if allowed and hasattr(os, "memfd_create") else None)
    if None in marks:
        return None
    with suppress(RuntimeError):
        segments = memory.mirrored(mmap.PAGESIZE)
        segments[rank].data[:len(mark)] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
        gather(None)
        # Process numbers may mean other processes here: ranks in containers of their own.
        same = all(bytes(segment.data[:len(mark)].tolist()) == theirs
                   for segment, theirs in zip(segments, marks, strict=True))
        return memory if all(gather(same)) else None
    return None


def _map(pid: int, descriptor: int, size: int) -> Segment:
    """A segment made by a process of this host."""
    ours = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        memory = mmap.mmap(ours, size)
        return Segment(torch.frombuffer(memory, dtype=torch.uint8), memory)
    finally:
        os.close(ours)
