"""A task of one's own: a small convolutional network on noisy images, each made from its index.

The service imports it in the worker processes, so the module must be found there (PYTHONPATH) and be allowed:

    PYTHONPATH=examples/python_task AUTOTUNE_ALLOWED_TASKS=digits autotune serve
    autotune submit examples/python_task/study.json
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10
SIZE = 16


class Residual(nn.Module):
    """(B, C, S, S) -> (B, C, S, S)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.second(F.gelu(self.first(self.norm(x))))
        return result


class Digits:
    """Ten fixed random pictures, one a class; every sample is one of them under noise."""

    tokens_per_sample = 1  # "tokens per second" is then images per second

    def __init__(self, channels: int, depth: int, seed: int) -> None:
        self.channels, self.depth, self.seed = channels, depth, seed
        self.pictures = torch.randn(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))

    def build_model(self) -> nn.Module:
        """Random weights from torch's global generator, so that all ranks build the same model."""
        return nn.Sequential(
            nn.Conv2d(1, self.channels, 3, padding=1),
            nn.Sequential(*(Residual(self.channels) for _ in range(self.depth))),
            nn.Flatten(),
            nn.Linear(self.channels * SIZE * SIZE, CLASSES))

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images (B, 1, S, S) and classes (B,); an index gives the same sample in every process and configuration."""
        labels = torch.tensor([index % CLASSES for index in indices])
        noise = torch.stack([torch.randn(1, SIZE, SIZE, generator=torch.Generator().manual_seed(self.seed + index))
                             for index in indices])
        return self.pictures[labels] + 0.5 * noise, labels

    def loss(self, model: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean over the batch."""
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels)


def make_task(channels: int = 32, depth: int = 4, seed: int = 0) -> Digits:
    """The entry point `digits:make_task`; `model.arguments` of the request are its arguments."""
    return Digits(channels, depth, seed)
