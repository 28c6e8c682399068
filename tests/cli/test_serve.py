"""``serve`` and ``scheduler`` as real processes: start, token, stop, and what a kill leaves behind."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from autotune.cli import processes
from autotune.cli.processes import ChildProcess
from tests.cli.conftest import Run
from tests.support.samples import sample_request
from tests.support.service import (
    clean_environment,
    descendants_of,
    is_alive,
    running_service,
    wait_until,
)


def test_the_token_is_shown_once_and_lasts(tmp_path: Path) -> None:
    with running_service(tmp_path, "--no-scheduler") as first:
        token = first.token
        assert len(token) >= 43
        assert httpx.get(f"{first.url}/healthz").json() == {"status": "ok"}
        assert httpx.get(f"{first.url}/api/v1/studies").status_code == 401
        with first.client() as client:
            assert list(client.studies()) == []
    with running_service(tmp_path, "--no-scheduler", token=token) as second, second.client() as client:
        assert list(client.studies()) == []
        assert token not in second.log.read_text()
    assert stat.S_IMODE(tmp_path.stat().st_mode) in (0o700, 0o755)  # made by the test


def test_the_data_directory_is_private(tmp_path: Path, run: Run) -> None:
    assert run("db", "upgrade", "--data-dir", str(tmp_path / "data")).code == 0
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


def test_the_operators_token_is_not_repeated(tmp_path: Path) -> None:
    with running_service(tmp_path, "--no-scheduler", AUTOTUNE_TOKEN="my-own-token-of-some-length") as service:
        assert service.token == "my-own-token-of-some-length"
        with service.client() as client:
            assert list(client.studies()) == []
        assert service.token not in service.log.read_text()


def test_it_announces_the_dashboards_link(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune.cli", "serve", "--no-scheduler", "--port", "0", "--data-dir", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=clean_environment())
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)  # may come before it listens: it counts all the same
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    url, link, token = (line.split()[-1] for line in lines)
    assert url.startswith("http://127.0.0.1:")
    assert link == f"{url}/login#token={token}"  # what follows the # stays in the browser


def test_the_dashboard_is_served(tmp_path: Path) -> None:
    with (running_service(tmp_path, "--no-scheduler") as service,
          httpx.Client(base_url=service.url, follow_redirects=True) as browser):
        page = browser.get("/", headers={"Accept": "text/html"})
        assert page.url.path == "/login"
        assert page.status_code == 200
        page = browser.post("/login", data={"token": service.token}, headers={"Origin": service.url})
        assert page.url.path == "/"
        assert "text/html" in page.headers["content-type"]


def test_sigterm_stops_both_processes_in_spite_of_an_open_stream(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        with service.client() as client:
            # more devices than there are: stays queued, so the stream stays open
            study = client.submit(sample_request(hardware={"devices": 4}, search={"space": {"zero_stage": [0]}}))
        scheduler = service.scheduler_pid()
        headers = {"Authorization": f"Bearer {service.token}"}
        with httpx.stream("GET", f"{service.url}/api/v1/studies/{study.id}/events", headers=headers) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith(": study")
            assert service.stop() == 0
            assert "event: state" in list(lines)  # it ended in order
        assert not is_alive(scheduler)


def test_killing_the_web_process_leaves_nothing_behind(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        scheduler = service.scheduler_pid()
        left = [scheduler, *descendants_of(scheduler)]
        service.kill()
        wait_until(lambda: not any(map(is_alive, left)), "the scheduler to be gone")


def test_a_killed_scheduler_is_started_again(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        first = service.scheduler_pid()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: any(pid != first for pid in descendants_of(service.pid)), "another scheduler")
        assert service.scheduler_pid() != first
        assert httpx.get(f"{service.url}/readyz").status_code == 200
        assert "starting it again" in service.log.read_text()


def test_the_scheduler_is_not_told_the_token_nor_the_database_in_its_arguments(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/secret-name.sqlite3"
    with running_service(tmp_path, AUTOTUNE_TOKEN="my-own-token-of-some-length", AUTOTUNE_DATABASE=database) as service:
        folder = Path(f"/proc/{service.scheduler_pid()}")
        assert b"my-own-token" not in (folder / "environ").read_bytes()
        assert b"secret-name" not in (folder / "cmdline").read_bytes()


def test_the_scheduler_alone_registers_this_host_and_stops(tmp_path: Path) -> None:
    from autotune.store import Database

    process = subprocess.Popen([sys.executable, "-m", "autotune.cli", "scheduler", "--data-dir", str(tmp_path)],
                               stderr=subprocess.DEVNULL, env=clean_environment())
    database = Database(f"sqlite:///{tmp_path}/autotune.sqlite3")

    def is_registered() -> bool:
        from autotune.domain.errors import StoreUnavailableError

        try:
            database.check()
        except StoreUnavailableError:
            return False
        with database.read() as transaction:
            return bool(transaction.hosts.list())

    wait_until(is_registered, "the host to be registered", seconds=60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    database.close()


def test_a_port_in_use_is_told(tmp_path: Path, run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--no-scheduler", "--port", str(port), "--data-dir", str(tmp_path))
    assert result.code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.err


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.invalid"])
def test_an_address_of_another_machine_is_no_matter_of_the_port(run: Run, tmp_path: Path, host: str) -> None:
    result = run("serve", "--no-scheduler", "--host", host, "--port", "0", "--data-dir", str(tmp_path))
    assert result.code == 2
    assert f"AUTOTUNE_HOST: cannot listen on {host}:0" in result.err


@pytest.mark.parametrize(("arguments", "says"), [
    (("--database", "nonsense"), "AUTOTUNE_DATABASE"),
    (("--database", "mysql://x/y"), "mysql is not supported"),
    (("--database", "sqlite://"), "needs a file"),
    (("--data-dir", "/proc/none/x"), "AUTOTUNE_DATA_DIR"),
    (("--device", "tpu"), "AUTOTUNE_DEVICE"),
])
def test_options_that_cannot_be_used_are_told(run: Run, arguments: tuple[str, ...], says: str) -> None:
    result = run("serve", "--port", "0", *arguments)
    assert result.code == 2
    assert says in result.err


def test_a_database_out_of_reach_is_told_without_its_password(run: Run) -> None:
    result = run("db", "upgrade", "--database", "postgresql://me:hidden@127.0.0.1:1/x")
    assert result.code == 1
    assert "cannot use the database" in result.err
    assert "hidden" not in result.err


class TestChildProcess:
    """Started again a few times, then given up."""

    def test_gives_up_on_a_child_that_keeps_dying(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processes, "MAX_RESTARTS", 2)
        child = ChildProcess(("-c", "raise SystemExit(3)"), dict(os.environ))
        child.start()
        wait_until(lambda: not child.check(), "it to give up")
        assert child.pid is None

    def test_does_not_restart_what_it_was_asked_to_stop(self) -> None:
        child = ChildProcess(("-c", "import time; time.sleep(600)"), dict(os.environ))
        child.start()
        pid = child.pid
        assert pid is not None
        child.stop()
        assert child.check()
        assert child.pid is None
        assert not is_alive(pid)

    def test_kills_what_does_not_stop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processes, "STOP_SECONDS", 0.2)
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = ChildProcess(("-c", code), dict(os.environ))
        child.start()
        pid = child.pid
        assert pid is not None
        child.stop()
        assert not is_alive(pid)
