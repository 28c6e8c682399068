"""The protocol of a ZeRO stage: what a rank keeps of each bucket, and when the rest is gathered or reduced."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.buckets import Bucket, ManagedParameter
from engine.collectives import Ranks
from engine.config import TrainConfig
from engine.gradients import GradientBuckets
from engine.offload import HostMemory


@dataclass(frozen=True, eq=False)
class StageContext:
    """What every stage is built from.

    Attributes:
        parameters: distinct floating-point parameters in the module's order, frozen ones included.
        blocks: repeated modules, in order; none where nothing repeats.
        host: where offloaded parameters are allocated.
    """

    module: nn.Module
    parameters: Sequence[ManagedParameter]
    blocks: Sequence[nn.Module]
    ranks: Ranks
    config: TrainConfig
    device: torch.device
    host: HostMemory

    def optimizer_dtype(self, bucket: Bucket) -> torch.dtype:
        """Of masters and optimizer states."""
        return bucket.dtype if self.config.optimizer_precision == "compute" else torch.float32


class Stage(Protocol):
    """One way to divide parameters, gradients and optimizer states among ranks."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Those that train, in reduction order."""

    @property
    def frozen_buckets(self) -> Sequence[Bucket]:
        """Those that do not train, where the stage divides them; else such parameters are whole on every rank."""

    @property
    def gradients(self) -> GradientBuckets:
        """Collects and reduces."""

    def owned(self, bucket: Bucket) -> slice:
        """The elements of a bucket whose optimizer states this rank holds and which it updates."""

    def parameters(self, bucket: Bucket) -> Tensor:
        """(owned,) view in the bucket's dtype; what is written there reaches the model with `publish`."""

    def take_masters(self, bucket: Bucket) -> Tensor:
        """(owned,) initial values for the optimizer to update, in its dtype; `parameters` itself where that has it.

        Called once per bucket; the caller then owns them.
        """

    def backward(self, *, reduce: bool) -> AbstractContextManager[None]:
        """Surrounds one backward call.

        Args:
            reduce: whether stages that reduce once per step do so in it.
        """

    def finish_reductions(self) -> None:
        """Afterwards every trainable bucket's gradients are summed over ranks and micro-batches. Collective."""

    def take_changed(self) -> set[int]:
        """Indices of trainable parameters that the user changed since the last call, now where the stage has them.

        Raises:
            RuntimeError: where such a change cannot be taken over.
        """

    def publish(self, bucket: Bucket) -> None:
        """Start giving all ranks this rank's updated elements. Called for every trainable bucket, in order."""

    def finish_publishing(self) -> None:
        """Afterwards the module computes with the updated parameters."""

    def parameter_bytes(self) -> int:
        """Bytes of parameters that this rank holds, buckets with their padding."""

    def host_parameter_bytes(self) -> int:
        """Those of them on the host."""

    def close(self) -> None:
        """Remove all hooks and free all buffers, without waiting for ranks that may have failed."""
