"""Tasks to probe, each with one thing in which it differs from a transformer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.spec import PythonSpec

MODULE = "tests.engine.probed"


def spec(name: str, **arguments: Any) -> PythonSpec:
    """The specification of a task of this module, by the name of its function."""
    return PythonSpec(kind="python", entry_point=f"{MODULE}:{name}", arguments=arguments)


class ChainTask:
    """Linear layers, each from one width to the next."""

    tokens_per_sample = 1

    def __init__(self, *widths: int) -> None:
        self._widths = widths

    def build_model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(*pair) for pair in zip(self._widths, self._widths[1:], strict=False)))

    def batch(self, indices: Sequence[int]) -> tuple[Tensor]:
        return (torch.ones(len(indices), self._widths[0]),)

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        loss: Tensor = model(batch[0]).square().mean()
        return loss


def growing() -> ChainTask:
    return ChainTask(8, 16, 32, 64)
