"""Checkpoints that load at any world size, stage and precision, and the consolidated state dict.

A checkpoint is a directory: what torch.distributed.checkpoint writes (per parameter, flattened: `model/NAME` and
`optimizer/NAME/STATE`; buffers as `buffer/NAME`), and `progress.json` with the numbers that are the same on every rank.
"""

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from engine.buckets import Bucket
from engine.collectives import Ranks
from engine.errors import ConfigurationError
from engine.flat_shard import FlatLoadPlanner, FlatSavePlanner, FlatShard
from engine.stages import Stage
from engine.update import OwnedUpdate

_PROGRESS = "progress.json"

_KERNEL_CHOICES = ("fused", "foreach", "capturable")
"""Options of a group that say how its device computes, not what."""


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint is made of."""

    module: nn.Module
    stage: Stage
    update: OwnedUpdate
    ranks: Ranks


@dataclass(frozen=True)
class Progress:
    """Counters of training."""

    steps: int
    skipped_steps: int
    loss_scale: dict[str, float]


@torch.no_grad()
def consolidate(state: TrainingState) -> dict[str, Tensor]:
    """The module's state dict with whole parameters, in fp32, in tensors of their own; tied ones share theirs."""
    values: dict[Tensor, Tensor] = {}
    for bucket in (*state.stage.buckets, *state.stage.frozen_buckets):
        owned = state.update.master(bucket) if bucket.trainable else state.stage.parameters(bucket)
        full = torch.empty(bucket.size, dtype=torch.float32, device=state.ranks.device)
        full[state.stage.owned(bucket)] = owned.to(state.ranks.device, torch.float32)
        if owned.numel() < bucket.size:
            state.ranks.all_gather([full.view(state.ranks.size, -1)]).wait()
        values.update({slot.managed.parameter: slot.view(full).clone() for slot in bucket.slots})
    for parameter in state.module.parameters():
        if parameter not in values:
            dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
            values[parameter] = parameter.detach().to(dtype, copy=True)
    entries = state.module.state_dict(keep_vars=True)
    return {name: values[value] if value in values else value.detach().clone() for name, value in entries.items()
            if isinstance(value, Tensor)}


@torch.no_grad()
def save_checkpoint(state: TrainingState, progress: Progress, path: Path) -> None:
    """Write everything to a directory beside `path`, which then takes its place."""
    new = path.with_name(path.name + ".new")
    if state.ranks.rank == 0:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    state.ranks.barrier()
    entries = _model_entries(state)
    numbers = _add_optimizer_states(state, entries)
    with _single_process_is_fine():
        save(entries, checkpoint_id=new, planner=FlatSavePlanner(), process_group=state.ranks.group,
                 no_dist=state.ranks.group is None)
    every_rank = state.ranks.gather_objects(numbers)
    if state.ranks.rank == 0:
        groups = [{key: value for key, value in group.items() if key != "params" and _is_plain(value)}
                  for group in state.update.optimizer.param_groups]
        merged = {name: value for numbers in every_rank for name, value in numbers.items()}
        (new / _PROGRESS).write_text(json.dumps({**asdict(progress), "groups": groups, "optimizer_numbers": merged}))
        _replace(path, new)
    state.ranks.barrier()


@torch.no_grad()
def load_checkpoint(state: TrainingState, path: Path) -> Progress:
    """Read this rank's part into masters, optimizer states and buffers; the module computes with them afterwards.

    Raises:
        ConfigurationError: there is no checkpoint, or it is of another model.
    """
    path = _present(path)
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    entries = _model_entries(state)
    _require_same_parameters(entries, metadata, path)
    saved = json.loads((path / _PROGRESS).read_text())
    _expect_optimizer_states(state, entries, metadata, saved["optimizer_numbers"])
    with _single_process_is_fine():
        load(entries, storage_reader=reader, planner=FlatLoadPlanner(), process_group=state.ranks.group,
             no_dist=state.ranks.group is None)
    _share_scalars(state, entries)
    for group, values in zip(state.update.optimizer.param_groups, saved["groups"], strict=False):
        group.update({key: tuple(value) if isinstance(group.get(key), tuple) else value
                      for key, value in values.items() if key not in _KERNEL_CHOICES})
    state.update.publish()
    return Progress(saved["steps"], saved["skipped_steps"], saved["loss_scale"])


def _model_entries(state: TrainingState) -> dict[str, Any]:
    """Parameters and buffers as this rank holds them, under the names they are saved by."""
    entries: dict[str, Any] = {}
    seen: set[Tensor] = set()

    def add(bucket: Bucket, first: int, values: Tensor) -> None:
        for run in bucket.runs(first, first + values.numel()):
            shard = entries.setdefault(f"model/{run.managed.name}", FlatShard(run.managed.parameter.numel()))
            shard.pieces[run.start] = values[run.place]

    for bucket in state.stage.buckets:
        seen.update(slot.managed.parameter for slot in bucket.slots)
        for part in state.update.bucket_parts(bucket):
            add(bucket, state.stage.owned(bucket).start + part.place.start, part.master)
    for bucket in state.stage.frozen_buckets:
        seen.update(slot.managed.parameter for slot in bucket.slots)
        add(bucket, state.stage.owned(bucket).start, state.stage.parameters(bucket))
    for name, parameter in state.module.named_parameters():
        if parameter not in seen and parameter.numel():
            entries[f"model/{name}"] = FlatShard(parameter.numel(), {0: parameter.detach().view(-1)})
    for name, buffer in state.module.named_buffers():
        if buffer.numel():
            entries[f"buffer/{name}"] = buffer
    return entries


def _add_optimizer_states(state: TrainingState, entries: dict[str, Any]) -> dict[str, float]:
    """Add this rank's states to what is saved; those that are plain numbers are returned, by the same names."""
    numbers: dict[str, float] = {}
    for piece in state.update.slices:
        for key, value in state.update.optimizer.state.get(piece.tensor, {}).items():
            name = f"optimizer/{piece.managed.name}/{key}"
            if not isinstance(value, Tensor):
                if _is_plain(value):
                    numbers[name] = value
            elif value.shape == piece.tensor.shape:
                entries.setdefault(name, FlatShard(piece.managed.parameter.numel())).pieces[piece.start] = value
            else:
                entries[name] = value
    return numbers


def _expect_optimizer_states(state: TrainingState, entries: dict[str, Any], metadata: Metadata,
                             numbers: dict[str, float]) -> None:
    """Make room for the states that a checkpoint has of this rank's slices, and drop the present ones."""
    optimizer = state.update.optimizer
    optimizer.state.clear()
    saved: dict[str, dict[str, TensorStorageMetadata]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if name.startswith("optimizer/") and isinstance(entry, TensorStorageMetadata):
            saved.setdefault(name.split("/", 1)[1].rsplit("/", 1)[0], {})[name] = entry
    for piece in state.update.slices:
        parameter, numel = piece.managed.name, piece.managed.parameter.numel()
        for name, entry in saved.get(parameter, {}).items():
            if entry.size == torch.Size([numel]):
                value = torch.zeros_like(piece.tensor)
                entries.setdefault(name, FlatShard(numel)).pieces[piece.start] = value
            else:
                value = _scalar_like(optimizer, piece.tensor, piece.group, entry.properties.dtype)
                entries.setdefault(name, value)
            optimizer.state[piece.tensor][name.rsplit("/", 1)[1]] = value
        prefix = f"optimizer/{parameter}/"
        optimizer.state[piece.tensor].update({name.removeprefix(prefix): number for name, number in numbers.items()
                                              if name.rpartition("/")[0] + "/" == prefix})
        if not optimizer.state[piece.tensor]:
            del optimizer.state[piece.tensor]


def _scalar_like(optimizer: torch.optim.Optimizer, tensor: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Step counters live beside the parameter for fused and capturable kernels, else on the host."""
    options = optimizer.param_groups[group]
    device = tensor.device if options.get("fused") or options.get("capturable") else torch.device("cpu")
    return torch.zeros((), dtype=dtype, device=device)


def _share_scalars(state: TrainingState, entries: dict[str, Any]) -> None:
    """A parameter in several slices was given its scalars once: copy them to the others."""
    for piece in state.update.slices:
        states = state.update.optimizer.state.get(piece.tensor, {})
        for key, value in states.items():
            entry = entries.get(f"optimizer/{piece.managed.name}/{key}")
            if isinstance(entry, Tensor) and entry is not value:
                value.copy_(entry)


def _require_same_parameters(entries: dict[str, Any], metadata: Metadata, path: Path) -> None:
    ours = {name for name in entries if name.startswith("model/")}
    theirs = {name for name in metadata.state_dict_metadata if name.startswith("model/")}
    unknown = sorted(ours - theirs)
    if unknown:
        raise ConfigurationError(f"path: {path} is a checkpoint of another model; it lacks {', '.join(unknown[:3])}",
                                 fields=("path",))


def _replace(path: Path, new: Path) -> None:
    """Put `new` where `path` is. Killed at any moment, one of the two is found by `_present`."""
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _present(path: Path) -> Path:
    for candidate in (path, path.with_name(path.name + ".old")):
        if (candidate / _PROGRESS).exists():
            return candidate
    raise ConfigurationError(f"path: there is no checkpoint at {path}", fields=("path",))


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


@contextmanager
def _single_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
