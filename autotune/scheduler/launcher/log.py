"""A bounded log of what a process prints."""

from collections import deque


class BoundedLog:
    """Keeps the beginning and the end of a stream, and counts what it drops between them.

    Args:
        limit_bytes: kept at most, a quarter of it from the beginning.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._head_limit = limit_bytes // 4
        self._tail_limit = limit_bytes - self._head_limit
        self._clear()

    def write(self, data: bytes) -> None:
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) >= self._tail_limit:
            oldest = self._tail.popleft()
            self._tail_size -= len(oldest)
            self._dropped += len(oldest)

    def take(self) -> str:
        """The text since the last call. Undecodable bytes and NULs are replaced, so that any database stores it."""
        tail = b"".join(self._tail)
        surplus = max(len(tail) - self._tail_limit, 0)
        dropped = self._dropped + surplus
        text = _text(bytes(self._head))
        if dropped:
            text += f"\n[... {dropped} bytes left out ...]\n"
        text += _text(tail[surplus:])
        self._clear()
        return text

    def last(self, count: int) -> str:
        """At most the last `count` bytes, without taking them."""
        data = b"".join(self._tail)
        if len(data) < count and not self._dropped:
            data = bytes(self._head) + data
        return _text(data[-count:])

    def _clear(self) -> None:
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._dropped = 0


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\x00", "\N{REPLACEMENT CHARACTER}")
