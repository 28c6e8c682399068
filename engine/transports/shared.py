"""Messages between ranks of one host that stay where the sender has them: only a note of the place is sent."""

import itertools
import mmap
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from engine.shared_memory import Segment, SharedMemory
from engine.transports.pairwise import Message

_HEADER = mmap.PAGESIZE
"""Bytes before an outbox: how many releases the rank it belongs to has counted."""

_ALIGNMENT = 64
"""Bytes that messages begin at multiples of."""

_ELSEWHERE = -1
"""In place of a segment's number: the message itself follows through the socket."""


class SharedCarrier:
    """Sends a note of where a message lies; one that lies in no shared segment follows through the socket.

    Notes go through gloo, which orders memory between the processes, waits with a timeout, and notices ranks that end.

    Attributes:
        bytes: of this rank's own segments, and its part of common ones.
    """

    def __init__(self, group: dist.ProcessGroup, memory: SharedMemory) -> None:
        self._group, self._memory = group, memory
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._segments: list[list[Segment]] = []
        self._outbox: _Outbox | None = None
        self._tag = 0
        self.bytes = 0

    def mirrored(self, sizes: Sequence[int]) -> list[Tensor]:
        """Tensors of so many bytes that messages are sent from without a copy. Collective."""
        self._segments.append(self._memory.mirrored(_total(sizes)))
        self.bytes += _total(sizes)
        return _cut(self._segments[-1][self._rank].data, sizes)

    def common(self, sizes: Sequence[int]) -> list[Tensor]:
        """Tensors of so many bytes that all ranks read and write. Collective."""
        self.bytes += _total(sizes) // self._size
        return _cut(self._memory.common(_total(sizes)).data, sizes)

    def reserve(self, size: int) -> None:
        self.mirrored([_HEADER, size])
        self._outbox = _Outbox(self._segments[-1], self._rank)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        place = self._outbox.take(numel * dtype.itemsize) if self._outbox else None
        return torch.empty(numel, dtype=dtype) if place is None else place.view(dtype)

    def discard(self, memory: Tensor) -> None:
        if self._outbox is not None:
            self._outbox.discard(memory)

    def staged(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        if values.dtype == dtype and self.sends_in_place(values):
            return values
        staged = self.empty(values.numel(), dtype).copy_(values)
        self.discard(values)
        return staged

    def sends_in_place(self, values: Tensor) -> bool:
        return self._place(values)[0] != _ELSEWHERE

    def exchange(self, to_peers: Sequence[Tensor], destinations: Sequence[Tensor] | None = None) -> list[Message]:
        self._tag = (self._tag + 2) % 2**24
        messages: list[Message] = []
        for step, sent in enumerate(to_peers):
            peer, source = (self._rank + step + 1) % self._size, (self._rank - step - 1) % self._size
            place = torch.tensor(self._place(sent))
            works = [dist.isend(place, group=self._group, group_dst=peer, tag=self._tag)]
            if place[0] == _ELSEWHERE:
                works.append(dist.isend(sent, group=self._group, group_dst=peer, tag=self._tag + 1))
            messages.append(_SharedMessage(self, source, tag=self._tag, sent=(place, sent), works=works,
                                           destination=None if destinations is None else destinations[step]))
        return messages

    def release(self, staged: Tensor, *, keep: bool = False) -> None:
        if self._outbox is not None:
            self._outbox.release(staged, keep=keep)

    def trim(self) -> None:
        """Give back the memory of messages while none is on its way on any rank."""
        if self._outbox is not None:
            self._outbox.trim()

    def receive(self, values: Tensor, source: int, tag: int) -> dist.Work | None:
        return dist.irecv(values, group=self._group, group_src=source, tag=tag)

    def read(self, segment: int, source: int, first: int, like: Tensor) -> Tensor:
        """What lies in another rank's segment, as a tensor like `like`."""
        return self._segments[segment][source].data[first:first + like.nbytes].view(like.dtype)

    def _place(self, values: Tensor) -> tuple[int, int]:
        """(segment, first byte)."""
        address = values.data_ptr()
        for number, segments in enumerate(self._segments):
            first = address - segments[self._rank].data.data_ptr()
            if 0 <= first < segments[self._rank].data.numel():
                return number, first
        return _ELSEWHERE, 0


def _total(sizes: Sequence[int]) -> int:
    """Bytes of a segment for tensors of these sizes, each aligned; never none."""
    return sum(_aligned(size) for size in sizes) or _ALIGNMENT


def _cut(segment: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = itertools.accumulate(_aligned(size) for size in sizes)
    return [segment[end - _aligned(size):][:size] for size, end in zip(sizes, ends, strict=True)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _SharedMessage:
    """Also keeps what is sent the other way until it was."""

    def __init__(self, carrier: SharedCarrier, source: int, *, tag: int, sent: tuple[Tensor, Tensor],
                 works: list[dist.Work | None], destination: Tensor | None) -> None:
        self._carrier, self._source, self._tag, self._sent = carrier, source, tag, sent
        self._destination, self._works = destination, works
        self._note = torch.empty(2, dtype=torch.int64)
        self._noted = carrier.receive(self._note, source, tag)

    def wait(self) -> Tensor:
        _finish([self._noted])
        like, (segment, first) = self._sent[1], self._note.tolist()
        if segment != _ELSEWHERE:
            _finish(self._works)
            return self._carrier.read(segment, self._source, first, like)
        values = torch.empty_like(like) if self._destination is None else self._destination
        # What this rank sends the other way ends only when the other one receives it, which may be here in turn.
        _finish([self._carrier.receive(values, self._source, self._tag + 1), *self._works])
        return values


def _finish(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


class _Outbox:
    """Parts of a segment, free again when every rank has read what was sent from them.

    Ranks release the same messages in the same order, and count them where the others see it: what this rank released
    as its n-th, another has read when that one's count is n.
    """

    def __init__(self, segments: Sequence[Segment], rank: int) -> None:
        self._counts = [segment.data[:8].view(torch.int64) for segment in segments]
        self._segment, self._rank = segments[rank], rank
        self._memory = self._segment.data[_HEADER:]
        self._free = [(0, self._memory.numel())]
        self._stops: dict[int, int] = {}  # of parts in use, by start
        self._kept: dict[int, int] = {}  # counts of released parts that this rank goes on using, by start
        self._released: deque[tuple[int, int]] = deque()
        self._count = 0

    def take(self, size: int) -> Tensor | None:
        """The first `size` bytes that are free; None where there are none."""
        self._reclaim()
        aligned = _aligned(size) or _ALIGNMENT
        for number, (start, stop) in enumerate(self._free):
            if stop - start >= aligned:
                self._free[number:number + 1] = [(start + aligned, stop)] if start + aligned < stop else []
                self._stops[start] = start + aligned
                return self._memory[start:start + size]
        return None

    def discard(self, memory: Tensor) -> None:
        start = self._start(memory)
        if start in self._kept:
            self._released.append((self._kept.pop(start), start))
        elif start in self._stops:
            self._return(start)

    def release(self, memory: Tensor, *, keep: bool) -> None:
        self._count += 1
        self._counts[self._rank][0] = self._count
        start = self._start(memory)
        if start in self._stops:
            if keep:
                self._kept[start] = self._count
            else:
                self._released.append((self._count, start))

    def trim(self) -> None:
        self._segment.empty(_HEADER)

    def _start(self, memory: Tensor) -> int:
        return memory.data_ptr() - self._memory.data_ptr()

    def _reclaim(self) -> None:
        read = min(int(count) for count in self._counts)
        while self._released and self._released[0][0] <= read:
            self._return(self._released.popleft()[1])

    def _return(self, start: int) -> None:
        """Free again, joined with what is free beside it."""
        merged: list[tuple[int, int]] = []
        for part in sorted([*self._free, (start, self._stops.pop(start))]):
            if merged and merged[-1][1] == part[0]:
                merged[-1] = (merged[-1][0], part[1])
            else:
                merged.append(part)
        self._free = merged
