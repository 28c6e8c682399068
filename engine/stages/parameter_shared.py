"""Stage 3 among ranks of one host: their shards lie side by side in memory that all of them map.

What a rank holds is its shard, and what it needs of the others' it reads where it lies: nothing is gathered.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from engine.buckets import Bucket, lay_out
from engine.stages.base import StageContext
from engine.stages.gradient_sharded import GradientSharded


class ParameterShared(GradientSharded):
    memory_is_common: ClassVar[bool] = True

    def allocate(self, sizes: Sequence[int]) -> list[Tensor]:
        return self.ranks.common(sizes)

    def place_frozen(self, context: StageContext) -> Sequence[Bucket]:
        return lay_out(self._frozen, bucket_size=context.config.reduce_bucket_size, world_size=self.ranks.size,
                       first_index=len(self.buckets))

    def place(self, buckets: Sequence[Bucket], context: StageContext) -> None:
        super().place(buckets, context)
        self.ranks.barrier()  # every shard was written

    def take_changed(self) -> set[int]:
        """None can be.

        Raises:
            RuntimeError: parameters were changed: every rank did so in turn, to the same ones.
        """
        changed = super().take_changed()
        if changed:
            names = [slot.managed.name for bucket in self.buckets for slot in bucket.slots
                     if slot.managed.index in changed]
            raise RuntimeError(f"{', '.join(names)}: changed in place at zero_stage 3, where all ranks would change "
                               "the same memory: change it before initialize, or load a checkpoint")
        return changed

    def write(self, bucket: Bucket, values: Tensor) -> None:
        self.parameters(bucket).copy_(values[self.owned(bucket)])

    def publish(self, bucket: Bucket) -> None:
        """Written where all ranks read it."""

    def trims_rooms(self) -> bool:
        """This stage is the one for least memory."""
        return True

    def close(self) -> None:
        """The module keeps its parameters, from now on in memory of its own."""
        for bucket in (*self.buckets, *self.frozen_buckets):
            bucket.bind(self.flats[bucket.index].clone())
        super().close()

    def parameter_bytes(self) -> int:
        return sum(bucket.shard_size * bucket.dtype.itemsize for bucket in (*self.buckets, *self.frozen_buckets))
