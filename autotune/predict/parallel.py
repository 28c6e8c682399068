"""Tensor and pipeline parallelism: how many devices share one copy of the model, and what each holds of it.

Tensor parallelism cuts every matrix of a block between devices (Megatron-LM, arXiv 1909.08053); pipeline parallelism
gives each stage an equal number of neighbouring blocks and runs one forward, one backward pass in turn (1F1B, arXiv
2104.04473). What is said here of one device is said of the device that holds most.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from engine.config import Checkpointing, TrainConfig
from engine.profile import ModelProfile
from engine.values import BYTES_PER_ELEMENT

_WHOLE_ELEMENTS = 5
"""Per token and block, activations of the hidden size that tensor parallelism does not cut: inputs of both norms, of
attention and of the feed-forward part, and dropout (10 of 34 bytes in 16 bit; arXiv 2205.05198, equation 2)."""

_LOSS_BYTES = {"eager": 4, "fused": 0}
"""Kept per logit beside the logit itself."""

_PARAMETERS_PER_SQUARE = 12
"""A transformer block of hidden size h has 12 h^2 parameters."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Devices that share one copy of the model: tensor x pipeline."""

    tensor: int = 1
    pipeline: int = 1

    def data(self, devices: int) -> int:
        """Copies of the model on so many devices.

        Raises:
            ValueError: a copy does not fit a whole number of times.
        """
        copies, rest = divmod(devices, self.tensor * self.pipeline)
        if rest or not copies:
            raise ValueError(f"{devices} devices are not a multiple of tensor {self.tensor} x pipeline {self.pipeline}")
        return copies


ALONE = Parallel()
"""Every device has a copy of its own."""


class ActivationPeak(NamedTuple):
    """Bytes of one device: kept for backward passes, and beside them for a moment."""

    kept: int
    transient: int


def part_of(model: ModelProfile, parallel: Parallel) -> ModelProfile:
    """The parameters and blocks of one device. What is outside of blocks counts at every stage: a tied embedding is
    needed by the first and the last.

    Raises:
        ValueError: there are fewer blocks than pipeline stages.
    """
    if parallel == ALONE:
        return model
    if parallel.pipeline > max(model.block_count, 1):
        raise ValueError(f"{parallel.pipeline} pipeline stages need as many blocks; the model has {model.block_count}")
    tensor, blocks = parallel.tensor, stage_blocks(model, parallel)
    stage = _largest_run(_block_sizes(model), blocks)
    held = min(outside_blocks(model) + sum(stage), model.parameters)
    return model.model_copy(update={
        "parameters": _cut(held, tensor),
        "trainable_parameters": _cut(_cut(held * model.trainable_parameters, model.parameters), tensor),
        "parameter_tensors": _cut(model.parameter_tensors * max(blocks, 1), max(model.block_count, 1)),
        "largest_parameter": _cut(model.largest_parameter, tensor),
        "block_count": blocks,
        "block_parameters": _cut(model.block_parameters, tensor),
        "block_sizes": tuple(_cut(size, tensor) for size in stage)})


def stage_blocks(model: ModelProfile, parallel: Parallel) -> int:
    """Blocks of the fullest pipeline stage."""
    return _cut(model.block_count, parallel.pipeline)


def outside_blocks(model: ModelProfile) -> int:
    """Elements of parameters outside of blocks; none where blocks share so many that they have more than the model."""
    return max(model.parameters - sum(_block_sizes(model)), 0)


def _block_sizes(model: ModelProfile) -> tuple[int, ...]:
    return model.block_sizes or (model.block_parameters,) * model.block_count


@lru_cache(maxsize=256)
def _largest_run(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The largest of all runs of so many neighbours: wherever stages begin, none has more."""
    return max((sizes[first:first + length] for first in range(len(sizes) - length + 1)), key=sum)


def stage_share(model: ModelProfile, parallel: Parallel) -> float:
    """The part of a model's work that the fullest pipeline stage has: all of it where nothing repeats."""
    return stage_blocks(model, parallel) / model.block_count if model.block_count else 1.0


def activation_bytes(model: ModelProfile, config: TrainConfig, parallel: Parallel) -> ActivationPeak:
    """Of the whole model's profile, what one device holds.

    The first pipeline stage keeps the activations of as many micro-batches as there are stages, the last one those of
    one and its logits.

    Raises:
        KeyError: the profile lacks this checkpointing and precision.
    """
    entry = model.activation(config.activation_checkpointing, config.precision)
    size = config.micro_batch_size
    transient = size * max(entry.peak_per_sample - entry.saved_per_sample, 0)
    if parallel == ALONE:
        return ActivationPeak(entry.fixed + size * entry.saved_per_sample, transient)
    whole, cut, logits = saved_bytes(model, config, config.activation_checkpointing)
    stage = stage_share(model, parallel) * (whole + cut / parallel.tensor)
    under_way = min(parallel.pipeline, config.gradient_accumulation_steps)
    kept = max(under_way * stage, stage + logits / parallel.tensor)
    return ActivationPeak(entry.fixed + math.ceil(size * kept), _cut(transient, parallel.tensor))


def saved_bytes(model: ModelProfile, config: TrainConfig, checkpointing: Checkpointing) -> tuple[float, float, float]:
    """Per sample, activations kept from forward to backward: what tensor parallelism leaves whole and what it cuts in
    the blocks, and what belongs to the logits.

    Raises:
        KeyError: the profile lacks this checkpointing and precision.
    """
    width = BYTES_PER_ELEMENT[config.precision]
    saved = model.activation(checkpointing, config.precision).saved_per_sample
    logits = min(model.tokens_per_sample * model.vocab * (width + _LOSS_BYTES[model.loss]), saved)
    whole = min(_WHOLE_ELEMENTS * width * model.tokens_per_sample * hidden_size(model) * model.block_count,
                saved - logits)
    return whole, saved - logits - whole, logits


def hidden_size(model: ModelProfile) -> int:
    """Elements of a token between blocks, guessed where the profile does not say."""
    if model.hidden:
        return model.hidden
    square = model.block_parameters / _PARAMETERS_PER_SQUARE if model.block_parameters else model.largest_parameter
    return max(round(math.sqrt(square)), 1)


def _cut(elements: int, pieces: int) -> int:
    return -(-elements // pieces)
