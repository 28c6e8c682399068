"""A study's winner, or a plan's row, in the words of the tools people train with. Pure.

What a format cannot express is refused with `ExportError`, or listed in the file's comments and in `notes`; nothing is
dropped in silence, and the batch is always written out or told.
"""

from collections.abc import Callable, Mapping

from autotune.domain.errors import ExportError
from autotune.domain.study import PlannedConfig
from autotune.export.accelerate import write_accelerate_deepspeed, write_accelerate_fsdp1, write_accelerate_fsdp2
from autotune.export.base import ExportedFile, Source
from autotune.export.deepspeed import write_deepspeed, write_deepspeed_hf
from autotune.export.engine_file import write_engine
from autotune.export.fsdp import write_fsdp

_WRITERS: Mapping[str, Callable[[Source], ExportedFile]] = {
    "engine": write_engine,
    "deepspeed": write_deepspeed,
    "deepspeed-hf": write_deepspeed_hf,
    "accelerate": write_accelerate_deepspeed,
    "accelerate-fsdp": write_accelerate_fsdp2,
    "accelerate-fsdp1": write_accelerate_fsdp1,
    "fsdp": write_fsdp,
}

FORMATS: tuple[str, ...] = tuple(_WRITERS)


def export(source: Source, format: str) -> ExportedFile:
    """The winner, or a row of a plan, as a file of one of `FORMATS`. What is predicted says so in the file.

    Raises:
        ExportError: no such format, or the format cannot express the configuration; the message names the field and
            what to use instead. A row with tensor or pipeline parallelism, which no format here can express.
    """
    if format not in _WRITERS:
        raise ExportError(f"no such format: {format}; there are {', '.join(FORMATS)}")
    if isinstance(source, PlannedConfig) and not source.point.runs_here:
        raise ExportError(
            f"row {source.row} has tensor_parallel {source.point.tensor_parallel} and pipeline_parallel "
            f"{source.point.pipeline_parallel}, which none of {', '.join(FORMATS)} trains with: export a row in which "
            "both are 1")
    return _WRITERS[format](source)


__all__ = ["FORMATS", "ExportedFile", "Source", "export"]
