"""The optimizer step on what this rank owns, bucket after bucket."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from engine.buckets import Bucket
from engine.chunks import Chunk, chunks_of
from engine.offload import HostMemory, make_transfers
from engine.optimizers import StepHooks, is_stock, prepare_state, scales_in_kernel
from engine.owned import Offload, Part, Slice, adopt, groups_of, make_parts
from engine.stages.base import Stage


class OwnedUpdate:
    """Runs a stock optimizer on this rank's slices.

    Args:
        optimizer: over whole parameters; afterwards over this rank's slices, its groups otherwise unchanged.
        host_ratio: share of each bucket's owned elements whose masters and states live on the host.

    Attributes:
        host_seconds: of all steps so far, with something on the host: in the optimizer's own step; on a CPU that of
            what is not offloaded is in it, too.
        transfer_seconds: in waiting for what comes from the device, and in copies and conversions either way; what runs
            beside the host's step is not in it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stage: Stage, *, host_ratio: float, host: HostMemory,
                 device: torch.device) -> None:
        self.optimizer, self._stage, self._host, self._device = optimizer, stage, host, device
        groups = groups_of(optimizer, stage.buckets)
        # A bucket at a time bounds the memory of converted gradients, and lets the transfers of its neighbours run
        # meanwhile. Only optimizers known to keep all state per parameter may be stepped so.
        indices = [[bucket.index] for bucket in stage.buckets]
        self._rounds = indices if is_stock(optimizer) else [[index for one in indices for index in one]]
        in_use, upcoming = len(self._rounds[0]), len(self._rounds[1]) if len(self._rounds) > 1 else 0
        self._transfers = make_transfers(device, host, in_use=in_use, upcoming=upcoming)
        offload = Offload(host_ratio, host, self._transfers, has_parameters=stage.host_parameter_bytes() > 0)
        self._parts = [make_parts(bucket, stage, groups, offload) for bucket in stage.buckets]
        adopt(optimizer, list(self.parts))
        self._chunks: dict[Part, list[Chunk]] = {
            part: chunks_of(part, joins=is_stock(optimizer)) for part in self.parts}
        self._scales_in_kernel = scales_in_kernel(optimizer)
        self.host_seconds = self.transfer_seconds = 0.0

    @property
    def parts(self) -> Iterator[Part]:
        for parts in self._parts:
            yield from parts

    def bucket_parts(self, bucket: Bucket) -> list[Part]:
        """The parts of one bucket; together its owned elements, in order."""
        return self._parts[bucket.index]

    @property
    def slices(self) -> Iterator[Slice]:
        for part in self.parts:
            yield from part.slices

    @torch.no_grad()
    def prepare(self) -> bool:
        """Make states now that the first step would make; returns whether every slice has its own."""
        for part in self.parts:
            for chunk in self._chunks[part]:
                chunk.prepare(self.optimizer)
        return all(self.optimizer.state.get(piece.tensor) for piece in self.slices)

    @torch.no_grad()
    def step(self, *, used: set[int] | None, divisor: float) -> None:
        """Update the owned elements from the stage's summed gradients, and publish them.

        Args:
            used: indices of parameters that have a gradient; the others are left alone. None: all have one.
            divisor: gradients are divided by it first.
        """
        if self._scales_in_kernel and divisor != 1:
            # On the host: to there, optimizers copy it from a device without waiting for it to arrive.
            self.optimizer.grad_scale = torch.tensor(divisor, dtype=torch.float32)  # type: ignore[attr-defined]
            divisor = 1
        hooks = StepHooks(self.optimizer)
        self._transfers.begin()
        with self._in_rounds():
            upcoming = self._receive(self._rounds[0])
            for number in range(len(self._rounds)):
                last = number + 1 == len(self._rounds)
                parts, upcoming = upcoming, [] if last else self._receive(self._rounds[number + 1])
                with hooks.in_round(first=number == 0, last=last):
                    self._step_optimizer(parts, used=used, divisor=divisor)
                for part in parts:
                    with self._transferring(part):
                        part.store()
                for index in self._rounds[number]:
                    self._stage.gradients.use_up(self._stage.gradients.states[index])
                    self._stage.publish(self._stage.buckets[index])
        self._stage.finish_publishing()
        self._host.note(self.host_state_bytes())

    @torch.no_grad()
    def take_changed(self) -> None:
        """Have masters follow what the user changed of the module's parameters."""
        changed = self._stage.take_changed()
        for part in self.parts if changed else ():
            for piece in part.slices:
                if piece.managed.index in changed:
                    part.take_over(piece)

    @torch.no_grad()
    def publish(self) -> None:
        """Give the module the masters' values, after they and the states were changed other than by `step`."""
        self._transfers.begin()
        for parts in self._parts:
            for part in parts:
                part.store()
                for chunk in self._chunks[part]:
                    chunk.reset()
            self._stage.publish(parts[0].bucket)
        self._stage.finish_publishing()

    def master(self, bucket: Bucket) -> Tensor:
        """(owned,) masters of a bucket, on the device."""
        masters = [part.master.to(self._device) for part in self._parts[bucket.index]]
        return masters[0] if len(masters) == 1 else torch.cat(masters)

    def state_tensors(self, *, on_host: bool) -> Iterator[Tensor]:
        """Masters that are not the parameters themselves, and optimizer states."""
        for part in self.parts:
            if part.on_host is on_host:
                if not part.is_parameters:
                    yield part.master
                yield from self._states(part)

    def host_state_bytes(self) -> int:
        """Bytes of optimizer states on the host; masters are counted where they are allocated."""
        return storage_bytes(value for part in self.parts if part.on_host for value in self._states(part))

    def close(self) -> None:
        self._parts, self._rounds, self._chunks = [], [], {}
        self.optimizer.__dict__.pop("add_param_group", None)
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []

    @contextmanager
    def _in_rounds(self) -> Iterator[None]:
        """Inside, the optimizer's groups have only what is stepped at the moment."""
        whole_groups = [group["params"] for group in self.optimizer.param_groups]
        try:
            yield
        finally:
            for group, tensors in zip(self.optimizer.param_groups, whole_groups, strict=True):
                group["params"] = tensors
            if self._scales_in_kernel:
                self.optimizer.grad_scale = None  # type: ignore[attr-defined]

    @contextmanager
    def _transferring(self, part: Part) -> Iterator[None]:
        begun = perf_counter()
        yield
        if part.on_host:
            self.transfer_seconds += perf_counter() - begun

    def _receive(self, indices: Sequence[int]) -> list[Part]:
        """Hand the buckets' summed gradients to their parts; transfers to the host start here."""
        parts = []
        for index in indices:
            gradient = self._stage.gradients.states[index].reduced
            assert gradient is not None
            for part in self._parts[index]:
                part.receive(gradient[part.place])
                parts.append(part)
        return parts

    def _step_optimizer(self, parts: Sequence[Part], *, used: set[int] | None, divisor: float) -> None:
        members: list[list[Tensor]] = [[] for _ in self.optimizer.param_groups]
        for part in parts:
            with self._transferring(part):
                gradient = part.take_gradient(divisor=divisor)
            for chunk in self._chunks[part]:
                members[chunk.group] += chunk.begin(self.optimizer, gradient, used)
        for group, tensors in zip(self.optimizer.param_groups, members, strict=True):
            group["params"] = tensors
            prepare_state(self.optimizer, tensors, group)
        begun = perf_counter()
        try:
            self.optimizer.step()
        finally:
            if any(part.on_host for part in parts):
                self.host_seconds += perf_counter() - begun
            for part in parts:
                for chunk in self._chunks[part]:
                    chunk.end(self.optimizer)

    def _states(self, part: Part) -> Iterator[Tensor]:
        for piece in part.slices:
            yield from (value for value in self.optimizer.state.get(piece.tensor, {}).values()
                        if isinstance(value, Tensor))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind tensors."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
