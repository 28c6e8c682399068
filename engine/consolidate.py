"""The whole model out of what the ranks hold, bucket by bucket."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.buckets import Bucket
from engine.collectives import Ranks
from engine.stages import Stage
from engine.update import OwnedUpdate


@dataclass(frozen=True)
class TrainingState:
    """What checkpoints and saved models are made of."""

    module: nn.Module
    stage: Stage
    update: OwnedUpdate
    ranks: Ranks


@torch.no_grad()
def consolidate(state: TrainingState) -> dict[str, Any]:
    """The module's state dict with whole parameters, in fp32, in tensors of their own; tied ones share theirs.

    What modules add by `get_extra_state` is this rank's, as it is.
    """
    values: dict[Tensor, Tensor] = {slot.managed.parameter: slot.view(full).clone()
                                    for bucket, full in whole_buckets(state) for slot in bucket.slots}
    for parameter in state.module.parameters():
        if parameter not in values:
            values[parameter] = parameter.detach().to(saved_dtype(parameter, torch.float32), copy=True)
    entries = state.module.state_dict(keep_vars=True)
    return {name: value if not isinstance(value, Tensor) else values[value] if value in values else
            value.detach().clone() for name, value in entries.items()}


def whole_buckets(state: TrainingState) -> Iterator[tuple[Bucket, Tensor]]:
    """Every bucket that the stage divides, with its values (size,) in fp32, from the masters where it trains.

    Collective: every rank takes all of them. One bucket is held at a time, unless the caller keeps more.
    """
    for bucket in (*state.stage.buckets, *state.stage.frozen_buckets):
        owned = state.update.master(bucket) if bucket.trainable else state.stage.parameters(bucket)
        full = torch.empty(bucket.size, dtype=torch.float32, device=state.ranks.device)
        full[state.stage.owned(bucket)] = owned.to(state.ranks.device, torch.float32)
        if owned.numel() < bucket.size:
            state.ranks.all_gather([full.view(state.ranks.size, -1)]).wait()
        yield bucket, full


def saved_dtype(parameter: Tensor, floating: torch.dtype) -> torch.dtype:
    """Of a parameter outside of training: floating-point ones have the dtype asked for, others keep theirs."""
    return floating if parameter.is_floating_point() else parameter.dtype
