"""The image's entrypoint, run as it stands on a temporary data directory."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.docker.test_image import DOCKER, health_check, parse_dockerfile
from tests.e2e.live import TOKEN, assert_gone, free_port

ENTRYPOINT = DOCKER / "entrypoint"
SECONDS = 60.0


def environment(data_dir: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AUTOTUNE_")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "AUTOTUNE_DATA_DIR": str(data_dir),
            **variables}


def run(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ENTRYPOINT, *arguments], env=variables, capture_output=True, text=True, timeout=SECONDS,
                          check=False)


def test_an_open_address_needs_a_token_of_ones_own(tmp_path: Path) -> None:
    done = run([], environment(tmp_path, AUTOTUNE_HOST="0.0.0.0"))
    assert done.returncode == 2
    assert "AUTOTUNE_TOKEN" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_other_commands_pass_through(tmp_path: Path) -> None:
    done = run(["db", "upgrade"], environment(tmp_path, AUTOTUNE_HOST="0.0.0.0"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "autotune.sqlite3").exists()


def test_it_migrates_serves_is_healthy_and_stops_on_sigterm(tmp_path: Path) -> None:
    port = free_port()
    secret = tmp_path / "token"
    secret.write_text(TOKEN + "\n")
    variables = environment(tmp_path / "data", AUTOTUNE_HOST="127.0.0.1", AUTOTUNE_PORT=str(port),
                            AUTOTUNE_TOKEN_FILE=str(secret))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([ENTRYPOINT], env=variables, stdout=log, stderr=subprocess.STDOUT,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until_healthy(process, variables, tmp_path / "log")
        # `exec`: the process that signals go to is the service itself, no shell around it.
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert "autotune" in " ".join(family[0].cmdline())
        assert not [each for each in family if each.name() in ("sh", "bash", "dash")]
        assert status(port, "Bearer " + TOKEN) == 200
        assert status(port, "Bearer wrong") == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert_gone(family)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert "up to date" in (tmp_path / "log").read_text()
    assert TOKEN not in (tmp_path / "log").read_text()


def wait_until_healthy(process: "subprocess.Popen[bytes]", variables: dict[str, str], log: Path) -> None:
    """Run the image's own health check until it is content."""
    command = health_check(parse_dockerfile((DOCKER / "Dockerfile").read_text()))
    deadline = time.monotonic() + SECONDS
    while subprocess.run([sys.executable, *command[1:]], env=variables, capture_output=True, check=False).returncode:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def status(port: int, authorization: str) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/v1/studies",
                                     headers={"Authorization": authorization})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
