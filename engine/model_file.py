"""A trained model as one safetensors file, which other tools load too.

The file (https://huggingface.co/docs/safetensors/index#format) is an 8-byte length, a JSON header with the name, dtype,
shape and place of every tensor, and the tensors. The header is known beforehand, so the tensors are written as they are
gathered: nowhere is the whole model in memory.

Of parameters that are tied there is one copy; the header's metadata says under which other names it is known, in the
way of `safetensors.torch.save_model`: alias -> name.
"""

import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.consolidate import TrainingState, saved_dtype, whole_buckets
from engine.errors import ConfigurationError
from engine.files import real_path, sync, together

_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
                torch.complex64: "C64", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
                torch.uint8: "U8", torch.bool: "BOOL"}


@dataclass(frozen=True)
class _Layout:
    """Where everything is in the file.

    Attributes:
        header: with its length before it.
        places: bytes from the file's start, by parameter or buffer of the module.
        size: of the file, in bytes.
    """

    header: bytes
    places: Mapping[Tensor, int]
    size: int


@torch.no_grad()
def save_model(state: TrainingState, path: Path, dtype: torch.dtype) -> None:
    """Write the module's state dict; parameters in `dtype`, from the masters, buffers as they are. Collective, atomic.

    All ranks gather one bucket at a time, and the first writes it.

    Raises:
        ConfigurationError: it cannot be written there; names `path`. The same on every rank.
    """
    layout = _lay_out(state.module, dtype)
    tensors = _tensors(state, dtype)

    def write() -> None:
        try:
            if state.ranks.rank == 0:
                _write(real_path(path), layout, tensors)
        finally:
            deque(tensors, maxlen=0)  # the other ranks, and a first one that cannot write, gather with the rest

    together(state.ranks, write)


def load_model(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a saved model into a plain module, which keeps its own dtypes and devices.

    Call it before `initialize`. Names and shapes must be the file's, tied parameters tied or not. The file has no extra
    state (`get_extra_state`): the module keeps its own.

    Raises:
        ConfigurationError: there is no such file, it is damaged, or it is of another model; names `path`.
    """
    found = real_path(path)
    try:
        with safe_open(found, framework="pt") as file:
            names, notes = list(file.keys()), file.metadata() or {}
            values = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"path: {os.fspath(path)} is no model that can be read: {error}",
                                 fields=("path",)) from error
    values.update({alias: values[name] for alias, name in notes.items() if name in values})
    present = model.state_dict()
    ours = {name: tuple(value.shape) for name, value in present.items() if isinstance(value, Tensor)}
    theirs = {name: tuple(value.shape) for name, value in values.items()}
    differences = [f"{name} is {theirs.get(name, 'not')} there and {ours.get(name, 'not')} here"
                   for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if differences:
        raise ConfigurationError(f"path: {os.fspath(path)} is of another model: {', '.join(differences[:3])}",
                                 fields=("path",))
    extra = {name: value for name, value in present.items() if not isinstance(value, Tensor)}
    model.load_state_dict({**values, **extra}, strict=True)


def _lay_out(module: nn.Module, dtype: torch.dtype) -> _Layout:
    names: dict[Tensor, str] = {}
    aliases: dict[str, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and names.setdefault(value, name) != name:
            aliases[name] = names[value]
    dtypes = {value: saved_dtype(value, dtype) if isinstance(value, nn.Parameter) else value.dtype for value in names}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
    offsets: dict[Tensor, int] = {}
    end = 0
    # The widest first: so each begins at a multiple of its own width.
    for value in sorted(names, key=lambda value: -dtypes[value].itemsize):
        offsets[value], end = end, end + value.numel() * dtypes[value].itemsize
        entries[names[value]] = {"dtype": _name(dtypes[value]), "shape": list(value.shape),
                                 "data_offsets": [offsets[value], end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return _Layout(header, {value: len(header) + offset for value, offset in offsets.items()}, len(header) + end)


def _name(dtype: torch.dtype) -> str:
    if dtype not in _DTYPE_NAMES:
        raise ConfigurationError(f"model: safetensors files hold no {dtype}; convert such parameters and buffers",
                                 fields=("model",))
    return _DTYPE_NAMES[dtype]


def _tensors(state: TrainingState, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Every parameter and buffer of the module's state dict, once, with its value on the host. Collective."""
    gathered: set[Tensor] = set()
    for bucket, full in whole_buckets(state):
        for slot in bucket.slots:
            gathered.add(slot.managed.parameter)
            yield slot.managed.parameter, slot.view(full).to("cpu", dtype)
    values = state.module.state_dict(keep_vars=True).values()
    for value in dict.fromkeys(value for value in values if isinstance(value, Tensor)):
        if value not in gathered:
            is_parameter = isinstance(value, nn.Parameter)
            yield value, value.detach().to("cpu", saved_dtype(value, dtype) if is_parameter else value.dtype)


def _write(path: Path, layout: _Layout, tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write beside `path`, then take its place."""
    if path.is_dir():
        raise ConfigurationError(f"path: {path} is a folder: name a file in it, such as {path / 'model.safetensors'}",
                                 fields=("path",))
    if path.exists() and not path.is_file():
        raise ConfigurationError(f"path: {path} is no regular file: name another", fields=("path",))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            file.write(layout.header)
            file.truncate(layout.size)
            for tensor, value in tensors:
                file.seek(layout.places[tensor])
                file.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        sync(new)
        new.replace(path)
        sync(path.parent)
    finally:
        new.unlink(missing_ok=True)
