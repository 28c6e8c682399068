"""The real service as a process: on a free port, with a data directory of its own, stopped by process id."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autotune.client import Client

START_SECONDS = 60.0
STOP_SECONDS = 30.0


@dataclass
class RunningService:
    """A service under test.

    Attributes:
        url: of the web process.
        token: the API token.
        log: file with what the service wrote to standard error.
    """

    process: "subprocess.Popen[str]"
    url: str
    token: str
    data_dir: Path
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self) -> Client:
        return Client(self.url, self.token)

    def scheduler_pid(self) -> int:
        """Of the child that runs studies; waits until it runs its own program, after being a copy of this one."""
        def find() -> list[int]:
            return [pid for pid in children_of(self.pid) if b"scheduler" in _command(pid).split(b"\0")]

        wait_until(lambda: len(find()) == 1, "one scheduler")
        return find()[0]

    def kill(self) -> None:
        """As `kill -9` of the web process alone."""
        self.process.kill()
        self.process.wait(timeout=STOP_SECONDS)

    def stop(self) -> int:
        """SIGTERM, then wait; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=STOP_SECONDS)


@contextmanager
def running_service(data_dir: Path, *arguments: str, token: str | None = None, port: int = 0,
                    **variables: str) -> Iterator[RunningService]:
    """Start ``autotune serve`` and stop it at the end, whatever happened to it meanwhile.

    Args:
        arguments: further ones of `serve`, such as ``--no-scheduler``.
        token: of a service that was started before with the same data directory; otherwise the new one is read.
        variables: further environment variables.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    log = data_dir / "service.log"
    with log.open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "autotune.cli", "serve", "--json", "--port", str(port), "--data-dir", str(data_dir),
             *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, env=clean_environment(**variables))
    service = None
    try:
        hello = json.loads(_first_line(process, log))
        service = RunningService(process, hello["url"], hello["token"] or token or variables.get("AUTOTUNE_TOKEN", ""),
                                 data_dir, log)
        yield service
    finally:
        left = descendants_of(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdout is not None
        process.stdout.close()
        wait_until(lambda: not any(map(is_alive, left)), "the service's processes to be gone")


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without any AUTOTUNE_ variable of the developer's own, plus `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AUTOTUNE_")}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def _first_line(process: "subprocess.Popen[str]", log: Path) -> str:
    """What the service prints once it listens."""
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: lines.put(process.stdout.readline() if process.stdout else ""), daemon=True).start()
    try:
        line = lines.get(timeout=START_SECONDS)
    except queue.Empty:
        line = ""
    if not line:
        raise RuntimeError(f"the service did not start: {log.read_text()}")
    return line


def children_of(pid: int) -> list[int]:
    """Processes that a process started and that live."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split() if is_alive(int(child))]


def descendants_of(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found = []
    for child in children_of(pid):
        found += [child, *descendants_of(child)]
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = STOP_SECONDS) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: it did not come true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
