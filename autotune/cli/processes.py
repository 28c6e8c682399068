"""Two processes that stop together: the child's side and the parent's side."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque

from engine.process import die_with_parent

PARENT_VARIABLE = "AUTOTUNE_PARENT_PID"
"""Tells a child who started it; set by `ChildProcess` only."""

ORPHAN_GRACE_SECONDS = 10.0
STOP_SECONDS = 10.0
MAX_RESTARTS = 5
RESTART_WINDOW_SECONDS = 120.0

_log = logging.getLogger("autotune.serve")


def follow_parent() -> None:
    """In a child of `ChildProcess`: stop when the parent ends, however it ends. Does nothing in other processes.

    The kernel sends SIGTERM, which stops in order; a thread makes sure of it should that hang.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent.isdigit():
        return
    die_with_parent(int(parent), signal.SIGTERM)
    threading.Thread(target=_leave_when_orphaned, args=(int(parent),), daemon=True, name="parent-watch").start()


def _leave_when_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(ORPHAN_GRACE_SECONDS)
    os._exit(1)


class ChildProcess:
    """A child that is started again when it dies, a few times.

    Start it from the main thread: the kernel's signal to the child comes when the thread that started it ends.

    Args:
        arguments: of this Python.
        environment: complete.
    """

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self._command = [sys.executable, *arguments]
        self._environment = {**environment, PARENT_VARIABLE: str(os.getpid())}
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._next_start = 0.0
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, env=self._environment, stdin=subprocess.DEVNULL)

    def check(self) -> bool:
        """Start it again if it has died; call this a few times a second.

        Returns:
            False once it has died too often in a short time: give up then.
        """
        if self._stopping or self.pid is not None:
            return True
        now = time.monotonic()
        if not self._next_start:
            code = self._process.returncode if self._process is not None else None
            recent = [moment for moment in self._restarts if now - moment < RESTART_WINDOW_SECONDS]
            if len(recent) >= MAX_RESTARTS:
                _log.error("the scheduler ended again (exit code %s) after %d restarts within %g s: giving up",
                           code, len(recent), RESTART_WINDOW_SECONDS)
                return False
            self._next_start = now + 0.5 * 2 ** len(recent)
            _log.warning("the scheduler ended (exit code %s): starting it again", code)
        if now >= self._next_start:
            self._next_start = 0.0
            self._restarts.append(now)
            self.start()
        return True

    def request_stop(self) -> None:
        """Ask it to stop; safe in a signal handler."""
        self._stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Stop it and wait until it is gone; it is killed if it takes too long."""
        self.request_stop()
        if self._process is None:
            return
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            _log.warning("the scheduler did not stop within %g s: killing it", STOP_SECONDS)
            self._process.kill()
            self._process.wait()
