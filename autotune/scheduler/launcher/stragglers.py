"""What a group can leave behind: processes that a user's task started, in sessions of their own too, which carry a mark
in their environment; and, where the launcher itself was killed, the group's directory."""

import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

GROUP_VARIABLE = "ENGINE_WORKER_GROUP"
"""Names the worker group in the environment of its processes and of all that they start."""

RENDEZVOUS = "rendezvous"
"""Name of the file in a group's directory through which its ranks find each other. Its path is the mark."""

_PREFIX = "autotune-group-"
_PASSES = 3


def group_directory() -> Path:
    """A new private directory for a group, whose name tells which process launched it."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


def clear_after_dead_launchers() -> None:
    """End what groups of launchers that are no more have left, and remove their directories."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        launcher = directory.name.removeprefix(_PREFIX).split("-")[0]
        if launcher.isdigit() and not Path(f"/proc/{launcher}").exists():
            end_stragglers(str(directory / RENDEZVOUS))
            shutil.rmtree(directory, ignore_errors=True)


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
