"""The service as a real process, as a user runs it: started, asked over HTTP, stopped or killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

TOKEN = "a-token-for-the-tests-that-is-long-enough"
START_SECONDS = 60.0
STOP_SECONDS = 30.0
FINAL = ("succeeded", "failed", "cancelled")

SMALL_GPT: dict[str, Any] = {"kind": "gpt", "layers": 2, "hidden": 64, "heads": 2, "vocab": 256, "sequence_length": 32}
QUICK = {"max_warmup_steps": 3, "min_steps": 3, "max_steps": 6, "target_relative_interval": 0.2}
SMALL_BUCKETS = {"reduce_bucket_size": [8192], "allgather_bucket_size": [8192], "prefetch_bucket_size": [8192]}
"""Smaller than the model, as they are in earnest."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def study_request(**changes: Any) -> dict[str, Any]:
    """A study of a small GPT on two ranks; `changes` replace whole sections."""
    return {"name": "gpt-e2e", "model": SMALL_GPT,
            "training": {"global_batch_size": 8, "optimizer": {"name": "adamw", "lr": 1e-3}},
            "hardware": {"device": "cpu", "devices": 2},
            "search": {"sampler": "grid", "policy": QUICK,
                       "space": {"zero_stage": [0, 1, 2, 3], "micro_batch_size": [2, 4], **SMALL_BUCKETS}},
            "budget": {"max_trials": 20, "max_seconds": 300}, **changes}


class LiveService:
    """One `autotune serve` on a data directory.

    Args:
        data_dir: kept between starts.
    """

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.log = data_dir / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30,
                                 headers={"Authorization": f"Bearer {TOKEN}"})

    def start(self) -> None:
        """Start, and wait until requests are answered."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "AUTOTUNE_TOKEN": TOKEN}
        command = [Path(sys.executable).with_name("autotune"), "serve", "--host", "127.0.0.1", "--port", str(self.port),
                   "--data-dir", self.data_dir]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment,
                                            stdin=subprocess.DEVNULL, start_new_session=True)
        wait_for(self._is_ready, START_SECONDS, lambda: f"the service did not start:\n{self.log.read_text()}")

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the service ended:\n{self.log.read_text()}"
        try:
            if self.http.get("/readyz").status_code != 200:
                return False
            return bool(self.http.get("/api/v1/hardware").json()["devices"])  # the scheduler has reported
        except httpx.TransportError:
            return False

    def family(self) -> list[psutil.Process]:
        """The service's processes: itself and all descendants."""
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        return [process for process in self.family() if is_worker(process)]

    def stop(self) -> int:
        """End as Ctrl-C does; returns the exit code. All descendants must be gone then."""
        assert self.process is not None
        family = self.family()
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(timeout=STOP_SECONDS)
        assert_gone(family)
        return code

    def kill(self) -> list[psutil.Process]:
        """SIGKILL to all of the service but its workers, which must notice by themselves; returns the workers."""
        assert self.process is not None
        family = self.family()
        workers = [process for process in family if is_worker(process)]
        for process in family:
            if process not in workers:
                process.kill()
        self.process.wait(timeout=STOP_SECONDS)
        return workers

    def submit(self, request: dict[str, Any]) -> str:
        answer = self.http.post("/api/v1/studies", json=request)
        assert answer.status_code == 201, answer.text
        assert answer.headers["Location"] == f"/api/v1/studies/{answer.json()['id']}"
        return str(answer.json()["id"])

    def study(self, study_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/api/v1/studies/{study_id}")
        return found

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def trials(self, study_id: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.get(f"/api/v1/studies/{study_id}/trials?limit=200")["items"]
        return items

    def wait_until(self, study_id: str, reached: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
        """Poll a study until the condition holds."""
        last: dict[str, Any] = {}

        def holds() -> bool:
            last.update(self.study(study_id))
            assert last["state"] not in FINAL or reached(last), f"ended before that: {last}\n{self.log.read_text()}"
            return reached(last)

        wait_for(holds, seconds, lambda: f"study is {last.get('state')}, {last.get('phase')}, {last.get('progress')}\n"
                                         f"{self.log.read_text()}")
        return last

    def wait_for_end(self, study_id: str, seconds: float = 240.0) -> dict[str, Any]:
        return self.wait_until(study_id, lambda study: study["state"] in FINAL, seconds)


def is_worker(process: psutil.Process) -> bool:
    try:
        return "engine.worker" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; `psutil` compares start times, so a reused id does not count. Zombies do not run."""
    running = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
        except psutil.NoSuchProcess:
            continue
    return running


def assert_gone(processes: list[psutil.Process], seconds: float = 10.0) -> None:
    wait_for(lambda: not alive(processes), seconds,
             lambda: f"still running: {[(process.pid, process.cmdline()) for process in alive(processes)]}")


def wait_for(condition: Callable[[], bool], seconds: float, explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {explain()}"
        time.sleep(0.2)  # often enough, and too seldom to disturb what is measured on the same cores


@contextmanager
def live_service(data_dir: Path) -> Iterator[LiveService]:
    """A running service; whatever happens, none of its processes is left at the end."""
    service = LiveService(data_dir)
    try:
        service.start()
        yield service
        assert service.process is not None
        if service.process.poll() is None:
            assert service.stop() == 0, service.log.read_text()
    finally:
        service.http.close()
        if service.process is not None and service.process.poll() is None:
            for process in service.family():
                process.kill()
            service.process.wait(timeout=STOP_SECONDS)
