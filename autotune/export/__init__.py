"""A study's winner in the words of the tools people train with. Pure.

What a format cannot express is refused with `ExportError`, or listed in the file's comments and in `notes`; nothing is
dropped in silence, and the batch is always written out or told.
"""

from collections.abc import Callable, Mapping

from autotune.domain.errors import ExportError
from autotune.domain.study import BestConfig
from autotune.export.accelerate import write_accelerate_deepspeed, write_accelerate_fsdp1, write_accelerate_fsdp2
from autotune.export.base import ExportedFile
from autotune.export.deepspeed import write_deepspeed, write_deepspeed_hf
from autotune.export.engine_file import write_engine
from autotune.export.fsdp import write_fsdp

_WRITERS: Mapping[str, Callable[[BestConfig], ExportedFile]] = {
    "engine": write_engine,
    "deepspeed": write_deepspeed,
    "deepspeed-hf": write_deepspeed_hf,
    "accelerate": write_accelerate_deepspeed,
    "accelerate-fsdp": write_accelerate_fsdp2,
    "accelerate-fsdp1": write_accelerate_fsdp1,
    "fsdp": write_fsdp,
}

FORMATS: tuple[str, ...] = tuple(_WRITERS)


def export(best: BestConfig, format: str) -> ExportedFile:
    """The winner as a file of one of `FORMATS`.

    Raises:
        ExportError: no such format, or the format cannot express the configuration; the message names the field and
            what to use instead.
    """
    if format not in _WRITERS:
        raise ExportError(f"no such format: {format}; there are {', '.join(FORMATS)}")
    return _WRITERS[format](best)


__all__ = ["FORMATS", "ExportedFile", "export"]
