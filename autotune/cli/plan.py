"""``plan``: configurations ranked for a described cluster, without its hardware."""

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import FileArgument, JsonOption

if TYPE_CHECKING:
    from autotune.domain.request import StudyRequest
    from autotune.domain.study import PlanSummary, Study
    from autotune.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Studies")(plan)


def plan(
    file: FileArgument,
    cluster: Annotated[str, typer.Option("--cluster", "-c", help="A described cluster, such as a100-80gb; an unknown "
                                         "one lists all.")],
    devices: Annotated[int | None, typer.Option("--devices", "-n", help="How many of its devices; else those of the "
                                                "file.")] = None,
    json: JsonOption = False,
) -> None:
    """Rank a model's configurations for a cluster that is not here. Predicted: nothing is measured or kept."""
    from autotune.cli.files import read_study
    from autotune.service.fields import parse_request
    from autotune.settings import load_settings

    body = read_study(file).model_dump(mode="json")
    body["mode"], body["hardware"]["cluster"] = "plan", cluster
    if devices is not None:
        body["hardware"]["devices"] = devices
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        settings = load_settings(data_dir=Path(folder), database=f"sqlite:///{Path(folder) / 'autotune.sqlite3'}")
        study, found = _plan(parse_request(body), settings, quiet=json)
    _report(study, found, json=json)
    if study.state.value != "succeeded":
        raise typer.Exit(1)


def _plan(request: "StudyRequest", settings: "Settings", *, quiet: bool) -> "tuple[Study, PlanSummary | None]":
    from autotune.cli.serve import open_store
    from autotune.cli.tune import run_until_it_ends
    from autotune.service.commands import Commands

    store = open_store(settings)
    try:
        study_id = Commands(store, settings).submit(request).id
        asyncio.run(run_until_it_ends(store, settings, study_id, quiet=quiet))
        with store.read() as transaction:
            study = transaction.studies.get(study_id)
        return study, study.plan
    finally:
        store.close()


def _report(study: "Study", found: "PlanSummary | None", *, json: bool) -> None:
    from autotune.cli.output import console, plan_table, print_json
    from autotune.service.schemas import PlanView, StudyView

    if json:
        print_json({"study": StudyView.of(study).model_dump(mode="json"),
                    "plan": PlanView.of(found, len(found.fastest)).model_dump(mode="json") if found else None})
        return
    console.print(study.error or study.note or study.state.value, highlight=False, markup=False, soft_wrap=True)
    if found is not None and found.fastest:
        console.print(plan_table(study, found))
