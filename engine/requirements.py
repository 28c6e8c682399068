"""What `initialize` refuses, each with the field and the fix."""

import hashlib
from itertools import pairwise

from torch import nn
from torch.nn.parameter import is_lazy

from engine.collectives import Ranks
from engine.config import TrainConfig
from engine.errors import ConfigurationError


def require_trainable(model: nn.Module) -> None:
    """Check that the engine can lay this model out.

    Raises:
        ConfigurationError: it cannot.
    """
    _require_values(model)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigurationError("model: no parameter requires a gradient; leave at least one trainable",
                                 fields=("model",))
    for name, parameter in trainable:
        if not parameter.is_floating_point():
            raise ConfigurationError(f"model: parameter {name} is {parameter.dtype}; trainable parameters must be real "
                                     "floating-point: freeze it, or store it as real numbers", fields=("model",))
    _require_own_memory(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _require_plain_embedding(name, module)


def _require_values(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigurationError(f"model: {name} has no shape yet; run the model once on a sample before "
                                     "initialize", fields=("model",))
        if tensor.is_meta:
            raise ConfigurationError(f"model: {name} is on the meta device and has no values; build the model on a "
                                     "real device, or call its to_empty() and fill it before initialize",
                                     fields=("model",))


def _require_plain_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.sparse:
        raise ConfigurationError(f"model: {name} makes sparse gradients, which are not supported; build it with "
                                 "sparse=False", fields=("model",))
    if module.max_norm is not None:  # a write in forward, by each rank for the rows of its own batch
        raise ConfigurationError(f"model: {name} has max_norm, by which its forward rewrites the weight on each rank "
                                 "differently; build it with max_norm=None, and normalize the looked-up rows instead",
                                 fields=("model",))


def _require_own_memory(model: nn.Module) -> None:
    """Two `Parameter` objects over the same memory would part ways when laid out."""
    runs = sorted((parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name)
                  for name, parameter in model.named_parameters() if parameter.numel())
    for (_, end, name), (start, _, other) in pairwise(runs):
        if start < end:
            raise ConfigurationError(f"model: parameters {name} and {other} share memory but are two Parameter "
                                     "objects; tie them by assigning one to the other", fields=("model",))


def require_same_model(model: nn.Module, config: TrainConfig, ranks: Ranks) -> None:
    """Check that all ranks bring the same model and configuration, or they would wait for each other for ever.

    Raises:
        ConfigurationError: on every rank, naming what differs.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.requires_grad};".encode())
    theirs = ranks.gather_objects((digest.hexdigest(), config.model_dump_json()))
    for rank, (their_model, their_config) in enumerate(theirs):
        if their_model != theirs[0][0]:
            raise ConfigurationError(f"model: rank {rank} has other parameters than rank 0 (names, shapes or "
                                     "requires_grad); build the same model on every rank", fields=("model",))
        if their_config != theirs[0][1]:
            raise ConfigurationError(f"config: rank {rank} has another configuration than rank 0; give every rank the "
                                     "same", fields=("config",))
