"""``serve``: the web process, and the scheduler as its child. ``scheduler``: the scheduler alone.

The two stop together. A stop of the web process, by a signal or by ``kill -9``, stops the scheduler; a scheduler that
dies is started again, and if it keeps dying, `serve` ends with exit code 1. Whatever was interrupted goes on at the
next start: all that matters is in the database.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.options import DatabaseOption, DataDirOption, DeviceOption, HostOption, JsonOption, PortOption

if TYPE_CHECKING:
    from autotune.cli.processes import ChildProcess
    from autotune.settings import Settings
    from autotune.store import Database

WATCH_SECONDS = 0.2
GRACE_SECONDS = 1
"""How long requests under way may take once the server stops; open streams end at once."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Service")(serve)
    app.command(rich_help_panel="Service")(scheduler)


def serve(  # noqa: PLR0913, PLR0917 - one parameter per option
    host: HostOption = None, port: PortOption = None, data_dir: DataDirOption = None, database: DatabaseOption = None,
    device: DeviceOption = None,
    no_scheduler: Annotated[bool, typer.Option("--no-scheduler", help="Only the web process; run `autotune scheduler` "
                                               "elsewhere.")] = False,
    json: JsonOption = False,
) -> None:
    """Serve the REST API and the dashboard, and run studies on this machine's devices.

    The API token is printed once, at the first start, with the dashboard's link.
    """
    from autotune.settings import load_settings

    settings = load_settings(host=host, port=port, data_dir=data_dir, database=database, device=device)
    _configure_logging()
    if not no_scheduler:
        _require_devices(settings)
    listener = _listen(settings)
    settings = settings.model_copy(update={"port": listener.getsockname()[1]})
    with contextlib.closing(listener), contextlib.closing(open_store(settings)) as store:
        code = _run(settings, store, listener, with_scheduler=not no_scheduler, json=json)
    raise typer.Exit(code)


def scheduler(
    data_dir: DataDirOption = None, database: DatabaseOption = None, device: DeviceOption = None,
) -> None:
    """Run studies on this machine's devices, without the web process."""
    from autotune.cli.processes import follow_parent

    follow_parent()
    from autotune.settings import load_settings

    settings = load_settings(data_dir=data_dir, database=database, device=device)
    _configure_logging()
    with contextlib.closing(open_store(settings)) as store:
        asyncio.run(run_scheduler(store, settings))


def open_store(settings: "Settings") -> "Database":
    """The database, at head.

    Raises:
        InvalidRequestError: a URL or a data directory that cannot be used.
        StoreUnavailableError: the database cannot be reached.
    """
    from autotune.domain.errors import FieldError, InvalidRequestError
    from autotune.store import Database

    if settings.database is None:
        try:
            settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InvalidRequestError(FieldError(
                "AUTOTUNE_DATA_DIR", f"{settings.data_dir} cannot be made: {error.strerror}")) from None
        if not os.access(settings.data_dir, os.W_OK):
            raise InvalidRequestError(FieldError("AUTOTUNE_DATA_DIR", f"{settings.data_dir} cannot be written to"))
    try:
        store = Database(settings.database_url)
    except ValueError as error:
        raise InvalidRequestError(FieldError("AUTOTUNE_DATABASE", str(error).removeprefix("database: "))) from None
    store.upgrade()
    return store


async def run_scheduler(store: "Database", settings: "Settings", stop: asyncio.Event | None = None) -> None:
    """Run a scheduler on this machine's devices until `stop` is set, by default by SIGTERM or SIGINT."""
    from autotune.scheduler.launcher.local import LocalLauncher
    from autotune.scheduler.loop import Scheduler

    if stop is None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    launcher = LocalLauncher(device_type=settings.device)
    await Scheduler(store, launcher).run(stop)


def _require_devices(settings: "Settings") -> None:
    """Fail at once, and with one line, where the scheduler could only fail again and again.

    Raises:
        LaunchError: this machine has no device of the kind asked for.
    """
    from autotune.scheduler.launcher.local import LocalLauncher

    LocalLauncher(device_type=settings.device)


def _listen(settings: "Settings") -> socket.socket:
    """A bound socket, so that the port is known before anything is printed.

    Raises:
        InvalidRequestError: the address cannot be used.
    """
    from autotune.domain.errors import FieldError, InvalidRequestError

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        what = f"cannot listen on {settings.host}:{settings.port} ({reason})"
        if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise InvalidRequestError(FieldError(
                "AUTOTUNE_PORT", f"{what}: is another service running there? Give --port")) from None
        raise InvalidRequestError(FieldError(
            "AUTOTUNE_HOST", f"{what}: give --host an address of this machine, such as 127.0.0.1")) from None
    return listener


def _run(settings: "Settings", store: "Database", listener: socket.socket, *, with_scheduler: bool, json: bool) -> int:
    """Serve until stopped; returns the exit code."""
    import uvicorn

    from autotune.asgi import compose

    app = compose(store, settings)
    services = app.state.services
    child = _scheduler_child(settings) if with_scheduler else None

    class Server(uvicorn.Server):
        """Ends open streams and the scheduler as soon as a signal comes."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            services.stopping.set()
            if child is not None:
                child.request_stop()
            super().handle_exit(sig, frame)

    server = Server(uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=GRACE_SECONDS))
    # A signal may come before uvicorn listens for it; and uvicorn raises what it has caught once more when it has
    # stopped, while this process has its child to stop yet.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    _announce(settings, services.auth.ensure_token(), json=json)
    return asyncio.run(_serve(server, listener, child))


async def _serve(server: Any, listener: socket.socket, child: "ChildProcess | None") -> int:
    gave_up = False

    async def watch() -> None:
        nonlocal gave_up
        while child is not None and not server.should_exit:
            if not child.check():
                gave_up = True
                server.should_exit = True
            await asyncio.sleep(WATCH_SECONDS)

    if child is not None:
        child.start()
    watcher = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[listener])
    finally:
        watcher.cancel()
        if child is not None:
            child.stop()
    return 1 if gave_up or not server.started else 0


def _scheduler_child(settings: "Settings") -> "ChildProcess":
    from autotune.cli.processes import ChildProcess

    environment = {name: value for name, value in os.environ.items() if name != "AUTOTUNE_TOKEN"}
    # by variable, not by argument: a database URL may hold a password, and every user can read arguments
    environment |= {"AUTOTUNE_DATABASE": settings.database_url, "AUTOTUNE_DATA_DIR": str(settings.data_dir),
                    "AUTOTUNE_DEVICE": settings.device}
    return ChildProcess(("-m", "autotune.cli", "scheduler"), environment)


def _announce(settings: "Settings", token: str | None, *, json: bool) -> None:
    """Say where the service is. A token made now is shown; one of the operator's own is not repeated."""
    from autotune.cli.output import print_json
    from autotune.service.auth import SHORT_TOKEN

    own = settings.token is not None
    if own and token is not None and len(token) < SHORT_TOKEN:
        typer.echo(f"warning: AUTOTUNE_TOKEN is short: use at least {SHORT_TOKEN} random characters", err=True)
    shown = None if own else token
    link = f"{settings.base_url}/login" + (f"#token={shown}" if shown else "")
    if json:
        print_json({"url": settings.base_url, "token": shown, "login_url": link, "data_dir": str(settings.data_dir)})
        return
    lines = [f"Autotune is at   {settings.base_url}", f"Dashboard        {link}"]
    if shown:
        lines.append(f"API token        {shown}")
        lines.append("The token is shown only now; `autotune token` makes a new one.")
    else:
        where = "as in AUTOTUNE_TOKEN" if own else "made at the first start; `autotune token` makes a new one"
        lines.append(f"API token        {where}")
    typer.echo("\n".join(lines))
    sys.stdout.flush()


def _configure_logging() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
