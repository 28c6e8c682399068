"""Which process holds a lease, and whether it still lives."""

import os
from pathlib import Path
from typing import Self

from engine.values import Value


class Owner(Value):
    """One scheduler process, told apart from any that had or will have its process id.

    Attributes:
        host: the launcher's name of its host.
        pid: process id.
        started: when the process started, in clock ticks since the host did.
        namespace: the process-id namespace, as containers of one host have each their own.
    """

    host: str
    pid: int
    started: int
    namespace: str

    @classmethod
    def current(cls, host: str) -> Self:
        """This process."""
        return cls(host=host, pid=os.getpid(), started=_started(os.getpid()) or 0, namespace=_namespace())

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What `str` wrote; None for anything else."""
        parts = text.rsplit("|", 3)
        if len(parts) != 4 or not (parts[1].isdigit() and parts[2].isdigit()):
            return None
        return cls(host=parts[0], pid=int(parts[1]), started=int(parts[2]), namespace=parts[3])

    def __str__(self) -> str:
        return f"{self.host}|{self.pid}|{self.started}|{self.namespace}"

    def is_dead(self, seen_from: "Owner") -> bool:
        """Whether this process has certainly ended; only processes beside `seen_from` can be judged."""
        if (self.host, self.namespace) != (seen_from.host, seen_from.namespace) or not self.namespace:
            return False
        return _started(self.pid) != self.started


def _started(pid: int) -> int | None:
    """Start time of a process; None where there is none, or it has ended and waits for its parent only."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _namespace() -> str:
    """Empty where there is no /proc: then no process is ever judged dead."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
