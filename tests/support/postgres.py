"""A real PostgreSQL server for the tests: started on first use, on a free loopback port, stopped at the end.

`tests/conftest.py` offers `postgres_server` to every test. The server refuses to run as root, so root's tests run it as
the user that the package made, or as nobody.
"""

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psycopg
import pytest

START_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class PostgresServer:
    """A running server.

    Attributes:
        pid: of its first process.
    """

    port: int
    pid: int
    _numbers: Iterator[int]

    def url(self, database: str) -> str:
        return f"postgresql://autotune@127.0.0.1:{self.port}/{database}"

    def create_database(self) -> str:
        """Make an empty database and return its URL."""
        name = f"test_{os.getpid()}_{next(self._numbers)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)


def find_binaries() -> Path:
    """The folder with initdb and postgres, the newest release.

    Raises:
        RuntimeError: PostgreSQL is not installed.
    """
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    on_path = shutil.which("postgres")
    if installed:
        return installed[-1].parent
    if on_path:
        return Path(on_path).resolve().parent
    raise RuntimeError("these tests need a PostgreSQL server: install it (Debian: apt-get install postgresql), or run "
                       "`make test`, which does")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    binaries = find_binaries()
    user = _unprivileged_user()
    folder = Path(tempfile.mkdtemp(prefix="autotune-postgres-"))
    identity = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    try:
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)
        data = folder / "data"
        subprocess.run(
            [binaries / "initdb", "--pgdata", data, "--username", "autotune", "--auth", "trust", "--encoding", "UTF8",
             "--locale", "C", "--no-sync"], check=True, capture_output=True, cwd=folder, **identity)
        port = _free_port()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [binaries / "postgres", "-D", data, "-p", str(port), "-k", folder, "-c", "listen_addresses=127.0.0.1",
                 "-c", "fsync=off", "-c", "max_connections=200"],
                stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
                preexec_fn=_stop_with_parent, **identity)  # noqa: PLW1509 - no threads yet; one system call
        server = PostgresServer(port, process.pid, count())
        try:
            _wait_until_ready(server, process, folder / "log")
            yield server
        finally:
            process.send_signal(signal.SIGINT)  # "fast" shutdown: ends open sessions
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged_user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    return known.get("postgres") or known["nobody"]


def _stop_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(server: PostgresServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            psycopg.connect(server.url("postgres"), connect_timeout=2).close()
            return
        except psycopg.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start: {log.read_text()}") from error
        time.sleep(0.05)
