"""What ranks agree on before an update: the gradient's global norm and which parameters were used."""

import torch
from torch import Tensor

from engine.collectives import Ranks
from engine.stages.base import Stage

_PIECE = 2**18
"""Elements summed at once on CPU: torch adds them up in a few fp32 numbers there, and at ten million the norm is wrong
by 4e-4. Converting 16-bit gradients first, piece by piece, takes a tenth of the time of having torch do it."""


def gradient_norm(stage: Stage, ranks: Ranks) -> float:
    """Euclidean norm of the summed gradient over all trainable parameters, the same on every rank.

    Every rank adds up its shard, in fp32 whatever the gradient's dtype: the squares of a 16-bit gradient leave its
    range. Not divided by anything. Not finite when some element is not.
    """
    norms = []
    for state in stage.gradients.states:
        gradient = state.reduced
        if gradient is not None:
            if gradient.numel() > state.bucket.shard_size:
                gradient = gradient[state.bucket.shard(ranks.rank)]
            norms += _norms(gradient)
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), device=ranks.device)
    return float(ranks.sum_small(total).sqrt())


def _norms(gradient: Tensor) -> list[Tensor]:
    if gradient.device.type != "cpu":
        return [torch.linalg.vector_norm(gradient, dtype=torch.float32)]
    return [torch.linalg.vector_norm(piece.float()) for piece in torch.split(gradient, _PIECE)]


def agree_on_used(stage: Stage, ranks: Ranks) -> set[int] | None:
    """Indices of the parameters that some rank has a gradient for in this window; None when all have one.

    The first time, ranks agree too on which buckets are reduced last.
    """
    slots = [slot.managed.index for state in stage.gradients.states for slot in state.bucket.slots]
    used = stage.gradients.used
    if ranks.size > 1:
        flags = torch.zeros(max(slots, default=0) + 1)
        flags[list(used)] = 1
        flags = ranks.sum_small(flags if ranks.has_host_transport else flags.to(ranks.device))
        # Reading the result stops the host until the device is done: only a rank that lacks something needs it.
        if len(used) < len(slots) or not stage.gradients.is_ordered:
            counts = flags.tolist()
            used = {index for index in slots if counts[index]}
            if not stage.gradients.is_ordered:
                stage.gradients.put_last({index for index in slots if counts[index] < ranks.size})
    return None if len(used) == len(slots) else used

