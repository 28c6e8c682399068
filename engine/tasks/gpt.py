"""The bundled decoder language model: pre-norm transformer with learned positions and a tied head (GPT-2)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.spec import GptSpec
from engine.tasks.base import Batch
from engine.tasks.synthetic import random_bits
from engine.tasks.transformer import TransformerBlock


class _Linear(nn.Linear):
    """Without values until it is given them: drawing torch's own first would take as long as drawing the model's."""

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """Likewise."""

    def reset_parameters(self) -> None:
        pass


class Gpt(nn.Module):
    """Token ids (B, L) -> logits (B, L, V)."""

    def __init__(self, spec: GptSpec) -> None:
        super().__init__()
        self.tokens = _Embedding(spec.vocab, spec.hidden)
        self.positions = _Embedding(spec.sequence_length, spec.hidden)
        self.blocks = nn.ModuleList(TransformerBlock(spec.hidden, spec.heads, causal=True, linear=_Linear)
                                    for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.hidden)
        self.apply(_initialize)
        self.head = _Linear(spec.hidden, spec.vocab, bias=False, device="meta")
        self.head.weight = self.tokens.weight

    def forward(self, ids_BL: Tensor) -> Tensor:
        x_BLH = self.tokens(ids_BL) + self.positions(torch.arange(ids_BL.shape[1], device=ids_BL.device))
        for block in self.blocks:
            x_BLH = block(x_BLH)
        logits_BLV: Tensor = self.head(self.norm(x_BLH))
        return logits_BLV


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class GptTask:
    """Next-token prediction on arithmetic progressions of token ids: start and stride of each sample are random."""

    strides = 8

    def __init__(self, spec: GptSpec, *, seed: int = 0) -> None:
        self.spec = spec
        self.seed = seed

    @property
    def tokens_per_sample(self) -> int:
        return self.spec.sequence_length

    def build_model(self) -> nn.Module:
        return Gpt(self.spec)

    def batch(self, indices: Sequence[int]) -> Batch:
        """(ids, targets), both (B, L) int64."""
        bits = random_bits(self.seed, indices, 2)
        start, stride = bits[:, :1] % self.spec.vocab, 1 + bits[:, 1:] % self.strides
        sequence = (start + stride * torch.arange(self.spec.sequence_length + 1)) % self.spec.vocab
        return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        ids_BL, targets_BL = batch
        logits_BLV = model(ids_BL)
        return F.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten())

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, Gpt)
        return list(model.blocks)
