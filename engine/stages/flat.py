"""What stages 0 to 2 share, and stage 3 where ranks share memory: parameters are views of flat buckets."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar

import torch
from torch import Tensor

from engine.buckets import Bucket, GatherBatch, gather_batches, lay_out
from engine.errors import RANK_FAILURES
from engine.gradients import GradientBuckets
from engine.precision import GradientDtypes
from engine.stages.base import StageContext
from engine.transports.base import Pending, PendingSum


class FlatParameters:
    """Parameters in flat buckets, laid out in reverse order, which is about the order gradients come in.

    Subclasses say who owns what, how a bucket is reduced, and whether after every micro-batch.
    """

    reduces_every_micro_batch: ClassVar[bool]
    memory_is_common: ClassVar[bool] = False
    """Whether all ranks' parameters are the same memory, so that each writes its own alone."""

    def __init__(self, context: StageContext) -> None:
        config, self.ranks = context.config, context.ranks
        accumulates_locally = not self.reduces_every_micro_batch or self.ranks.size == 1
        self.dtypes = GradientDtypes.of(config, accumulates_locally=accumulates_locally)
        trainable = [managed for managed in reversed(context.parameters) if managed.trainable]
        self.buckets: Sequence[Bucket] = lay_out(trainable, bucket_size=config.reduce_bucket_size,
                                                 world_size=self.ranks.size)
        self._frozen = [managed for managed in context.parameters if not managed.trainable]
        self.frozen_buckets = self.place_frozen(context)
        self._masters: dict[int, Tensor] = {}
        self.flats: dict[int, Tensor] = {}
        self.place((*self.buckets, *self.frozen_buckets), context)
        self._batches: dict[int, list[GatherBatch]] = {}
        for batch in gather_batches(self.buckets, limit=config.allgather_bucket_size):
            self._batches.setdefault(batch.last.index, []).append(batch)
        self._overlap = config.overlap_comm
        self._published: list[Pending] = []
        self._accumulates_locally = accumulates_locally
        self._unreduced = False
        stays = accumulates_locally and config.gradient_accumulation_steps > 1
        self.gradients = GradientBuckets(self.buckets, ranks=self.ranks, reduce=self.reduce, dtypes=self.dtypes,
                                         stays=stays, overlap=config.overlap_comm)

    def owned(self, bucket: Bucket) -> slice:
        raise NotImplementedError

    def reduce(self, bucket: Bucket, local: Tensor) -> PendingSum:
        """Start the reduction of a full local gradient (size,) to the owned sum (owned,)."""
        raise NotImplementedError

    def allocate(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory of so many bytes each for flat buckets. Collective."""
        return self.ranks.mirrored(sizes)

    def place_frozen(self, context: StageContext) -> Sequence[Bucket]:
        """Take over what does not train: whole on every rank, in no bucket."""
        for managed in self._frozen:
            managed.parameter.data = managed.parameter.data.to(context.device, managed.dtype).contiguous()
            self.ranks.broadcast(managed.parameter.data)
        return ()

    def write(self, bucket: Bucket, values: Tensor) -> None:
        """Put a bucket's first values (size,) into its memory."""
        self.flats[bucket.index].copy_(values)

    def parameters(self, bucket: Bucket) -> Tensor:
        return self.flats[bucket.index][self.owned(bucket)]

    def take_masters(self, bucket: Bucket) -> Tensor:
        return self._masters.pop(bucket.index) if bucket.index in self._masters else self.parameters(bucket)

    @contextmanager
    def backward(self, *, reduce: bool) -> Iterator[None]:
        reduces = reduce or not self._accumulates_locally
        self.gradients.begin_pass(reduce=reduces)
        try:
            yield
        except BaseException:
            with suppress(*RANK_FAILURES):  # this rank's own error tells more
                self.gradients.end_pass()  # the others wait for its part
            raise
        self.gradients.end_pass()
        self._unreduced = not reduces

    def finish_reductions(self) -> None:
        if self._unreduced:
            with self.backward(reduce=True):
                pass
        late = [state.bucket for state in self.gradients.states if state.local is not None]
        if late:
            names = ", ".join(slot.managed.name for bucket in late for slot in bucket.slots)
            raise RuntimeError(f"gradients came again after they were reduced, for one or more of {names}: checkpoints "
                               "with use_reentrant=True share a parameter; set it to False")
        self.gradients.finish()

    def take_changed(self) -> set[int]:
        changed = set()
        for bucket in self.buckets:
            flat = self.flats[bucket.index]
            start, width = flat.data_ptr(), flat.itemsize
            for slot in bucket.slots:
                index, parameter = slot.managed.index, slot.managed.parameter
                if slot.numel and parameter.data_ptr() != start + slot.offset * width:
                    slot.view(flat).copy_(parameter.detach())  # it was given other memory
                    parameter.data = slot.view(flat)
                elif parameter._version == self._versions[index]:
                    continue
                self._versions[index] = parameter._version
                changed.add(index)
        return changed

    def publish(self, bucket: Bucket) -> None:
        for batch in self._batches.get(bucket.index, ()):
            self._published.append(self.ranks.all_gather(batch.rows(self.flats)))
            if not self._overlap:
                self._wait_for_gathers()

    def finish_publishing(self) -> None:
        self._wait_for_gathers()
        self.ranks.finish_reading()
        if self.trims_rooms():
            # A rank that has still to read of the barrier above finds zeros, which is what the barrier sums.
            self.ranks.trim()

    def trims_rooms(self) -> bool:
        """Whether forward and its activations are not to find the buffers of backward.

        Filling them anew costs a few ms a step for 32 MB. In 16 bit they are half as large, and memory is what 16 bit
        is for.
        """
        return self.dtypes.wire.itemsize < 4

    def parameter_bytes(self) -> int:
        flats = sum(flat.nbytes for flat in self.flats.values())
        return flats + sum(managed.parameter.nbytes for managed in self._frozen)

    def host_parameter_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.gradients.close()
        self._published = []

    def place(self, buckets: Sequence[Bucket], context: StageContext) -> None:
        """Lay the first rank's values out, and make the parameters views of them."""
        memory = self.allocate([bucket.size * bucket.dtype.itemsize for bucket in buckets])
        for bucket, place in zip(buckets, memory, strict=True):
            flat = self.flats[bucket.index] = place.view(bucket.dtype)
            dtype = context.optimizer_dtype(bucket)
            in_place = dtype == bucket.dtype and not self.memory_is_common
            values = flat if in_place else torch.empty(bucket.size, dtype=dtype, device=context.device)
            bucket.fill(values)
            self.ranks.broadcast(values)
            if not in_place:
                self.write(bucket, values)
            if bucket.trainable and values.dtype != bucket.dtype:
                own = values[self.owned(bucket)]
                self._masters[bucket.index] = own if len(own) == bucket.size else own.clone()
            bucket.bind(flat)
        self._versions = {slot.managed.index: slot.managed.parameter._version
                          for bucket in buckets for slot in bucket.slots}

    def _wait_for_gathers(self) -> None:
        for pending in self._published:
            pending.wait()
        self._published = []
