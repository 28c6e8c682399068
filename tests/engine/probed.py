"""Tasks to probe: with blocks of different sizes, and such as fake tensors cannot run."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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


@torch.library.custom_op("autotune_probed::twice", mutates_args=())
def twice(value: Tensor) -> Tensor:
    """Twice the value; its shape is told nowhere."""
    return 2 * value


def _larger(value: Tensor) -> Tensor:
    return value if bool(value > 0) else 2 * value


with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
    _SCRIPT = torch.jit.script(_larger)

LOOKS: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda loss: loss.item(),
    "a condition": lambda loss: bool(loss > 0),
    "a mask": lambda loss: loss[loss > 0],
    "an array": lambda loss: loss.numpy(),
    "numpy": np.asarray,
    "a new tensor": lambda loss: torch.tensor([loss, loss]),
    "text": lambda loss: f"{loss:.3f}",
    "storage": lambda loss: loss.untyped_storage()[0],
    "an operator without shapes": twice,
    "a script": _SCRIPT,
}
"""At values, by what of them is asked for."""


class LookingTask(ChainTask):
    def __init__(self, *widths: int, look: Callable[[Tensor], object], spare: int = 0) -> None:
        super().__init__(*widths)
        self._look, self._spare = look, spare

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for number in range(self._spare):
            model.register_parameter(f"spare_{number}", nn.Parameter(torch.empty(2**28)))
        return model

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        self._look(loss.detach())
        return loss


def looks(kind: str, spare: int = 0) -> LookingTask:
    """Looks at a value in its loss.

    Args:
        spare: parameters of 1 GiB each that are not used, nor written to.
    """
    return LookingTask(8, 8, 8, look=LOOKS[kind], spare=spare)


class FailingTask(ChainTask):
    """Fails whenever its loss is asked for, and says for how many times it was."""

    def __init__(self, kind: type[Exception]) -> None:
        super().__init__(8, 8, 8)
        self._kind, self._calls = kind, 0

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        self._calls += 1
        raise self._kind(f"call {self._calls}")


def fails(kind: str) -> FailingTask:
    return FailingTask({"runtime": RuntimeError, "type": TypeError, "missing": NotImplementedError}[kind])
