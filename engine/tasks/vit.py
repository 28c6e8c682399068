"""The bundled vision transformer: an image classifier (arXiv 2010.11929)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.spec import VitSpec
from engine.tasks.base import Batch
from engine.tasks.synthetic import random_bits, random_uniform
from engine.tasks.transformer import TransformerBlock


class Vit(nn.Module):
    """Images (B, C, S, S) -> logits (B, classes); the mean over patches is classified."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        patches = (spec.image_size // spec.patch_size) ** 2
        self.patchify = nn.Conv2d(spec.channels, spec.hidden, spec.patch_size, stride=spec.patch_size)
        self.positions = nn.Parameter(torch.randn(1, patches, spec.hidden) * 0.02)
        self.blocks = nn.ModuleList(TransformerBlock(spec.hidden, spec.heads, causal=False) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.hidden)
        self.head = nn.Linear(spec.hidden, spec.classes)

    def forward(self, images_BCSS: Tensor) -> Tensor:
        x_BPH = self.patchify(images_BCSS).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x_BPH = block(x_BPH)
        logits: Tensor = self.head(self.norm(x_BPH).mean(1))
        return logits


class VitTask:
    """Classification of synthetic images: a plane wave whose direction and frequency tell the class, under noise.

    A triangle wave, as sines and matrix products round differently with the size of the batch.
    """

    def __init__(self, spec: VitSpec, *, seed: int = 0) -> None:
        self.spec = spec
        self.seed = seed
        line = torch.linspace(0, 1, spec.image_size)
        self._grid_2SS = torch.stack(torch.meshgrid(line, line, indexing="ij"))
        angle = torch.linspace(0, 3.14159, spec.classes)
        frequency = 2 + torch.arange(spec.classes) % 5
        self._direction_K2 = torch.stack((torch.cos(angle), torch.sin(angle)), 1) * frequency[:, None]

    @property
    def tokens_per_sample(self) -> int:
        """Patches of one image."""
        return (self.spec.image_size // self.spec.patch_size) ** 2

    def build_model(self) -> nn.Module:
        return Vit(self.spec)

    def batch(self, indices: Sequence[int]) -> Batch:
        """(images (B, C, S, S) fp32, labels (B,) int64)."""
        spec = self.spec
        labels = random_bits(self.seed, indices, 1, stream=1)[:, 0] % spec.classes
        noise = random_uniform(self.seed, indices, spec.channels * spec.image_size**2)
        direction_2B11 = self._direction_K2[labels].t()[:, :, None, None]
        phase_BSS = direction_2B11[0] * self._grid_2SS[0] + direction_2B11[1] * self._grid_2SS[1]
        wave_BSS = (phase_BSS - phase_BSS.floor() - 0.5).abs() * 4 - 1
        shape = (len(indices), spec.channels, spec.image_size, spec.image_size)
        return wave_BSS[:, None] + noise.view(shape) - 0.5, labels

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        images_BCSS, labels_B = batch
        return F.cross_entropy(model(images_BCSS).float(), labels_B)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, Vit)
        return list(model.blocks)
