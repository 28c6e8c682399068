"""Checkpoints that load at any world size, stage and precision.

A checkpoint is a directory: what torch.distributed.checkpoint writes (per parameter, flattened: `model/NAME` and
`optimizer/NAME/STATE`; buffers as `buffer/NAME`), and `progress.json`, a `Manifest`, which is written last.

A save writes to a hidden directory beside the checkpoint that it replaces (`.NAME.new`), forces it to the disk, moves
the present one aside (`.NAME.old`) and takes its place. So whenever a save is cut off, a whole checkpoint is left under
one of the two names that a load looks for.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from engine.buckets import Bucket
from engine.consolidate import TrainingState
from engine.errors import ConfigurationError
from engine.files import first_ranks_path, sync, together
from engine.flat_shard import FlatLoadPlanner, FlatSavePlanner, FlatShard
from engine.owned import Slice
from engine.values import Value

_MANIFEST = "progress.json"
_METADATA = ".metadata"

_KERNEL_CHOICES = ("fused", "foreach", "capturable")
"""Options of a group that say how its device computes, not what."""


@dataclass(frozen=True)
class Progress:
    """Counters of training."""

    steps: int
    skipped_steps: int
    loss_scale: dict[str, float]


class Manifest(Value):
    """What a checkpoint is of, and the numbers that are the same on every rank.

    Attributes:
        metadata_digest: SHA-256 of what torch.distributed.checkpoint finds its data by, which is pickled: only what was
            written is ever unpickled.
        shapes: of parameters and buffers, by the names they are saved by.
        optimizer: its class.
        groups: its groups' options, without the parameters.
        numbers: of its states those that are no tensors, by parameter and state.
    """

    format: Literal[1] = 1
    metadata_digest: str
    progress: Progress
    shapes: dict[str, list[int]]
    optimizer: str
    groups: list[dict[str, Any]]
    numbers: dict[str, dict[str, Any]]


@torch.no_grad()
def save_checkpoint(state: TrainingState, progress: Progress, path: Path) -> None:
    """Write everything beside `path`, then take its place.

    Raises:
        ConfigurationError: something other than a checkpoint is there, or nothing can be written there.
    """
    ranks, is_first = state.ranks, state.ranks.rank == 0
    path = first_ranks_path(ranks, path)
    new = path.with_name(f".{path.name}.new")
    together(ranks, lambda: _make_room(path, new) if is_first else None)
    entries = {**_parameter_entries(state), **(_buffer_entries(state) if is_first else {})}
    numbers = _add_optimizer_states(state, entries)
    try:
        with _errors_of_torch(f"path: {path} cannot be written"):
            save(entries, storage_writer=FileSystemWriter(new), planner=FlatSavePlanner(), process_group=ranks.group,
                 no_dist=ranks.group is None)
        every_rank = ranks.gather_objects(numbers)
        together(ranks, lambda: _complete(state, progress, every_rank, new=new, path=path) if is_first else None)
    except ConfigurationError:
        if is_first:
            shutil.rmtree(new, ignore_errors=True)  # a full disk is not to stay so for its sake
        raise


@torch.no_grad()
def load_checkpoint(state: TrainingState, path: Path, *, before_change: Callable[[], None]) -> Progress:
    """Read this rank's part into masters, optimizer states and buffers; the module computes with them afterwards.

    Beside that part, at most three saved pieces (of `flat_shard.PIECE` elements) are in memory at a time.

    Args:
        before_change: called once the checkpoint is known to fit, before anything is changed.

    Raises:
        ConfigurationError: there is no checkpoint, it is damaged, or it is of another model or optimizer; the same on
            every rank. Nothing was changed, unless damage to what a file contains came to light while it was read.
    """
    ranks = state.ranks
    path = first_ranks_path(ranks, path)
    path = together(ranks, lambda: _present(path))
    manifest, metadata = together(ranks, lambda: _read(state, path))
    entries = {**_parameter_entries(state), **_buffer_entries(state)}
    before_change()
    _expect_optimizer_states(state, entries, metadata, manifest.numbers)
    with _errors_of_torch(f"path: {path} is damaged"):
        load(entries, storage_reader=FileSystemReader(path), planner=FlatLoadPlanner(), process_group=ranks.group,
             no_dist=ranks.group is None)
    _share_scalars(state, entries)
    for group, options in zip(state.update.optimizer.param_groups, manifest.groups, strict=True):
        _set_options(group, options)
    state.update.publish()
    return manifest.progress


# What is in it


def _parameter_entries(state: TrainingState) -> dict[str, Any]:
    """Parameters as this rank holds them, under the names they are saved by; empty ones left out."""
    entries: dict[str, Any] = {}
    seen: set[Tensor] = set()

    def add(bucket: Bucket, first: int, values: Tensor) -> None:
        for run in bucket.runs(first, first + values.numel()):
            shard = entries.setdefault(f"model/{run.managed.name}", FlatShard(run.managed.parameter.numel()))
            shard.add(run.start, values[run.place])

    for bucket in state.stage.buckets:
        seen.update(slot.managed.parameter for slot in bucket.slots)
        for part in state.update.bucket_parts(bucket):
            add(bucket, state.stage.owned(bucket).start + part.place.start, part.master)
    for bucket in state.stage.frozen_buckets:
        seen.update(slot.managed.parameter for slot in bucket.slots)
        add(bucket, state.stage.owned(bucket).start, state.stage.parameters(bucket))
    for name, parameter in state.module.named_parameters():
        if parameter not in seen and parameter.numel():
            shard = entries[f"model/{name}"] = FlatShard(parameter.numel())
            shard.add(0, parameter.detach().view(-1))
    return entries


def _buffer_entries(state: TrainingState) -> dict[str, Any]:
    """Buffers that the module's state dict has, empty ones left out. Where ranks differ, the first rank's are saved."""
    return {f"buffer/{name}": buffer for name, buffer in _persistent_buffers(state) if buffer.numel()}


def _persistent_buffers(state: TrainingState) -> Iterator[tuple[str, Tensor]]:
    passing = {f"{prefix}.{name}" if prefix else name for prefix, module in state.module.named_modules()
               for name in module._non_persistent_buffers_set}
    return ((name, buffer) for name, buffer in state.module.named_buffers() if name not in passing)


def _shapes(state: TrainingState) -> dict[str, list[int]]:
    parameters = {f"model/{name}": list(parameter.shape) for name, parameter in state.module.named_parameters()}
    return parameters | {f"buffer/{name}": list(buffer.shape) for name, buffer in _persistent_buffers(state)}


def _add_optimizer_states(state: TrainingState, entries: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Add this rank's states to what is saved; those that are plain numbers are returned, by parameter."""
    numbers: dict[str, dict[str, Any]] = {}
    for piece in state.update.slices:
        for key, value in state.update.optimizer.state.get(piece.tensor, {}).items():
            name = f"optimizer/{piece.managed.name}/{key}"
            if not isinstance(value, Tensor):
                if _is_plain(value):
                    numbers.setdefault(piece.managed.name, {})[key] = value
            elif value.shape == piece.tensor.shape:
                entries.setdefault(name, FlatShard(piece.managed.parameter.numel())).add(piece.start, value)
            else:
                entries[name] = value
    return numbers


def _expect_optimizer_states(state: TrainingState, entries: dict[str, Any], metadata: Metadata,
                             numbers: dict[str, dict[str, Any]]) -> None:
    """Make room for the states that a checkpoint has of this rank's slices, and drop the present ones.

    A parameter without saved states has not been updated yet, and will start as in a new optimizer.
    """
    optimizer = state.update.optimizer
    optimizer.state.clear()
    saved: dict[str, dict[str, TensorStorageMetadata]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        kind, _, rest = name.partition("/")
        if kind == "optimizer" and isinstance(entry, TensorStorageMetadata):
            parameter, _, key = rest.rpartition("/")
            saved.setdefault(parameter, {})[key] = entry
    for piece in state.update.slices:
        parameter, numel = piece.managed.name, piece.managed.parameter.numel()
        states = dict(numbers.get(parameter, {}))
        for key, entry in saved.get(parameter, {}).items():
            name = f"optimizer/{parameter}/{key}"
            dtype = entry.properties.dtype
            if entry.size == torch.Size([numel]):
                value = torch.zeros_like(piece.tensor, dtype=None if dtype.is_floating_point else dtype)
                entries.setdefault(name, FlatShard(numel)).add(piece.start, value)
            else:
                value = torch.zeros(entry.size, dtype=dtype, device=_scalar_device(optimizer, piece))
                entries.setdefault(name, value)
            states[key] = value
        if states:
            optimizer.state[piece.tensor] = states


def _scalar_device(optimizer: torch.optim.Optimizer, piece: Slice) -> torch.device:
    """Step counters live beside the parameter for fused and capturable kernels, else on the host."""
    options = optimizer.param_groups[piece.group]
    return piece.tensor.device if options.get("fused") or options.get("capturable") else torch.device("cpu")


def _share_scalars(state: TrainingState, entries: dict[str, Any]) -> None:
    """A parameter in several slices was given its scalars once: copy them to the others."""
    for piece in state.update.slices:
        for key, value in state.update.optimizer.state.get(piece.tensor, {}).items():
            entry = entries.get(f"optimizer/{piece.managed.name}/{key}")
            if isinstance(entry, Tensor) and entry is not value:
                value.copy_(entry)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What a group says of its parameters; a learning rate may be a tensor."""
    plain = {key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
             for key, value in group.items() if key != "params"}
    return {key: value for key, value in plain.items() if _is_plain(value)}


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        present = group.get(key)
        if isinstance(present, Tensor):
            present.fill_(value)
        elif key not in _KERNEL_CHOICES:
            group[key] = tuple(value) if isinstance(present, tuple) else value


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


# Where it is


def _make_room(path: Path, new: Path) -> None:
    if path.exists() and not (path / _MANIFEST).exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigurationError(f"path: {path} exists and is no checkpoint: choose another, or remove it",
                                 fields=("path",))
    if new.exists():  # left by a save that was cut off
        shutil.rmtree(new)
    new.mkdir(parents=True)


def _complete(state: TrainingState, progress: Progress, numbers: list[dict[str, dict[str, Any]]], *, new: Path,
              path: Path) -> None:
    """Write the manifest, and put the new directory where `path` is."""
    merged: dict[str, dict[str, Any]] = {}
    for of_rank in numbers:
        merged.update(of_rank)
    optimizer = state.update.optimizer
    manifest = Manifest(metadata_digest=_digest(new), progress=progress, shapes=_shapes(state), numbers=merged,
                        optimizer=type(optimizer).__name__,
                        groups=[_options(group) for group in optimizer.param_groups])
    (new / _MANIFEST).write_text(json.dumps(manifest.model_dump()))
    sync(new / _MANIFEST)
    sync(new)
    old = _aside(path)
    if (path / _MANIFEST).exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    new.rename(path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _present(path: Path) -> Path:
    for candidate in (path, _aside(path)):
        if (candidate / _MANIFEST).exists():
            return candidate
    raise ConfigurationError(f"path: there is no checkpoint at {path}", fields=("path",))


def _read(state: TrainingState, path: Path) -> tuple[Manifest, Metadata]:
    """What a checkpoint consists of, after a check that all of it is there and that it fits."""
    try:
        manifest = Manifest.model_validate(json.loads((path / _MANIFEST).read_bytes()))
    except ValueError as error:
        raise ConfigurationError(f"path: {path / _MANIFEST} is damaged, or of another release: {error}",
                                 fields=("path",)) from error
    if _digest(path) != manifest.metadata_digest:
        raise ConfigurationError(f"path: {path / _METADATA} is damaged", fields=("path",))
    metadata = FileSystemReader(path).read_metadata()
    sizes: dict[Path, int] = {}
    for info in metadata.storage_data.values():
        file = path / info.relative_path
        sizes[file] = max(sizes.get(file, 0), info.offset + info.length)
    for file, size in sizes.items():
        if not file.exists() or file.stat().st_size < size:
            raise ConfigurationError(f"path: {file} is missing or cut short", fields=("path",))
    _require_same_model(_shapes(state), manifest.shapes, path)
    _require_same_optimizer(state.update.optimizer, manifest, path)
    return manifest, metadata


def _digest(path: Path) -> str:
    return hashlib.sha256((path / _METADATA).read_bytes()).hexdigest()


def _require_same_model(ours: dict[str, list[int]], theirs: dict[str, list[int]], path: Path) -> None:
    differences = [f"{name.partition('/')[2]} is {_shape(theirs.get(name))} there and {_shape(ours.get(name))} here"
                   for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if differences:
        raise ConfigurationError(f"path: {path} is a checkpoint of another model: {', '.join(differences[:3])}",
                                 fields=("path",))


def _shape(shape: list[int] | None) -> str:
    return "not" if shape is None else str(tuple(shape))


def _require_same_optimizer(optimizer: torch.optim.Optimizer, manifest: Manifest, path: Path) -> None:
    ours = (type(optimizer).__name__, len(optimizer.param_groups))
    theirs = (manifest.optimizer, len(manifest.groups))
    if ours != theirs:
        raise ConfigurationError(f"path: {path} is a checkpoint of {theirs[0]} with {theirs[1]} parameter groups, and "
                                 f"the optimizer here is {ours[0]} with {ours[1]}", fields=("path",))


@contextmanager
def _errors_of_torch(problem: str) -> Iterator[None]:
    """torch.distributed.checkpoint tells every rank the errors of all; the first of them becomes ours.

    Raises:
        ConfigurationError: naming `path`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process is fine
        try:
            yield
        except CheckpointException as failed:
            rank, (error, _) = next(iter(failed.failures.items()))
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or not isinstance(error, Exception):
                raise error from failed
            raise ConfigurationError(f"{problem}: rank {rank}: {error}", fields=("path",)) from error
