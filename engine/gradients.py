"""From autograd's gradients to summed gradient shards.

Every trainable parameter has one hook that moves its gradient into its bucket's local buffer. A pass is one backward
call; gradients that come outside of one, of another trainer's loss, do not count. In a pass that reduces, buckets are
reduced in one order on every rank, whatever order autograd ran in there and whatever parameters it reached, so that
ranks never meet in different collectives. That is the buckets' own order, but those with a parameter that some rank did
not use in the first window come last, where they hold up no other.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from engine.buckets import Bucket, Slot
from engine.collectives import Ranks
from engine.precision import GradientDtypes
from engine.transports.base import PendingSum

_IN_FLIGHT = 2
"""Buckets being reduced at once, at most."""


class BucketGradients:
    """The gradients of one bucket in the window between two optimizer steps.

    Attributes:
        local: (size,) gradients of this rank not reduced yet, None where there are none.
        reduced: (owned,) sum over ranks and reductions so far.
        missing: trainable parameters without a gradient in the running pass.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.local: Tensor | None = None
        self.filled: set[int] = set()
        self.reduced: Tensor | None = None
        self.missing = len(bucket.slots)


class GradientBuckets:
    """Collects, accumulates and reduces gradients.

    Attributes:
        states: one per bucket, in reduction order.
        used: indices of the parameters with a gradient in this window.
        is_ordered: whether `put_last` was called.
        peak_bytes: the most bytes of gradients held at once in this window, or the last where this has none yet.
        on_complete: called with a bucket when all of its gradients of the running pass are there.

    Args:
        buckets: trainable ones, in reduction order.
        reduce: starts the reduction of a full local buffer of a bucket.
        stays: gradients stay in the memory that they are collected in over micro-batches.
        overlap: reduce while backward goes on; else wait for each bucket at once.
    """

    def __init__(self, buckets: Sequence[Bucket], *, ranks: Ranks, reduce: Callable[[Bucket, Tensor], PendingSum],
                 dtypes: GradientDtypes, stays: bool, overlap: bool) -> None:
        self.states = tuple(BucketGradients(bucket) for bucket in buckets)
        self.peak_bytes = 0
        self._ranks, self._reduce, self._dtypes = ranks, reduce, dtypes
        self._in_flight = _IN_FLIGHT if overlap else 1
        self._collects_for_wire = dtypes.local == dtypes.wire
        count = len(buckets)
        self._rooms = count if stays and self._collects_for_wire else min(self._in_flight + 1, count)
        self._queue: deque[tuple[BucketGradients, PendingSum, int]] = deque()
        self._held_bytes = 0
        self._new_window = True
        self._in_pass = self._reducing = self._eager = False
        self._order: list[BucketGradients] = []
        self._place: dict[int, int] = {}
        self._reduce_in(list(self.states))
        self._next = 0
        self.is_ordered = False
        self.used: set[int] = set()
        self.on_complete: Callable[[BucketGradients], None] | None = None
        self._hooks = [self._register(state, slot) for state in self.states for slot in state.bucket.slots]

    def begin_pass(self, *, reduce: bool, eager: bool = True) -> None:
        """Start a backward call.

        Args:
            reduce: whether its gradients, and those collected before, are reduced in it.
            eager: reduce each bucket as soon as it and all before it are complete; else the caller launches.
        """
        self.finish()  # their rooms are needed again; meanwhile the others had a forward pass's time
        for state in self.states:
            state.missing = len(state.bucket.slots)
        self._in_pass, self._reducing, self._eager, self._next = True, reduce, eager, 0

    def end_pass(self) -> None:
        """Launch what the pass left: buckets with parameters that autograd did not reach."""
        if self._reducing and self._eager:
            while self._next < len(self._order):
                self._launch_next()
        self._in_pass = self._reducing = False

    def put_last(self, parameters: set[int]) -> None:
        """From now on reduce the buckets of these parameters after the others. Equal on every rank, between passes."""
        order = sorted(self._order, key=lambda state: any(
            slot.managed.index in parameters for slot in state.bucket.slots))
        if order != self._order:
            self._reduce_in(order)
        self.is_ordered = True

    def launch(self, state: BucketGradients) -> None:
        """Start reducing what was collected of a bucket; the sum joins `reduced`."""
        local, state.local = self._close(state), None
        if len(self._queue) >= self._in_flight:
            self._finish_oldest()
        local_bytes = local.nbytes
        full = self._ranks.placed(local, self._dtypes.wire, room=self._room(state))
        del local  # its memory may be wanted for the sum
        self._queue.append((state, self._reduce(state.bucket, full), local_bytes))
        if self._in_flight == 1:
            self._finish_oldest()

    def finish(self) -> None:
        """Wait for all reductions launched so far."""
        while self._queue:
            self._finish_oldest()

    def use_up(self, state: BucketGradients) -> None:
        """The update is done with the bucket's summed gradient."""
        reduced, state.reduced = state.reduced, None
        assert reduced is not None
        self._held_bytes -= reduced.nbytes
        self._ranks.discard(reduced)

    def discard(self) -> None:
        """Drop everything and start a new window."""
        try:
            self.finish()
        finally:
            self._queue.clear()
            self._drop()

    def start_window(self) -> None:
        """Forget which parameters were used; `peak_bytes` starts anew with the next gradient."""
        self._new_window = True
        self.used.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._queue.clear()
        self._drop()
        self.on_complete = None

    def _drop(self) -> None:
        for state in self.states:
            for gradient in (state.local, state.reduced):
                if gradient is not None:
                    self._ranks.discard(gradient)
            state.local, state.reduced = None, None
            state.filled.clear()
        self._held_bytes = 0
        self._in_pass = self._reducing = False

    def _reduce_in(self, order: list[BucketGradients]) -> None:
        """Make rooms for this order: neighbours have different ones."""
        self._order = order
        self._place = {state.bucket.index: place for place, state in enumerate(order)}
        sizes = [state.bucket.size * self._dtypes.wire.itemsize for state in order]
        self._ranks.reserve([max(sizes[room::self._rooms]) for room in range(self._rooms)])

    def _register(self, state: BucketGradients, slot: Slot) -> RemovableHandle:
        def accept(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if self._in_pass:
                self._accept(state, slot, gradient if gradient.layout == torch.strided else gradient.to_dense())

        slot.managed.parameter.grad = None  # of before, which would join the first one
        hook: RemovableHandle = slot.managed.parameter.register_post_accumulate_grad_hook(accept)  # type: ignore[no-untyped-call]
        return hook

    @torch.no_grad()
    def _accept(self, state: BucketGradients, slot: Slot, gradient: Tensor) -> None:
        if state.local is None:
            state.local = self._empty(state)
        place = slot.view(state.local)
        index = slot.managed.index
        if index in state.filled:
            place.add_(gradient.to(place.dtype))
        else:
            place.copy_(gradient)
            state.filled.add(index)
        self.used.add(index)
        state.missing -= 1
        if state.missing:
            return
        if self._reducing and self._eager:
            while self._next < len(self._order) and not self._order[self._next].missing:
                self._launch_next()
        if self.on_complete is not None:
            self.on_complete(state)

    def _empty(self, state: BucketGradients) -> Tensor:
        """A new local buffer."""
        if self._collects_for_wire:
            local = self._ranks.empty(state.bucket.size, self._dtypes.local, room=self._room(state))
        else:
            local = torch.empty(state.bucket.size, dtype=self._dtypes.local, device=self._ranks.device)
        self._hold(local.nbytes)
        return local

    def _room(self, state: BucketGradients) -> int:
        return self._place[state.bucket.index] % self._rooms

    def _launch_next(self) -> None:
        self._next += 1
        self.launch(self._order[self._next - 1])

    def _close(self, state: BucketGradients) -> Tensor:
        """The local buffer with zeros where nothing was collected."""
        if state.local is None:
            return self._empty(state).zero_()
        for gap in state.bucket.gaps:
            state.local[gap].zero_()
        if len(state.filled) < len(state.bucket.slots):
            for slot in state.bucket.slots:
                if slot.managed.index not in state.filled:
                    slot.view(state.local).zero_()
        state.filled.clear()
        return state.local

    def _finish_oldest(self) -> None:
        state, pending, local_bytes = self._queue.popleft()
        summed = pending.wait()
        self._held_bytes -= local_bytes
        if state.reduced is None:
            self._hold(summed.nbytes)
            state.reduced = self._moved(state, summed)
        else:
            state.reduced.add_(summed)
            self._ranks.discard(summed)

    def _moved(self, state: BucketGradients, summed: Tensor) -> Tensor:
        """The sum, out of a room that a later bucket needs."""
        if self._place[state.bucket.index] + self._rooms >= len(self._order) or not self._ranks.is_room(summed):
            return summed
        moved = summed.clone()
        self._ranks.discard(summed)
        return moved

    def _hold(self, new_bytes: int) -> None:
        self._held_bytes += new_bytes
        self.peak_bytes = self._held_bytes if self._new_window else max(self.peak_bytes, self._held_bytes)
        self._new_window = False
