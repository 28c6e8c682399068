"""Checkpoints (being written)."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from engine.trainer import Trainer


def consolidate(trainer: "Trainer") -> dict[str, Tensor]:
    raise NotImplementedError


def save_checkpoint(trainer: "Trainer", path: Path) -> None:
    raise NotImplementedError


def load_checkpoint(trainer: "Trainer", path: Path) -> None:
    raise NotImplementedError
