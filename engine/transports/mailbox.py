"""Notes of three numbers between the ranks of one host, through memory that they share.

Sending one is a store, and receiving one is looking for it. A message through gloo wakes threads on both sides, which
on busy cores costs the better part of a millisecond.
"""

import threading
import time

from engine.errors import RankFailedError
from engine.shared_memory import SharedMemory

Note = tuple[int, int, int]

_SLOTS = 1024
"""Notes from one rank to another that may be unread at once."""

_WORDS = 4
"""Of a note: its number, counted from 1, and what it says."""

_HEADER = 8
"""Words before the notes: how much this rank has finished, and whether it has left."""

_FIRST_PAUSE = 1e-5
_LONGEST_PAUSE = 2e-4
"""Seconds between looks: short at first, as ranks are hardly ever far apart."""

_CHECK_SECONDS = 0.2
"""Between looks whether the rank that is waited for is still there."""


class Mailbox:
    """This rank's notes to and from the others.

    Args:
        timeout: seconds to wait for a note.
    """

    def __init__(self, memory: SharedMemory, *, size: int, rank: int, timeout: float) -> None:
        self._memory, self._rank, self._timeout = memory, rank, timeout
        words = _HEADER + size * _SLOTS * _WORDS
        self._boxes = [segment.words() for segment in memory.mirrored(words * 8)]
        self._sent, self._expected, self._read = [0] * size, [0] * size, [0] * size
        self._notes: list[dict[int, Note]] = [{} for _ in range(size)]  # read and not asked for yet
        self._fence = threading.Lock()

    def next_number(self, peer: int) -> int:
        """The number of the next note to a rank."""
        self._sent[peer] += 1
        return self._sent[peer]

    def send(self, peer: int, number: int, note: Note) -> None:
        # Ranks send each other notes alike: who has come half a box further has read what it would overwrite next.
        self._read_up_to(peer, number - _SLOTS // 2)
        box, place = self._boxes[self._rank], _place(peer, number)
        box[place + 1], box[place + 2], box[place + 3] = note
        self._order()
        box[place] = number

    def expect(self, source: int) -> int:
        """The number of the next note from a rank, to `receive` it by."""
        self._expected[source] += 1
        return self._expected[source]

    def receive(self, source: int, number: int) -> Note:
        """Wait for a note.

        Raises:
            RankFailedError: the rank has ended, or has left, or sent none in time.
        """
        self._read_up_to(source, number)
        return self._notes[source].pop(number)

    @property
    def finished(self) -> list[int]:
        """What each rank last said by `finish`."""
        return [box[0] for box in self._boxes]

    def finish(self, count: int) -> None:
        """Tell the others how much this rank has finished."""
        self._order()
        self._boxes[self._rank][0] = count

    def leave(self) -> None:
        """Tell the others that no more notes come."""
        self._boxes[self._rank][1] = 1

    def _read_up_to(self, source: int, last: int) -> None:
        box = self._boxes[source]
        while self._read[source] < last:
            number = self._read[source] + 1
            place = _place(self._rank, number)
            if box[place] != number:
                self._wait_for(source, place, number)
            self._order()
            self._notes[source][number] = box[place + 1], box[place + 2], box[place + 3]
            self._read[source] = number

    def _wait_for(self, source: int, place: int, number: int) -> None:
        box, pause = self._boxes[source], _FIRST_PAUSE
        begun = checked = time.monotonic()
        while box[place] != number:
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
            now = time.monotonic()
            if now - checked > _CHECK_SECONDS:
                checked = now
                self._require_present(source, place, number, waited=now - begun)

    def _require_present(self, source: int, place: int, number: int, *, waited: float) -> None:
        box = self._boxes[source]
        gone = "has ended" if not self._memory.is_alive(source) else "has left" if box[1] else ""
        if box[place] == number:
            return
        if gone or waited > self._timeout:
            raise RankFailedError(f"rank {source} {gone or f'sent nothing for {waited:.0f} s'} while rank {self._rank} "
                                  "waited for it in a collective")

    def _order(self) -> None:
        """Stores and loads before this come before those after it, as other cores see them."""
        for _ in range(2):
            with self._fence:
                pass


def _place(destination: int, number: int) -> int:
    """The first word of a note."""
    return _HEADER + (destination * _SLOTS + number % _SLOTS) * _WORDS
