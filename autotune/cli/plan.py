"""``plan``: configurations ranked for a described cluster, without its hardware; ``clusters``: those there are."""

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.options import FileArgument, JsonOption, OutputOption

if TYPE_CHECKING:
    from autotune.domain.errors import FieldError
    from autotune.domain.request import StudyRequest
    from autotune.domain.study import Study
    from autotune.export import ExportedFile
    from autotune.settings import Settings

_FILE_ENDINGS = (".json", ".yaml", ".yml")

ClusterOption = Annotated[str | None, typer.Option("--cluster", "-c", help="A name that `autotune clusters` lists, or "
                                                   "the file of a cluster of your own; else that of the study.")]
DevicesOption = Annotated[int | None, typer.Option("--devices", "-n", help="How many of its devices; else those of the "
                                                   "study.")]
TensorOption = Annotated[str | None, typer.Option("--tensor-parallel", "-t", help="Degrees to plan with, such as 1,2,4 "
                                                  "or auto; else those of the study.")]
PipelineOption = Annotated[str | None, typer.Option("--pipeline-parallel", "-p", help="As --tensor-parallel.")]
ExportOption = Annotated[str | None, typer.Option("--export", "-e", help="Write a row for a training tool: engine, "
                                                  "deepspeed, accelerate, fsdp, ...; an unknown one lists all.")]
RowOption = Annotated[int | None, typer.Option("--row", "-r", min=1, help="The row to export; else the first without "
                                               "tensor and pipeline parallelism.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Studies")(plan)
    app.command(rich_help_panel="Studies")(clusters)


def plan(  # noqa: PLR0913, PLR0917 - one parameter per option
    file: FileArgument, cluster: ClusterOption = None, devices: DevicesOption = None, tensor: TensorOption = None,
    pipeline: PipelineOption = None, export: ExportOption = None, row: RowOption = None, output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Rank a model's configurations for a cluster that is not here. Predicted: nothing is measured or kept."""
    from autotune.cli.files import parse_study, read_mapping
    from autotune.domain.errors import ExportError, FieldError, InvalidRequestError
    from autotune.export import FORMATS
    from autotune.export import export as write
    from autotune.settings import load_settings

    if export is not None and export not in FORMATS:
        raise InvalidRequestError(FieldError(
            "--export", f"unknown format {export!r}: give one of {', '.join(FORMATS)}"))
    body = read_mapping(file, "study")
    hardware = body.get("hardware") or {}
    if isinstance(hardware, dict):  # else the study's own error says so
        given = {"cluster": _cluster(cluster, hardware.get("cluster")), "devices": devices,
                 "tensor_parallel": _degrees(tensor), "pipeline_parallel": _degrees(pipeline)}
        chosen = {name: value for name, value in given.items() if value is not None}
        body |= {"mode": "plan", "hardware": hardware | chosen}
    try:
        request = parse_study(body, file)
    except InvalidRequestError as error:
        raise InvalidRequestError(*(_of_cluster_file(item, file, cluster) for item in error.errors)) from None
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        settings = load_settings(data_dir=Path(folder), database=f"sqlite:///{Path(folder) / 'autotune.sqlite3'}")
        study = _make(request, settings, quiet=json or (export is not None and output is None))
    exported: ExportedFile | None = None
    refusal: ExportError | InvalidRequestError | None = None
    if export is not None and study.plan is not None and study.plan.rows:
        try:
            exported = write(study.planned(row or study.plan.first_exportable or 1), export)
        except (ExportError, InvalidRequestError) as error:  # it must not cost the plan
            refusal = error
    _report(study, exported, output, json=json)
    if refusal is not None:
        raise refusal
    if study.state.value != "succeeded":
        raise typer.Exit(1)


def _make(request: "StudyRequest", settings: "Settings", *, quiet: bool) -> "Study":
    from autotune.cli.output import console
    from autotune.cli.serve import open_store
    from autotune.cli.tune import run_until_it_ends
    from autotune.service.commands import Commands

    store = open_store(settings)
    try:
        study_id = Commands(store, settings).submit(request).id
        asyncio.run(run_until_it_ends(store, settings, study_id, quiet=quiet or not console.is_terminal))
        with store.read() as transaction:
            return transaction.studies.get(study_id)
    finally:
        store.close()


def _report(study: "Study", file: "ExportedFile | None", output: Path | None, *, json: bool) -> None:
    """The plan, the file of a row, or both where each has a place."""
    from autotune.cli.output import console, plan_parts, print_json, print_wide
    from autotune.cli.studies import write_export
    from autotune.service.schemas import PlanView, StudyView

    if json:
        print_json({"study": StudyView.of(study).model_dump(mode="json"),
                    "plan": PlanView.of(study.plan, len(study.plan.rows)).model_dump(mode="json")
                    if study.plan else None,
                    "export": file.model_dump(mode="json", include={"filename", "text", "notes"}) if file else None})
    elif file is None or output is not None:
        console.print(study.error or study.note or study.state.value, highlight=False, markup=False, soft_wrap=True)
        print_wide(*(plan_parts(study.plan) if study.plan else ()))
    if file is not None and (output is not None or not json):
        write_export(file.text, file.notes, output)


def clusters(
    name: Annotated[str | None, typer.Argument(help="Print this one, to be edited and given to `plan` as a "
                                               "file.")] = None, json: JsonOption = False,
) -> None:
    """List the clusters that can be planned for by name."""
    from autotune.cli.output import clusters_table, print_json, print_wide
    from autotune.domain.errors import FieldError, InvalidRequestError
    from autotune.search.layouts import described_clusters

    known = {cluster.name: cluster for cluster in described_clusters()}
    if name is not None and name not in known:
        raise InvalidRequestError(FieldError(
            "NAME", f"no cluster is known as {name!r}: give one of {', '.join(known)}"))
    if name is not None:
        typer.echo(known[name].model_dump_json(indent=2))
    elif json:
        print_json([cluster.model_dump(mode="json") for cluster in known.values()])
    else:
        print_wide(clusters_table(known.values()))


def _cluster(option: str | None, of_study: Any) -> Any:
    """A name, or what a file says.

    Raises:
        InvalidRequestError: neither the option nor the study names one, or the file is no description.
    """
    from autotune.cli.files import read_mapping
    from autotune.domain.errors import FieldError, InvalidRequestError
    from autotune.search.layouts import described_clusters

    if option is None and of_study is None:
        raise InvalidRequestError(FieldError("--cluster", "name a cluster, or give the file of your own; there are "
                                             f"{', '.join(cluster.name for cluster in described_clusters())}"))
    if option is None or not option.endswith(_FILE_ENDINGS):
        return option
    return read_mapping(Path(option), "cluster")


def _of_cluster_file(problem: "FieldError", study: Path, cluster: str | None) -> "FieldError":
    """A problem with a described cluster, at the field of its own file."""
    place = f"{study}: hardware.cluster."
    if cluster is None or not problem.field.startswith(place):
        return problem
    return problem._replace(field=f"{cluster}: {problem.field.removeprefix(place)}")


def _degrees(option: str | None) -> list[str] | str | None:
    return option.split(",") if option and option != "auto" else option
