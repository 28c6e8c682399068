"""``import``: another tool's configuration in the engine's words."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import JsonOption, OutputOption


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("import", rich_help_panel="Studies")(import_file)


def import_file(
    file: Annotated[Path, typer.Argument(help="A DeepSpeed configuration, or one of Accelerate's (DeepSpeed, FSDP), as "
                                         "JSON or YAML; - for standard input.")],
    devices: Annotated[int | None, typer.Option("--devices", "-n", min=1, help="Ranks, where the file does not say how "
                                                "many.")] = None,
    deepspeed: Annotated[Path | None, typer.Option("--deepspeed", help="The DeepSpeed file that an Accelerate one "
                                                   "names.")] = None,
    output: OutputOption = None, json: JsonOption = False,
) -> None:
    """Turn a configuration of DeepSpeed or Accelerate into the engine's: `config`, `optimizer`, batch and ranks.

    What has no counterpart is named on standard error, with the reason; what contradicts itself, or would train
    otherwise, is refused.
    """
    from autotune.cli.files import read_mapping
    from autotune.cli.output import print_json
    from autotune.cli.studies import write_export
    from autotune.domain.errors import FieldError, InvalidRequestError
    from autotune.importing import import_config

    content = read_mapping(file, "configuration")
    beside = read_mapping(deepspeed, "configuration") if deepspeed is not None else None
    try:
        found = import_config(content, world_size=devices, deepspeed=beside)
    except InvalidRequestError as error:
        raise InvalidRequestError(*(FieldError(f"{file}: {item.field}" if item.field else str(file), item.message)
                                    for item in error.errors)) from None
    if json:
        print_json(found)
    else:
        write_export(found.model_dump_json(indent=2, exclude={"notes"}) + "\n", found.notes, output)
