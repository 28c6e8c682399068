"""``tune``: one study without a service, on this machine, in this process."""

import asyncio
import contextlib
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import DataDirOption, DeviceOption, FileArgument, JsonOption, OutputOption

if TYPE_CHECKING:
    from autotune.domain.request import StudyRequest
    from autotune.domain.study import Study, Trial
    from autotune.settings import Settings
    from autotune.store import Database

LOOK_SECONDS = 0.25


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Studies")(tune)


def tune(
    file: FileArgument,
    data_dir: DataDirOption = None, device: DeviceOption = None,
    format: Annotated[str | None, typer.Option("--format", "-f", help="Also export the winner: engine, deepspeed, "
                                               "accelerate, fsdp, ...; an unknown one lists all.")] = None,
    output: OutputOption = None, json: JsonOption = False,
) -> None:
    """Tune a model here and now, without a service. Exit code 0 only if a winner was found.

    With --data-dir the study is kept there, beside those of a service; otherwise nothing is kept.
    """
    from autotune.cli.files import read_study
    from autotune.domain.errors import FieldError, InvalidRequestError
    from autotune.export import FORMATS
    from autotune.settings import load_settings

    request = read_study(file)
    if format is not None and format not in FORMATS:
        raise InvalidRequestError(FieldError(
            "--format", f"unknown format {format!r}: give one of {', '.join(FORMATS)}"))
    with contextlib.ExitStack() as stack:
        if data_dir is None:
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-")))
        device = device or (request.hardware.device if request.hardware.device != "auto" else None)
        settings = load_settings(
            data_dir=data_dir, database=f"sqlite:///{data_dir.absolute() / 'autotune.sqlite3'}", device=device)
        study, trials = _tune(request, settings, json=json)
        _report(study, trials, format, output, json=json)
    if study.state.value != "succeeded":
        raise typer.Exit(1)


def _tune(request: "StudyRequest", settings: "Settings", *, json: bool) -> "tuple[Study, dict[int, Trial]]":
    from autotune.cli.serve import open_store
    from autotune.service.commands import Commands

    store = open_store(settings)
    try:
        study = Commands(store, settings).submit(request)
        return asyncio.run(run_until_it_ends(store, settings, study.id, quiet=json))
    finally:
        store.close()


async def run_until_it_ends(store: "Database", settings: "Settings", study_id: str, *, quiet: bool
                            ) -> "tuple[Study, dict[int, Trial]]":
    """Run a scheduler until the study has ended, then give it and its trials; an interrupt cancels the study first."""
    from autotune.cli.output import console
    from autotune.cli.screen import StudyScreen
    from autotune.cli.serve import run_scheduler

    stop, interrupted = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    running = asyncio.create_task(run_scheduler(store, settings, stop))
    try:
        with StudyScreen(console, quiet=quiet) as screen:
            while True:
                study, trials = await asyncio.to_thread(_look, store, study_id)
                screen.show(study, trials)
                if study.state.is_final or running.done():
                    break
                if interrupted.is_set() and not study.cancel_requested:
                    await asyncio.to_thread(_cancel, store, study_id)
                await asyncio.sleep(LOOK_SECONDS)
    finally:
        stop.set()
        await running
    return study, trials


def _look(store: "Database", study_id: str) -> "tuple[Study, dict[int, Trial]]":
    with store.read() as transaction:
        return (transaction.studies.get(study_id, with_plan=False),
                {trial.number: trial for trial in transaction.trials.list(study_id)})


def _cancel(store: "Database", study_id: str) -> None:
    from autotune.domain.errors import ConflictError

    with contextlib.suppress(ConflictError), store.begin() as transaction:
        transaction.studies.request_cancel(study_id)


def _report(study: "Study", trials: "dict[int, Trial]", format: str | None, output: Path | None, *, json: bool) -> None:
    """The winner first: what the format cannot express must not cost it.

    Raises:
        ExportError: the format cannot express the winner.
    """
    from autotune.cli.output import print_json
    from autotune.cli.studies import finish, write_export
    from autotune.domain.errors import ExportError
    from autotune.export import export
    from autotune.service.schemas import StudyView

    file, refusal = None, None
    try:
        file = export(study.best, format) if format is not None and study.best is not None else None
    except ExportError as error:
        refusal = error
    if json:
        exported = {"filename": file.filename, "text": file.text, "notes": list(file.notes)} if file else None
        print_json({"study": StudyView.of(study).model_dump(mode="json"), "export": exported,
                    "best": study.best.model_dump(mode="json") if study.best else None})
    else:
        finish(study, trials)
    if file is not None and (output is not None or not json):
        write_export(file.text, file.notes, output)
    if refusal is not None:
        raise refusal
