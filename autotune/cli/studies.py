"""Commands that talk to a running service: submit, watch, list, export, cancel."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import FileArgument, FormatOption, JsonOption, OutputOption, ServerOption, TokenOption

if TYPE_CHECKING:
    from autotune.cli.output import StudyLike
    from autotune.client import Client
    from autotune.domain.study import Event, Trial

StudyArgument = Annotated[str, typer.Argument(help="The study's id, or as much of its beginning as tells it from "
                                              "others.")]

LEAST_TO_CANCEL = 6
"""Characters of an id: what was cancelled does not go on."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Studies")(submit)
    app.command(rich_help_panel="Studies")(watch)
    app.command("list", rich_help_panel="Studies")(list_studies)
    app.command(rich_help_panel="Studies")(export)
    app.command(rich_help_panel="Studies")(cancel)


@contextmanager
def connect(server: str | None, token: str | None) -> "Iterator[Client]":
    """A client by options and variables.

    Raises:
        UnauthorizedError: no token was given.
    """
    from autotune.client import Client, UnauthorizedError
    from autotune.settings import load_settings

    settings = load_settings(server=server, token=token)
    if settings.token is None:
        raise UnauthorizedError("give the API token with --token or AUTOTUNE_TOKEN; it was printed when the service "
                                "first started, and `autotune token` makes a new one")
    with Client(settings.server, settings.token.get_secret_value()) as client:
        yield client


def submit(
    file: FileArgument, server: ServerOption = None, token: TokenOption = None, json: JsonOption = False,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Watch it until it ends.")] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="Submitting again with the same key changes "
                                                        "nothing.")] = None,
) -> None:
    """Submit a study to the service."""
    from autotune.cli.files import read_study
    from autotune.cli.output import print_json

    request = read_study(file)
    with connect(server, token) as client:
        study = client.submit(request, idempotency_key=idempotency_key)
        if json:
            print_json(study)
        elif not wait:
            typer.echo(study.id)
        if wait:
            _follow(client, study.id, json=json)


def watch(
    study_id: StudyArgument, server: ServerOption = None, token: TokenOption = None, json: JsonOption = False,
) -> None:
    """Follow a study until it ends. Exit code 0 only if it succeeded; --json prints one event per line."""
    with connect(server, token) as client:
        _follow(client, client.find(study_id), json=json)


def list_studies(
    server: ServerOption = None, token: TokenOption = None, json: JsonOption = False,
    state: Annotated[str | None, typer.Option(help="queued, running, succeeded, failed, cancelled")] = None,
    model: Annotated[str | None, typer.Option(help="Only studies submitted under this name.")] = None,
) -> None:
    """List studies, newest first."""
    from autotune.cli.output import console, print_json, progress_text, rate_text, studies_table

    with connect(server, token) as client:
        found = list(client.studies(state=state, model=model))
    if json:
        print_json([study.model_dump(mode="json") for study in found])
        return
    console.print(studies_table(
        (study.id, study.name, study.state.value,
         "plan" if study.request.mode == "plan" else progress_text(study.progress),
         rate_text(study.best) if study.best else "") for study in found), soft_wrap=True)


def export(  # noqa: PLR0913, PLR0917 - one parameter per option
    study_id: StudyArgument, format: FormatOption = "engine", output: OutputOption = None, server: ServerOption = None,
    token: TokenOption = None, json: JsonOption = False,
    row: Annotated[int | None, typer.Option("--row", "-r", min=1, help="Of a plan, which has no winner.")] = None,
) -> None:
    """Write the winner as a configuration for a training tool. What to know about it goes to standard error."""
    from autotune.cli.output import print_json

    with connect(server, token) as client:
        file = client.export(client.find(study_id), format, row)
    if json:
        print_json(file._asdict())
        return
    write_export(file.text, file.notes, output)


def write_export(text: str, notes: tuple[str, ...], output: Path | None) -> None:
    """Write exported text to a file or standard output, and its notes to standard error.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    from autotune.domain.errors import FieldError, InvalidRequestError

    if output is None:
        typer.echo(text, nl=not text.endswith("\n"))
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(FieldError(str(output), f"cannot be written: {error.strerror}")) from None
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def cancel(
    study_id: StudyArgument, server: ServerOption = None, token: TokenOption = None, json: JsonOption = False,
) -> None:
    """Stop a study; its devices are free within seconds."""
    from autotune.cli.output import print_json

    with connect(server, token) as client:
        study = client.cancel(client.find(study_id, at_least=LEAST_TO_CANCEL))
    if json:
        print_json(study)
    else:
        typer.echo(f"study {study.id} is {'cancelled' if study.state.is_final else 'stopping'}")


def _follow(client: "Client", study_id: str, *, json: bool) -> None:
    """Follow a study to its end; leaves with exit code 1 unless it succeeded."""
    from autotune.cli.output import console, plan_parts, print_json, print_wide
    from autotune.cli.screen import StudyScreen

    trials: dict[int, Trial] = {}
    study = client.study(study_id)
    with StudyScreen(console, quiet=json) as screen:
        screen.show(study, trials)
        for event in client.events(study_id):
            if json:
                print_json(event)
            elif _update_trials(client, event, trials):
                study = client.study(study_id)
                screen.show(study, trials)
    study = client.study(study_id)
    if not json:
        finish(study, trials)
    if not json and study.request.mode == "plan" and study.state.value == "succeeded":
        print_wide(*plan_parts(client.plan(study_id)))
    if study.state.value != "succeeded":
        raise typer.Exit(1)


def _update_trials(client: "Client", event: "Event", trials: "dict[int, Trial]") -> bool:
    """Fetch what an event is about; whether the screen changes."""
    if event.kind.value == "trial_progress":
        return False
    if event.kind.value.startswith("trial_"):
        number = int(event.data["number"])
        trials[number] = client.trial(event.study_id, number)
    return True


def finish(study: "StudyLike", trials: "Mapping[int, Trial]") -> None:
    """Tell how a study ended.

    Args:
        trials: by number.
    """
    from autotune.cli.output import console, winner_lines

    reason = study.error or study.note
    lines = [f"study {study.id} {study.state.value}{f': {reason}' if reason else ''}"]
    if study.best is not None:
        lines += winner_lines(study.best, trials)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
