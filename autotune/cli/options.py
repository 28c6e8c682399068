"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on. [AUTOTUNE_HOST; 127.0.0.1]")]
PortOption = Annotated[int | None, typer.Option("--port", min=0, max=65535,
                                                help="Port to listen on; 0: any. [AUTOTUNE_PORT; 8420]")]
DataDirOption = Annotated[Path | None, typer.Option(
    "--data-dir", help="Everything kept lies here. [AUTOTUNE_DATA_DIR; ~/.local/share/autotune]")]
DatabaseOption = Annotated[str | None, typer.Option(
    "--database", help="Database URL, postgresql:// or sqlite:///. "
    "[AUTOTUNE_DATABASE; an SQLite file in the data directory]")]
DeviceOption = Annotated[str | None, typer.Option(
    "--device", help="Kind of devices to offer: auto, cpu, cuda. [AUTOTUNE_DEVICE; auto]")]
ServerOption = Annotated[str | None, typer.Option(
    "--server", help="The service's URL. [AUTOTUNE_SERVER; http://127.0.0.1:8420]")]
TokenOption = Annotated[str | None, typer.Option(
    "--token", help="The API token; better given as a variable, which no process list shows. [AUTOTUNE_TOKEN]")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
FileArgument = Annotated[Path, typer.Argument(help="The study as JSON or YAML, or - for standard input.")]
FormatOption = Annotated[str, typer.Option(
    "--format", "-f", help="engine, deepspeed, accelerate, fsdp, ...; an unknown one lists all.")]
OutputOption = Annotated[Path | None, typer.Option(
    "--output", "-o", help="File to write; standard output when not given.")]
