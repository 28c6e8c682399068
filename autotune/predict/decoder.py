"""A decoder's profile from its dimensions alone, for planning where no task has been probed."""

import hashlib

from engine.config import Checkpointing
from engine.profile import ActivationBytes, ModelProfile
from engine.values import BYTES_PER_ELEMENT, Count, Precision, Value

_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
_TENSORS_PER_BLOCK = 12

_BLOCK_ELEMENTS: dict[Checkpointing, int] = {"none": 16, "selective": 11, "full": 1}
"""Kept per token and block, in elements of the hidden size: all of it, but for dropout (32 bytes in 16 bit; arXiv
2205.05198, section 4.1); inputs and outputs of matrix products and of attention; the block's input."""

_DROPOUT_BYTES = 2
"""Of the two masks, per token and element of the hidden size (the same section)."""

_SCORE_ELEMENTS, _SCORE_DROPOUT = 1, 1.5
"""Kept per entry of the matrix of scores where it is written out: the probabilities; with dropout, mask and result."""


class Decoder(Value):
    """A pre-norm transformer with biases, learned positions and a tied head, as GPT-2.

    Attributes:
        fused_attention: the matrix of scores is never written out, as FlashAttention does.
        fused_loss: the loss needs no copy of the logits in fp32.
    """

    layers: Count
    hidden: Count
    heads: Count
    vocab: Count
    sequence_length: Count
    fused_attention: bool = True
    fused_loss: bool = False
    dropout: bool = False


def decoder_profile(decoder: Decoder) -> ModelProfile:
    """Parameters, operations (arXiv 2104.04473, equation 3) and activation bytes. Pure.

    The score matrix counts as full, not as causal, as is usual for model FLOPs.
    """
    hidden, tokens = decoder.hidden, decoder.sequence_length
    block = 12 * hidden**2 + 13 * hidden
    parameters = decoder.layers * block + (decoder.vocab + tokens + 2) * hidden
    products = 6 * tokens * (decoder.layers * 12 * hidden**2 + decoder.vocab * hidden)
    attention = 12 * decoder.layers * tokens**2 * hidden
    return ModelProfile(
        fingerprint=hashlib.sha256(decoder.model_dump_json().encode()).hexdigest()[:32],
        parameters=parameters, trainable_parameters=parameters,
        parameter_tensors=decoder.layers * _TENSORS_PER_BLOCK + 4,
        largest_parameter=max(decoder.vocab, 4 * hidden, tokens) * hidden, buffer_bytes=0, block_class="Block",
        block_count=decoder.layers, block_parameters=block, tokens_per_sample=tokens,
        flops_per_sample=float(products + attention), hidden=hidden, heads=decoder.heads, vocab=decoder.vocab,
        attention="fused" if decoder.fused_attention else "eager", loss="fused" if decoder.fused_loss else "eager",
        activations=tuple(_activations(decoder, checkpointing, precision) for precision in _PRECISIONS
                          for checkpointing in _CHECKPOINTING))


def _activations(decoder: Decoder, checkpointing: Checkpointing, precision: Precision) -> ActivationBytes:
    """Of the loss: logits, an fp32 copy where it is not fused, and for a moment the gradient of either."""
    width, logits = BYTES_PER_ELEMENT[precision], decoder.sequence_length * decoder.vocab
    loss_width = width if decoder.fused_loss else 4
    saved = (decoder.layers * _block_bytes(decoder, checkpointing, width)
             + logits * (width if decoder.fused_loss else width + loss_width))
    again = 0 if checkpointing == "none" else _block_bytes(decoder, "none", width)
    return ActivationBytes(checkpointing=checkpointing, precision=precision, saved_per_sample=saved,
                           peak_per_sample=saved + max(logits * loss_width, again))


def _block_bytes(decoder: Decoder, checkpointing: Checkpointing, width: int) -> int:
    elements = decoder.sequence_length * decoder.hidden
    kept = elements * _BLOCK_ELEMENTS[checkpointing] * width
    if checkpointing != "none":
        return kept
    if decoder.dropout:
        kept += elements * _DROPOUT_BYTES
    if not decoder.fused_attention:
        per_score = _SCORE_ELEMENTS + (_SCORE_DROPOUT if decoder.dropout else 0)
        kept += round(decoder.heads * decoder.sequence_length**2 * per_score * width)
    return kept
