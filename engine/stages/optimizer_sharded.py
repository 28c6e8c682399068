"""Stage 1: each rank holds the optimizer states of its shard; gradients are reduced to shards once per step."""

from typing import ClassVar

from torch import Tensor

from engine.buckets import Bucket
from engine.stages.flat import FlatParameters
from engine.transports.base import PendingSum


class OptimizerSharded(FlatParameters):
    reduces_every_micro_batch: ClassVar[bool] = False

    def owned(self, bucket: Bucket) -> slice:
        return bucket.shard(self.ranks.rank)

    def reduce(self, bucket: Bucket, local: Tensor) -> PendingSum:
        return self.ranks.reduce_scatter(local, dtype=self.dtypes.held)
