"""What a user's task started and left behind, in sessions of its own too: found by a mark in its environment."""

import os
import signal
from contextlib import suppress
from pathlib import Path

GROUP_VARIABLE = "ENGINE_WORKER_GROUP"
"""Names the worker group in the environment of its processes and of all that they start."""

_PASSES = 3


def end_stragglers(group: str) -> int:
    """Kill every process of this machine that descends from a group; returns how many there were.

    Call it when the group's own processes are gone. A process that gave up its environment is not found.
    """
    ended = 0
    for _ in range(_PASSES):  # one that is killed may have just started another
        found = _marked(f"{GROUP_VARIABLE}={group}".encode())
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended += len(found)
        if not found:
            break
    return ended


def _marked(mark: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
