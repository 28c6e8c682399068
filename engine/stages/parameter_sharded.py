"""Stage 3: parameters too are held in shards; each unit is gathered just before use and released after it.

Forward: a block's forward is wrapped; it gathers the block's unit (and issues the next ones), binds the parameters to
the gathered buckets, and releases them when it returns. What autograd saves of them for backward is replaced by a
note of which unit it is part of, so that no gathered memory survives.

Backward: when autograd reads such a note, or a checkpointed block runs again, the unit is gathered again. It is
released when the gradients of all its parameters are there, or two other units were used since. The memory itself
lives as long as any tensor refers to it, so releasing early is never wrong, only slower.

Reductions are part of the schedule: a block's buckets are reduced in order as they are complete, the rest of them when
the next block is reached. Of the root's, those that were there on every rank when the first block was reached in the
first window (a head's) are reduced at that point from then on, the others at the end of the pass. Gradients that come
later than their reduction (a block used twice) join the next pass or the step.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from engine.buckets import Bucket
from engine.checkpointing import Forward, set_forward
from engine.gradients import BucketGradients, GradientBuckets
from engine.precision import GradientDtypes
from engine.stages.base import StageContext
from engine.stages.units import Schedule, Unit, lay_out_units
from engine.transports.base import PendingSum

_KEPT_IN_BACKWARD = 2
"""Units that stay gathered in backward: the one being differentiated, and the one used before, which may share
parameters with it."""


@dataclass(frozen=True)
class _Saved:
    """In place of a tensor that autograd would save: where to find it again."""

    unit: Unit
    bucket: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


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
            unit.unbind()
        self._ahead = config.prefetch_bucket_size if config.overlap_comm else 0
        self._schedule: Schedule | None = None
        self._in_backward = self._reduces = self._unreduced = False
        # Of the root's trainable buckets: those complete when backward reaches the first block; None until agreed on.
        self._early: set[int] = set()
        self._complete_early: dict[int, bool] | None = {}
        self._launched = 0  # of the buckets of the block that backward is in
        self._live: dict[int, tuple[Unit, int]] = {}
        self._recent: OrderedDict[int, Unit] = OrderedDict()
        self.gradients = GradientBuckets(self.buckets, ranks=self.ranks, reduce=self._reduce, dtypes=self._dtypes,
                                         whole_window=self._accumulates_locally, overlap=config.overlap_comm)
        self.gradients.on_complete = self._complete
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
        return sum(full.nbytes for unit in self._units for full in (unit.fulls or {}).values())

    # Backward and update

    @contextmanager
    def backward(self, *, reduce: bool) -> Iterator[None]:
        reduces = reduce or not self._accumulates_locally
        root, *blocks = self._units
        self.gradients.begin_pass(reduce=reduces, eager=not blocks)
        self._schedule = Schedule([root, *reversed(blocks)], issue=self._gather, leave=self._leave, ahead=self._ahead)
        self._in_backward, self._reduces = True, reduces and bool(blocks)
        self._schedule.reach(root)
        yield
        self._schedule.finish()
        if self._reduces:
            self._launch(bucket for bucket in root.trainable if bucket.index not in self._early)
        self._release_all()
        self.gradients.end_pass()
        self._schedule, self._in_backward, self._unreduced = None, False, not reduces

    def finish_reductions(self) -> None:
        self._launch(self.buckets if self._unreduced else self._agree_on_late())
        self._unreduced = False
        self.gradients.finish()

    def publish(self, bucket: Bucket) -> None:
        """The shards are the parameters; the next forward gathers them."""

    def finish_publishing(self) -> None:
        pass

    def close(self) -> None:
        self.gradients.close()
        for unit in self._units:
            unit.fulls, unit.arriving = None, ()
        self._live.clear()
        self._recent.clear()
        self._shards.clear()
        self._masters.clear()

    # Gathering

    def _wrap(self, context: StageContext, needs: Sequence[Sequence[Unit]]) -> None:
        root, in_blocks = self._units[:1], {inner for block in context.blocks for inner in block.modules()}
        for block, units in zip(context.blocks, needs, strict=True):
            set_forward(block, self._holding_forward(block.forward, units))
        # What lies in no block may run by itself too: recomputed in backward, or called by another method than forward.
        for inner in context.module.modules():
            if inner not in in_blocks and next(inner.parameters(recurse=False), None) is not None:
                set_forward(inner, self._holding_forward(inner.forward, root))
        set_forward(context.module, self._root_forward(context.module.forward))

    def _holding_forward(self, forward: Forward, units: Sequence[Unit]) -> Forward:
        @wraps(forward)
        def run(*inputs: Any, **keywords: Any) -> Any:
            with self._holding(units):
                return forward(*inputs, **keywords)

        return run

    def _root_forward(self, forward: Forward) -> Forward:
        root = self._units[:1]

        @wraps(forward)
        def run(*inputs: Any, **keywords: Any) -> Any:
            if self._schedule is not None:  # inside of another pass: the model calls itself, or is recomputed
                with self._holding(root):
                    return forward(*inputs, **keywords)
            self._schedule = Schedule(self._units, issue=self._gather, leave=_nothing, ahead=self._ahead)
            try:
                with self._holding(root):
                    output = forward(*inputs, **keywords)
                self._schedule.finish()
                self._release_all()
            finally:
                self._schedule = None
            return output

        return run

    @contextmanager
    def _holding(self, units: Sequence[Unit]) -> Iterator[None]:
        """Inside, parameters of the units are bound, and autograd saves notes in place of them."""
        for unit in units:
            fulls = self._use(unit)
            if unit.holders == 0:
                unit.bind(fulls)
            unit.holders += 1
        try:
            with self._saving():
                yield
        finally:
            for unit in units:
                unit.holders -= 1
                if unit.holders == 0:
                    unit.unbind()
                    if not self._in_backward:
                        self._release(unit)

    def _use(self, unit: Unit) -> dict[int, Tensor]:
        if self._schedule is not None:
            self._schedule.reach(unit)
        if unit.fulls is None:
            self._gather(unit)
        if self._in_backward:
            self._recent[unit.index] = unit
            self._recent.move_to_end(unit.index)
            for other in list(self._recent.values())[:-_KEPT_IN_BACKWARD]:
                self._release(other)
        return unit.wait()

    def _gather(self, unit: Unit) -> None:
        size, own = self.ranks.size, self.ranks.rank
        fulls: dict[int, Tensor] = {}
        for bucket in unit.buckets:
            shard = self._shards[bucket.index]
            if size == 1:
                fulls[bucket.index] = shard.to(self._device)
            else:
                full = torch.empty(bucket.size, dtype=bucket.dtype, device=self._device)
                full[bucket.shard(own)].copy_(shard, non_blocking=True)
                fulls[bucket.index] = full
        unit.fulls = fulls
        unit.arriving = tuple(self.ranks.all_gather(batch.rows(fulls)) for batch in unit.batches)
        for index, full in fulls.items():
            self._live[full.untyped_storage().data_ptr()] = (unit, index)
        if not self._ahead:
            unit.wait()

    def _release(self, unit: Unit) -> None:
        """Drop the gathered buckets; their memory goes when the last tensor that refers to it does."""
        if unit.fulls is None or unit.holders:
            return
        for full in unit.wait().values():
            self._live.pop(full.untyped_storage().data_ptr(), None)
        unit.fulls = None
        self._recent.pop(unit.index, None)

    def _release_all(self) -> None:
        for unit in self._units:
            self._release(unit)

    # What autograd saves

    def _saving(self) -> AbstractContextManager[Any]:
        """Hooks, unless there are some: ours from around, or those of a checkpoint that saves nothing or copies."""
        if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        found = self._live.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        unit, index = found
        assert unit.fulls is not None
        if tensor.dtype != unit.fulls[index].dtype:
            return tensor
        return _Saved(unit, index, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        full = self._use(saved.unit)[saved.bucket]
        return full.as_strided(saved.size, saved.stride, saved.offset)

    # Reducing

    def _reduce(self, bucket: Bucket, local: Tensor) -> PendingSum:
        return self.ranks.reduce_scatter(local, wire=self._dtypes.wire, dtype=self._dtypes.held)

    def _leave(self, unit: Unit) -> None:
        """The next unit of a backward pass is reached."""
        root = self._units[0]
        if unit is root:
            self._note_early(root)
            self._launch(bucket for bucket in root.trainable if bucket.index in self._early)
            return
        self._launch(unit.trainable[self._launched:])
        self._launched = 0
        if root.index not in self._recent:  # this rank's graph does not need it again
            self._release(root)

    def _launch(self, buckets: Iterable[Bucket]) -> None:
        if self._reduces or self._schedule is None:
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
        if unit.index and self._schedule is not None and unit is self._schedule.current:
            waiting = unit.trainable[self._launched:]
            complete = list(takewhile(lambda bucket: not self.gradients.states[bucket.index].missing, waiting))
            self._launch(complete)
            self._launched += len(complete)
        # Nothing more of this pass needs the unit; frozen parameters would give no sign when they are done.
        if not unit.frozen and not any(self.gradients.states[bucket.index].missing for bucket in unit.trainable):
            self._release(unit)

    def _agree_on_late(self) -> list[Bucket]:
        """Buckets for which some rank has gradients that came after their reduction.

        In the first window the ranks agree too on which of the root's buckets are complete early.
        """
        late = [float(state.local is not None) for state in self.gradients.states]
        early = self._complete_early or {}
        flags = torch.tensor([*late, *(float(not complete) for complete in early.values())])
        flags = self.ranks.sum_small(flags if self.ranks.has_host_transport else flags.to(self._device))
        late_anywhere, incomplete_anywhere = flags[:len(late)].tolist(), flags[len(late):].tolist()
        self._early.update(index for index, flag in zip(early, incomplete_anywhere, strict=True) if not flag)
        self._complete_early = None
        return [bucket for bucket, flag in zip(self.buckets, late_anywhere, strict=True) if flag]

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


def _nothing(unit: Unit) -> None:
    pass


