"""Stage 0: every rank holds everything; gradients are summed once per step (DDP)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from engine.buckets import Bucket
from engine.stages.flat import FlatParameters
from engine.transports.base import PendingSum


class Replicated(FlatParameters):
    reduces_every_micro_batch: ClassVar[bool] = False

    def allocate(self, sizes: Sequence[int]) -> list[Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=self.ranks.device) for size in sizes]

    def owned(self, bucket: Bucket) -> slice:
        return slice(0, bucket.size)

    def reduce(self, bucket: Bucket, local: Tensor) -> PendingSum:
        return self.ranks.all_reduce(local, dtype=self.dtypes.held)

    def publish(self, bucket: Bucket) -> None:
        """Every rank made the same update."""

    def finish_publishing(self) -> None:
        pass
