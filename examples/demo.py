"""The demo: starts the service, submits a study through REST, shows it live and prints what was won.

    make demo                 keeps serving until Ctrl-C
    make demo ARGS=--exit     ends by itself; exit code 0 only if the study succeeded
"""

import argparse
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autotune.cli.output import bytes_text, config_text, rate_text
from autotune.cli.screen import StudyScreen
from autotune.client import Client, ClientError, RefusedError
from autotune.domain.study import BestConfig, Trial
from autotune.domain.throughput import shown_throughput
from autotune.export import FORMATS
from autotune.service.schemas import StudyView
from autotune.settings import DEFAULT_PORT
from engine.process import die_with_parent

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 60.0
STOP_SECONDS = 20.0

console = Console()


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@contextmanager
def running_service(data_dir: Path, port: int, token: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`autotune serve` as a child, with its URL; stopped at the end, whatever happens."""
    log = data_dir / "serve.log"
    command = [str(Path(sys.executable).with_name("autotune")), "serve", "--json", "--host", "127.0.0.1",
               "--port", str(port), "--data-dir", str(data_dir)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "AUTOTUNE_TOKEN": token}, start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM))  # noqa: PLW1509 - no threads here
    try:
        yield process, _announced_url(process, log)
    finally:
        _stop(process)


def _announced_url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = process.stdout.readline() if selector.select(START_SECONDS) else ""
    if not line:
        raise DemoError(f"the service did not start; {log} says:\n{log.read_text()[-2000:]}")
    return str(json.loads(line)["url"])


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def choose_port(wanted: int | None) -> int:
    """The wanted port, else the usual one where it is free, else any."""
    if wanted is not None:
        return wanted
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError:
            return 0
    return DEFAULT_PORT


def wait_for_devices(client: Client, process: subprocess.Popen[str]) -> int:
    """How many devices the scheduler offers, once it has said so."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        devices = client.hardware()["devices"]
        if devices:
            kinds = ", ".join(sorted({f"{each['device_type']} ({each['device_name']})" for each in devices}))
            console.print(f"devices: {len(devices)} x {kinds}", highlight=False)
            return len(devices)
        time.sleep(0.1)
    raise DemoError("the scheduler did not report its devices; see serve.log in the data directory")


def watch(client: Client, study_id: str) -> tuple[StudyView, dict[int, Trial]]:
    """Show a study until it ends."""
    trials: dict[int, Trial] = {}
    study = client.study(study_id)
    with StudyScreen(console) as screen:
        for event in client.events(study_id):
            if event.kind.value == "trial_progress":
                continue
            if "number" in event.data:
                number = int(event.data["number"])
                trials[number] = client.trial(study_id, number)
            study = client.study(study_id)
            screen.show(study, trials)
    return client.study(study_id), {trial.number: trial for trial in client.trials(study_id)}


def print_result(best: BestConfig, trials: dict[int, Trial]) -> None:
    """The winner beside the default configuration."""
    table = Table()
    for title in ("", "speed", "95 % interval", "peak memory of a rank"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    low, high = best.tokens_per_second_interval
    table.add_row("winner", rate_text(best), f"{low:,.0f} to {high:,.0f}",
                  bytes_text(best.peak_device_bytes))
    baseline = trials[best.baseline_trial_number] if best.baseline_trial_number is not None else None
    rate = shown_throughput(baseline) if baseline is not None else None
    if rate is not None:
        low, high = rate.interval
        peak = best.baseline_peak_device_bytes
        table.add_row("default", rate_text(best, rate.tokens_per_second), f"{low:,.0f} to {high:,.0f}",
                      "" if peak is None else bytes_text(peak))
    console.print(table)
    console.print(f"winner: {escape(config_text(best.config))}", highlight=False, soft_wrap=True)
    if baseline is not None:
        console.print(f"default: {escape(config_text(baseline.config))}", highlight=False, soft_wrap=True)
    if best.speedup is not None and best.speedup_interval is not None:
        low, high = best.speedup_interval
        console.print(f"[bold]{best.speedup:.2f} times as fast as the default configuration[/] "
                      f"(95 % interval {low:.2f} to {high:.2f}), same global batch, same samples", highlight=False,
                      soft_wrap=True)


def write_exports(client: Client, study_id: str, folder: Path) -> None:
    """Every format that can express the winner, and why the others cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FORMATS:
        try:
            file = client.export(study_id, name)
        except RefusedError as error:
            console.print(f"  {name}: not possible: {escape(str(error))}", highlight=False, soft_wrap=True)
            continue
        path = folder / f"{name}-{file.filename}"
        path.write_text(file.text)
        console.print(f"  {name}: {escape(str(path))}", highlight=False, soft_wrap=True)


def run(options: argparse.Namespace) -> int:
    """The whole demo; returns the exit code."""
    request: dict[str, Any] = json.loads(options.study.read_text())
    data_dir = options.data_dir.resolve()
    data_dir.mkdir(parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    port = choose_port(options.port)
    with running_service(data_dir, port, token) as (process, url), Client(url, token) as client:
        console.print(f"service: {url}  (log: {data_dir / 'serve.log'})", highlight=False, soft_wrap=True)
        dashboard = f"dashboard: {url}/login#token={token}"
        console.print(dashboard, highlight=False, soft_wrap=True)
        offered = wait_for_devices(client, process)
        hardware = request.setdefault("hardware", {})
        hardware["devices"] = min(hardware.get("devices", 1), offered)
        study = client.submit(request)
        console.print(f"submitted {options.study} as study {study.id}", highlight=False, soft_wrap=True)
        study, trials = watch(client, study.id)
        if study.state.value != "succeeded":
            raise DemoError(f"the study {study.state.value}: {study.error or study.note or 'see the log'}")
        if study.note:
            console.print(f"the study ended: {escape(study.note)}", highlight=False, soft_wrap=True)
        print_result(client.best(study.id), trials)
        console.print("exports:")
        write_exports(client, study.id, data_dir / "exports" / study.id)
        if not options.exit:
            console.print(dashboard, highlight=False, soft_wrap=True)
            console.print("serving until Ctrl-C")
            return process.wait()
    return 0


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(143)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exit", action="store_true", help="end after the study instead of serving on")
    parser.add_argument("--study", type=Path, default=ROOT / "examples" / "gpt.json", help="the study to submit")
    parser.add_argument("--data-dir", type=Path, default=ROOT / "data" / "demo", help="where everything is kept")
    parser.add_argument("--port", type=int, help=f"port of the service; {DEFAULT_PORT} or any free one when not given")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    try:
        return run(options)
    except (DemoError, ClientError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
