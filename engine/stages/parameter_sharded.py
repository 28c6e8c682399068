"""Stage 3: parameters too are held in shards; each unit is gathered just before use and released after it.

Reductions are part of backward's schedule: a block's buckets are reduced in order as they are complete, the rest of
them when its last turn is over. Of the root's, those that were there on every rank when its first turn was over in the
first window (a head's) are reduced at that point from then on, the others at the end of the pass. Gradients that come
later than their reduction join the step.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from engine.buckets import Bucket
from engine.checkpointing import Forward, set_forward
from engine.gradients import BucketGradients, GradientBuckets
from engine.precision import GradientDtypes
from engine.stages.agreement import Point
from engine.stages.base import StageContext
from engine.stages.gathering import Gathering
from engine.stages.units import Unit, lay_out_units
from engine.transports.base import PendingSum


class ParameterSharded:
    def __init__(self, context: StageContext) -> None:
        config, self.ranks, self._device = context.config, context.ranks, context.device
        self._accumulates_locally = self.ranks.size == 1
        self._dtypes = GradientDtypes.of(config, accumulates_locally=self._accumulates_locally)
        layout = lay_out_units(context.module, context.parameters, context.blocks,
                               bucket_size=config.reduce_bucket_size, gather_size=config.allgather_bucket_size,
                               world_size=self.ranks.size)
        self._units = layout.units
        trainable = {bucket.index: (unit, bucket) for unit in self._units for bucket in unit.trainable}
        self.buckets: Sequence[Bucket] = [trainable[index][1] for index in range(len(trainable))]
        self.frozen_buckets: Sequence[Bucket] = [bucket for unit in self._units for bucket in unit.frozen]
        self._unit_of = {index: unit for index, (unit, _) in trainable.items()}
        self._host = context.host if config.offload_param else None
        self._masters: dict[int, Tensor] = {}
        self._shards: dict[int, Tensor] = {}
        for unit in self._units:
            for bucket in unit.buckets:
                self._shards[bucket.index] = self._place(bucket, context)
        self.gradients = GradientBuckets(self.buckets, ranks=self.ranks, reduce=self._reduce, dtypes=self._dtypes,
                                         stays=False, overlap=config.overlap_comm)
        self.gradients.on_complete = self._complete
        self._gathering = Gathering(self._units, self._shards, ranks=self.ranks,
                                    ahead=config.prefetch_bucket_size if config.overlap_comm else 0,
                                    flags=2 * len(self.buckets))
        self._reduces = self._unreduced = False
        self._launched = 0  # of the buckets of the unit whose last turn it is
        # Of the root's buckets: those complete when its first turn in backward is over; None until agreed on.
        self._early: set[int] = set()
        self._complete_early: dict[int, bool] | None = {}
        self._root_left = False
        self._wrap(context, layout.needs)

    # What is held

    def owned(self, bucket: Bucket) -> slice:
        return bucket.shard(self.ranks.rank)

    def parameters(self, bucket: Bucket) -> Tensor:
        return self._shards[bucket.index]

    def take_masters(self, bucket: Bucket) -> Tensor:
        return self._masters.pop(bucket.index) if bucket.index in self._masters else self._shards[bucket.index]

    def parameter_bytes(self) -> int:
        return sum(shard.nbytes for shard in self._shards.values())

    def host_parameter_bytes(self) -> int:
        return self.parameter_bytes() if self._host is not None else 0

    def gathered_bytes(self) -> int:
        """Bytes of parameters gathered at this moment, beyond the shards."""
        if self.ranks.size == 1:
            return 0
        return self._gathering.bytes

    # Backward and update

    @contextmanager
    def backward(self, *, reduce: bool) -> Iterator[None]:
        self._reduces = reduce or not self._accumulates_locally
        self._unreduced = not self._reduces
        self._root_left = False
        with self._gathering.running(Point.BACKWARD, leave=self._leave, finish=self._finish_backward):
            self.gradients.begin_pass(reduce=self._reduces, eager=False)
            try:
                yield
            finally:
                self.gradients.end_pass()

    def finish_reductions(self) -> None:
        late = [state.local is not None for state in self.gradients.states]
        complete_early = self._complete_early or {}
        incomplete = [not complete_early.get(bucket.index, False) for bucket in self.buckets]
        votes = self._gathering.meet(Point.STEP, flags=[*late, *incomplete])
        assert votes is not None
        late_anywhere, incomplete_anywhere = votes.flags[:len(late)], votes.flags[len(late):]
        if self._complete_early is not None:
            self._early.update(bucket.index for bucket in self.buckets if not incomplete_anywhere[bucket.index])
            self._complete_early = None
        self._launch(bucket for bucket in self.buckets if self._unreduced or late_anywhere[bucket.index])
        self._unreduced = False
        self.gradients.finish()

    def take_changed(self) -> set[int]:
        """None: changing a parameter that is not gathered is refused, and what is gathered is dropped."""
        return set()

    def publish(self, bucket: Bucket) -> None:
        """The shards are the parameters; who reads them next gathers them."""

    def finish_publishing(self) -> None:
        self._gathering.release_all()

    def close(self) -> None:
        self.gradients.close()
        self._gathering.close()
        self._shards.clear()
        self._masters.clear()

    # Gathering

    def _wrap(self, context: StageContext, needs: Sequence[Sequence[Unit]]) -> None:
        """Parameters are gathered when they are read; forwards that are known to read some hold them all along."""
        root, in_blocks = self._units[:1], {inner for block in context.blocks for inner in block.modules()}
        for block, units in zip(context.blocks, needs, strict=True):
            set_forward(block, self._holding_forward(block.forward, units))
        for inner in context.module.modules():
            if inner not in in_blocks and next(inner.parameters(recurse=False), None) is not None:
                set_forward(inner, self._holding_forward(inner.forward, root))
        set_forward(context.module, self._root_forward(context.module.forward))

    def _holding_forward(self, forward: Forward, units: Sequence[Unit]) -> Forward:
        @wraps(forward)
        def run(*inputs: Any, **keywords: Any) -> Any:
            with self._gathering.holding(units):
                return forward(*inputs, **keywords)

        return run

    def _root_forward(self, forward: Forward) -> Forward:
        root = self._units[:1]

        @wraps(forward)
        def run(*inputs: Any, **keywords: Any) -> Any:
            if self._gathering.in_pass:  # the model calls itself, or is recomputed
                with self._gathering.holding(root):
                    return forward(*inputs, **keywords)
            with self._gathering.running(Point.FORWARD), self._gathering.holding(root):
                return forward(*inputs, **keywords)

        return run

    # Reducing

    def _reduce(self, bucket: Bucket, local: Tensor) -> PendingSum:
        return self.ranks.reduce_scatter(local, dtype=self._dtypes.held)

    def _leave(self, unit: Unit, is_last: bool) -> None:
        """A unit's turn in backward is over."""
        if self._is_reduced_last(unit):
            if not self._root_left:
                self._root_left = True
                self._note_early(unit)
                self._launch_in_pass(bucket for bucket in unit.trainable if bucket.index in self._early)
        elif is_last:
            self._launch_in_pass(unit.trainable[self._launched:])
            self._launched = 0

    def _finish_backward(self) -> None:
        root = self._units[0]
        if self._is_reduced_last(root):
            self._launch_in_pass(bucket for bucket in root.trainable if bucket.index not in self._early)

    def _is_reduced_last(self, unit: Unit) -> bool:
        """The root has gradients all through the pass, where there are blocks."""
        return unit.index == 0 and len(self._units) > 1

    def _launch_in_pass(self, buckets: Iterable[Bucket]) -> None:
        if self._reduces:
            self._launch(buckets)

    def _launch(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self.gradients.launch(self.gradients.states[bucket.index])

    def _note_early(self, root: Unit) -> None:
        if self._complete_early is not None:
            for bucket in root.trainable:
                complete = not self.gradients.states[bucket.index].missing
                self._complete_early[bucket.index] = complete and self._complete_early.get(bucket.index, True)

    def _complete(self, state: BucketGradients) -> None:
        """All gradients of a bucket are there."""
        unit = self._unit_of[state.bucket.index]
        if self._gathering.is_last_turn_of(unit) and not self._is_reduced_last(unit):
            waiting = unit.trainable[self._launched:]
            complete = list(takewhile(lambda bucket: not self.gradients.states[bucket.index].missing, waiting))
            self._launch_in_pass(complete)
            self._launched += len(complete)
        # Nothing more of this pass needs the unit; frozen parameters would give no sign when they are done.
        if not unit.frozen and not any(self.gradients.states[bucket.index].missing for bucket in unit.trainable):
            self._gathering.release(unit)

    def _place(self, bucket: Bucket, context: StageContext) -> Tensor:
        values = torch.empty(bucket.size, dtype=context.optimizer_dtype(bucket), device=context.device)
        bucket.fill(values)
        self.ranks.broadcast(values)
        own = values[self.owned(bucket)]
        if self._host is not None:
            shard = self._host.empty(bucket.shard_size, bucket.dtype)
            shard.copy_(own)
        else:
            shard = own.to(bucket.dtype, copy=True)
        if bucket.trainable and (values.dtype != bucket.dtype or self._host is not None):
            self._masters[bucket.index] = own.clone()
        return shard

