"""Messages between ranks of one host that stay where the sender has them: only a note of the place is sent."""

import itertools
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from engine.shared_memory import Segment, SharedMemory
from engine.transports.mailbox import Mailbox
from engine.transports.pairwise import Message

_SMALL_BYTES = 1 << 14
_SMALL_ROOMS = 4
"""Beside those reserved, for the few numbers that ranks agree on."""

_ALIGNMENT = 64
"""Bytes that messages begin at multiples of."""

_ROOMS = 0
"""The number of the segment with the rooms."""

_ELSEWHERE = -1
"""In place of a segment's number: the message itself follows through the socket."""

_TAGS = 2**12
"""Of the messages that one carrier may have in a socket at once; several may share a group."""


class SharedCarrier:
    """Sends a note of where a message lies; one that lies in no shared segment follows through the socket.

    Attributes:
        bytes: of this rank's own segments, and its part of common ones.
    """

    def __init__(self, group: dist.ProcessGroup, memory: SharedMemory) -> None:
        self._group, self._memory = group, memory
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._mailbox = Mailbox(memory, size=self._size, rank=self._rank, timeout=_timeout_seconds(group))
        self._segments: dict[int, list[Segment]] = {}
        self._outbox: _Outbox | None = None
        self.bytes = 0

    def mirrored(self, sizes: Sequence[int]) -> list[Tensor]:
        """Tensors of so many bytes that messages are sent from without a copy. Collective."""
        return self._mirrored(1 + len(self._segments), sizes)

    def common(self, sizes: Sequence[int]) -> list[Tensor]:
        """Tensors of so many bytes that all ranks read and write. Collective."""
        self.bytes += _total(sizes) // self._size
        return _cut(self._memory.common(_total(sizes)), sizes)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make rooms of so many bytes for messages, in place of those there are. Collective, equal everywhere.

        No message from them may be on its way; sums that lie in them are good for as long as something refers to them.
        """
        released = 0
        if self._outbox is not None:
            self.bytes -= self._segments[_ROOMS][self._rank].data.nbytes
            released = self._outbox.count
        rooms = self._mirrored(_ROOMS, [*sizes, *[_SMALL_BYTES] * _SMALL_ROOMS])
        self._outbox = _Outbox(self._segments[_ROOMS][self._rank], rooms, self._mailbox, released=released)

    def leave(self) -> None:
        """Tell the others that nothing more comes from this rank."""
        self._mailbox.leave()

    def room(self, number: int, numel: int, dtype: torch.dtype) -> Tensor | None:
        """(numel,) in a room, while it is used for nothing else; None where it is, or is too small."""
        place = self._outbox.take(number, numel * dtype.itemsize) if self._outbox else None
        return None if place is None else place.view(dtype)

    def discard(self, memory: Tensor) -> None:
        """This rank uses a room no more."""
        if self._outbox is not None:
            self._outbox.discard(memory)

    def staged(self, values: Tensor) -> Tensor:
        rooms = (self.room(-number, values.numel(), values.dtype) for number in range(1, _SMALL_ROOMS + 1))
        room = next((room for room in rooms if room is not None), None)
        return values.clone() if room is None else room.copy_(values)

    def sends_in_place(self, values: Tensor) -> bool:
        return self._place(values)[0] != _ELSEWHERE

    def exchange(self, to_peers: Sequence[Tensor], destinations: Sequence[Tensor] | None = None) -> list[Message]:
        messages: list[Message] = []
        for step, sent in enumerate(to_peers):
            peer, source = (self._rank + step + 1) % self._size, (self._rank - step - 1) % self._size
            segment, first = self._place(sent)
            number, sending = self._mailbox.next_number(peer), None
            if segment == _ELSEWHERE:
                sending = dist.isend(sent, group=self._group, group_dst=peer, tag=self._tag(number))
            self._mailbox.send(peer, number, (segment, first, sent.nbytes))
            messages.append(_SharedMessage(self, source, self._mailbox.expect(source), like=sent, sending=sending,
                                           destination=None if destinations is None else destinations[step]))
        return messages

    def release(self, memory: Tensor, *, keep: bool = False) -> None:
        if self._outbox is not None:
            self._outbox.release(memory, keep=keep)

    def trim(self) -> None:
        """Give back the memory of messages while none is on its way on any rank."""
        if self._outbox is not None:
            self._outbox.trim()

    def read(self, source: int, number: int, *, like: Tensor, destination: Tensor | None) -> Tensor:
        """Wait for a rank's message: a view of where it lies, else received through the socket.

        Args:
            like: a tensor of the message's size and dtype.

        Raises:
            RuntimeError: the message is of another size.
        """
        segment, first, size = self._mailbox.receive(source, number)
        if size != like.nbytes:
            raise RuntimeError(f"rank {source} sent {size} bytes where rank {self._rank} expected {like.nbytes}: the "
                               "ranks do different things, such as one step more on one of them")
        if segment != _ELSEWHERE:
            return self._segments[segment][source].data[first:first + like.nbytes].view(like.dtype)
        values = torch.empty_like(like) if destination is None else destination
        dist.recv(values, group=self._group, group_src=source, tag=self._tag(number))
        return values

    def _tag(self, number: int) -> int:
        return self._memory.number % _TAGS * _TAGS + number % _TAGS + 1

    def _mirrored(self, number: int, sizes: Sequence[int]) -> list[Tensor]:
        """This rank's one of a new numbered segment for each rank, cut."""
        self._segments[number] = self._memory.mirrored(_total(sizes))
        self.bytes += _total(sizes)
        return _cut(self._segments[number][self._rank], sizes)

    def _place(self, values: Tensor) -> tuple[int, int]:
        """(segment, first byte)."""
        address = values.data_ptr()
        for number, segments in self._segments.items():
            first = address - segments[self._rank].data.data_ptr()
            if 0 <= first < segments[self._rank].data.numel():
                return number, first
        return _ELSEWHERE, 0


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    """Of the group's collectives; torch's default where its options are not to be seen."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return timeout.total_seconds()


def _total(sizes: Sequence[int]) -> int:
    """Bytes of a segment for tensors of these sizes, each aligned; never none."""
    return sum(_aligned(size) for size in sizes) or _ALIGNMENT


def _cut(segment: Segment, sizes: Sequence[int]) -> list[Tensor]:
    ends = itertools.accumulate(_aligned(size) for size in sizes)
    return [segment.part(end - _aligned(size), size) for size, end in zip(sizes, ends, strict=True)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _SharedMessage:
    """Also keeps what is sent the other way until it was."""

    def __init__(self, carrier: SharedCarrier, source: int, number: int, *, like: Tensor, sending: dist.Work | None,
                 destination: Tensor | None) -> None:
        self._carrier, self._source, self._number = carrier, source, number
        self._like, self._sending, self._destination = like, sending, destination

    def wait(self) -> Tensor:
        values = self._carrier.read(self._source, self._number, like=self._like, destination=self._destination)
        if self._sending is not None:
            self._sending.wait()
        return values


class _Outbox:
    """Rooms in a segment, free again when every rank has read what was sent from them.

    Ranks release the same messages in the same order, and count them where the others see it: what this rank released
    as its n-th, another has read when that one's count is n.

    Attributes:
        count: messages released.

    Args:
        released: messages, by outboxes before this one.
    """

    def __init__(self, segment: Segment, rooms: Sequence[Tensor], mailbox: Mailbox, *, released: int) -> None:
        self._segment, self._rooms, self._mailbox = segment, rooms, mailbox
        self._numbers = {room.data_ptr(): number for number, room in enumerate(rooms)}
        self._in_use = [False] * len(rooms)
        self._released_as = [0] * len(rooms)
        self.count = released

    def take(self, number: int, size: int) -> Tensor | None:
        number %= len(self._rooms)
        if self._in_use[number] or size > self._rooms[number].numel() or (
                self._released_as[number] > min(self._mailbox.finished)):
            return None
        self._in_use[number] = True
        return self._rooms[number][:size]

    def discard(self, memory: Tensor) -> None:
        number = self._numbers.get(memory.data_ptr())
        if number is not None:
            self._in_use[number] = False

    def release(self, memory: Tensor, *, keep: bool) -> None:
        self.count += 1
        self._mailbox.finish(self.count)
        number = self._numbers.get(memory.data_ptr())
        if number is not None:
            self._released_as[number], self._in_use[number] = self.count, keep

    def trim(self) -> None:
        self._segment.clear()
