"""Configurations of other tools in the engine's words: the way back from `autotune.export`. Pure.

Every key of a file is used, or named in the notes with the reason, or refused. Paths in a file are never opened.
"""

from collections.abc import Mapping
from typing import Any

from autotune.domain.errors import FieldError, InvalidRequestError
from autotune.importing.accelerate import is_accelerate, read_accelerate
from autotune.importing.base import ImportedConfig
from autotune.importing.deepspeed import is_deepspeed, read_deepspeed


def import_config(content: Mapping[str, Any], *, world_size: int | None = None,
                  deepspeed: Mapping[str, Any] | None = None) -> ImportedConfig:
    """A DeepSpeed configuration, or one of Accelerate's (DeepSpeed, FSDP or plain data parallelism).

    Args:
        world_size: ranks, where the file does not say.
        deepspeed: the file that an Accelerate configuration names as its deepspeed_config_file.

    Raises:
        InvalidRequestError: it is neither, contradicts itself, or wants what the engine cannot do; names every key at
            fault as the file does.
    """
    if is_accelerate(content):
        if deepspeed is not None and (is_accelerate(deepspeed) or not is_deepspeed(deepspeed)):
            raise InvalidRequestError(FieldError("", "the second file is no DeepSpeed configuration"))
        return read_accelerate(content, world_size=world_size, deepspeed=deepspeed)
    if not is_deepspeed(content):
        raise InvalidRequestError(FieldError("", "neither a DeepSpeed configuration nor one of Accelerate's: none of "
                                             "their keys is in it"))
    if deepspeed is not None:
        raise InvalidRequestError(FieldError("", "a DeepSpeed file of its own belongs to one of Accelerate's only"))
    return read_deepspeed(content, world_size=world_size)


__all__ = ["ImportedConfig", "import_config"]
