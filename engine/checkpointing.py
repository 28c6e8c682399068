"""Activation checkpointing and compilation of blocks, by wrapping their forward."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from engine.config import TrainConfig
from engine.errors import ConfigurationError

Forward = Callable[..., Any]

_SAVED = frozenset({
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
})
"""Products with weights: dear to compute, their results small. All else is recomputed, attention first of all."""


def require_wrappable(blocks: Sequence[nn.Module], config: TrainConfig) -> None:
    """Check that what is configured for blocks can be done.

    Raises:
        ConfigurationError: there are no blocks, or the combination cannot run.
    """
    if not blocks and (config.compile or config.activation_checkpointing != "none"):
        field = "compile" if config.compile else "activation_checkpointing"
        raise ConfigurationError(f"{field} works by repeated blocks and none were found in the model; pass "
                                 "blocks=[...] to initialize, or turn it off", fields=(field,))
    if config.compile and config.activation_checkpointing == "selective" and config.zero_stage == 3:
        raise ConfigurationError("compile with activation_checkpointing selective cannot run at zero_stage 3, where "
                                 "parameters are gathered between the two; use full or none, or a lower stage",
                                 fields=("compile", "activation_checkpointing", "zero_stage"))


def wrap_inside(blocks: Sequence[nn.Module], config: TrainConfig) -> None:
    """Compile the blocks where configured; before the stage wraps them.

    Selective checkpointing sees single operators, so compilation goes around it and traces both.
    """
    if not config.compile:
        return
    for block in blocks:
        forward = block.forward
        if config.activation_checkpointing == "selective":
            forward = _checkpointed(forward, context_fn=_SELECTIVE)
        set_forward(block, torch.compile(forward))


def wrap_outside(blocks: Sequence[nn.Module], config: TrainConfig) -> None:
    """Checkpoint the blocks where configured; after the stage wrapped them, so that recomputing gathers again."""
    if config.activation_checkpointing == "none":
        return
    if config.activation_checkpointing == "selective" and config.compile:
        return
    options = {"context_fn": _SELECTIVE} if config.activation_checkpointing == "selective" else {}
    for block in blocks:
        set_forward(block, _checkpointed(block.forward, **options))


def set_forward(module: nn.Module, forward: Forward) -> None:
    """Replace a module's forward on this instance."""
    module.forward = forward


def unwrap(modules: Iterable[nn.Module]) -> None:
    """Give modules back the forward of their class."""
    for module in modules:
        module.__dict__.pop("forward", None)


def _checkpointed(forward: Forward, **options: Any) -> Forward:
    @wraps(forward)
    def run(*inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **keywords)
        return checkpoint(forward, *inputs, use_reentrant=False, **options, **keywords)

    return run


def _policy(_context: Any, operator: Any, *_inputs: Any, **_keywords: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)
