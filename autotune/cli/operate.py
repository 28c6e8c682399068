"""Commands for the operator: token, db upgrade, doctor."""

import os
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import typer

from autotune.cli.options import DatabaseOption, DataDirOption, DeviceOption, JsonOption

if TYPE_CHECKING:
    from autotune.settings import Settings

TORCH_SECONDS = 120

_TORCH_PROBE = """
import json, torch
print(json.dumps({"version": torch.__version__, "accelerators":
                  [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}))
"""

database_app = typer.Typer(no_args_is_help=True, help="The database.")


class Finding(NamedTuple):
    """One thing that `doctor` looked at."""

    name: str
    ok: bool
    detail: str


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Operation")(token)
    app.command(rich_help_panel="Operation")(doctor)
    app.add_typer(database_app, name="db", rich_help_panel="Operation")


def token(data_dir: DataDirOption = None, database: DatabaseOption = None, json: JsonOption = False) -> None:
    """Make a new API token and print it. The old one and all browser sessions end at once."""
    from autotune.cli.output import print_json
    from autotune.cli.serve import open_store
    from autotune.domain.errors import FieldError, InvalidRequestError
    from autotune.service.auth import Auth
    from autotune.settings import load_settings

    settings = load_settings(data_dir=data_dir, database=database)
    if settings.token is not None:
        raise InvalidRequestError(FieldError(
            "AUTOTUNE_TOKEN", "is set, and decides the token: change it and start the service again, or unset it"))
    store = open_store(settings)
    made = Auth(store, settings).new_token()
    store.close()
    if json:
        print_json({"token": made})
    else:
        typer.echo(made)


@database_app.command()
def upgrade(data_dir: DataDirOption = None, database: DatabaseOption = None) -> None:
    """Bring the database to this version's schema; safe to run again and from several processes at once."""
    from autotune.cli.serve import open_store
    from autotune.settings import load_settings

    store = open_store(load_settings(data_dir=data_dir, database=database))
    store.check()
    store.close()
    typer.echo("the database is up to date")


def doctor(
    data_dir: DataDirOption = None, database: DatabaseOption = None, device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Check what the service needs: Python, torch, devices, data directory, database. Changes nothing."""
    from autotune.cli.output import console, print_json
    from autotune.settings import load_settings

    settings = load_settings(data_dir=data_dir, database=database, device=device)
    findings = [_python(), _torch(), _devices(settings), _data_dir(settings), _database(settings)]
    if json:
        print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            mark = "[green]ok[/]  " if finding.ok else "[red]FAIL[/]"
            console.print(f"{mark} {finding.name:<10}", end="")
            console.print(finding.detail, highlight=False, markup=False, soft_wrap=True)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", sys.version_info >= (3, 11), f"{version} at {sys.executable}")


def _torch() -> Finding:
    """In a process of its own, as the service itself never loads torch."""
    import json

    try:
        done = subprocess.run([sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True,
                              timeout=TORCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding("torch", False, f"did not load within {TORCH_SECONDS} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding("torch", False, f"cannot be loaded: {last}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Finding("torch", True, f"{found['version']}; accelerators: {', '.join(found['accelerators']) or 'none'}")


def _devices(settings: "Settings") -> Finding:
    from autotune.domain.errors import LaunchError
    from autotune.scheduler.launcher.local import LocalLauncher

    try:
        launcher = LocalLauncher(device_type=settings.device)
    except LaunchError as error:
        return Finding("devices", False, str(error))
    return Finding("devices", True, f"{len(launcher.devices())} x {launcher.device_type} ({launcher.device_name})")


def _data_dir(settings: "Settings") -> Finding:
    folder = settings.data_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    ok = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    made = "" if folder == settings.data_dir else " (will be made)"
    problem = "" if ok else f": {folder} cannot be written to"
    return Finding("data", ok, f"{settings.data_dir}{problem or made}")


def _database(settings: "Settings") -> Finding:
    from autotune.domain.errors import StoreUnavailableError
    from autotune.store import Database

    if settings.database is None and not (settings.data_dir / "autotune.sqlite3").exists():
        return Finding("database", True, "SQLite, made at the first start")
    try:
        store = Database(settings.database_url)
    except ValueError as error:
        return Finding("database", False, str(error))
    try:
        store.check()
    except StoreUnavailableError as error:
        return Finding("database", False, str(error))
    finally:
        store.close()
    return Finding("database", True, "answers, schema up to date")
