"""The contract between a task and whatever trains it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.errors import TaskError

Batch = tuple[Tensor, ...] | dict[str, Tensor]
"""The tensors of one micro-batch, samples along the first dimension."""


class Task(Protocol):
    """What is trained.

    A task may also have:

    - ``blocks(model) -> Sequence[nn.Module]``: the repeated modules, to checkpoint, compile and gather by. Without it
      they are found automatically.
    - ``longest_sample: int``: the global index of one of the largest samples, where samples differ in size. A trial
      ends with an unmeasured step of nothing but this sample, so that its memory counts.

    Guarantees that a task owes:

    - `batch` depends on the indices and the seed alone: equal indices give equal samples, in any process and order.
    - `loss` is the mean over the samples of the batch, so that losses and gradients of equal shares can be averaged.
    - `build_model` uses torch's global random generator alone, so that all ranks build equal weights from one seed.
    """

    @property
    def tokens_per_sample(self) -> int:
        """The constant that turns samples per second into tokens per second; 1 where there are no tokens."""

    def build_model(self) -> nn.Module:
        """A new model with random weights, on the CPU, in fp32."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples with these global indices, on the CPU."""

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Run the model once on a batch and return the mean loss, a scalar.

        Args:
            model: the module, or a trainer around it; called as the module would be.
            batch: of `batch`, moved to the model's device.
        """


def task_blocks(task: Task, model: nn.Module) -> Sequence[nn.Module] | None:
    """The task's own choice of repeated modules; None: find them."""
    blocks = getattr(task, "blocks", None)
    return None if blocks is None else list(blocks(model))


def checked_batch(task: Task, indices: Sequence[int]) -> Batch:
    """`task.batch`, held to its contract.

    Raises:
        TaskError: the batch is neither a tuple nor a dict of tensors.
    """
    batch: Any = task.batch(indices)
    if isinstance(batch, Mapping):
        batch = dict(batch)
    elif isinstance(batch, list):
        batch = tuple(batch)
    values = list(batch.values()) if isinstance(batch, dict) else batch
    if not isinstance(values, (tuple, list)) or not values or not all(isinstance(value, Tensor) for value in values):
        raise TaskError(f"{type(task).__name__}.batch must return a tuple or dict of tensors, not "
                        f"{type(batch).__name__}")
    result: Batch = batch
    return result


def checked_loss(task: Task, model: Callable[..., Any], batch: Batch) -> Tensor:
    """`task.loss`, held to its contract.

    Raises:
        TaskError: the loss is not a scalar tensor that depends on the model.
    """
    loss: Any = task.loss(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TaskError(f"{type(task).__name__}.loss must return a scalar tensor, the mean over the batch, not {shown}")
    if not loss.requires_grad:
        raise TaskError(f"{type(task).__name__}.loss does not depend on any trainable parameter: return it undetached, "
                        "computed under enabled gradients")
    return loss.reshape(())


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device; the same tensors where they are there already."""
    if isinstance(batch, dict):
        return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    return tuple(value.to(device, non_blocking=True) for value in batch)
