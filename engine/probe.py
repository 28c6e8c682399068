"""What a task needs, found without weights and without a device: parameters, activation bytes, operations.

The task runs once per choice on fake tensors, which have shapes and dtypes but no data, while every storage that comes
and goes is counted. A task that fake tensors cannot run, because it looks at values or has an operator that tells no
shapes, runs on real ones instead, where there is room for them.
"""

import hashlib
import importlib
import inspect
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from engine.blocks import find_blocks
from engine.checkpointing import wrap_inside, wrap_outside
from engine.config import Checkpointing, TrainConfig
from engine.dimensions import DimensionReader
from engine.errors import TaskError
from engine.operators import OperatorCounter
from engine.precision import DTYPES, cast_floating, compute_dtypes, place_buffers
from engine.process import available_memory_bytes, host_memory_bytes
from engine.profile import ActivationBytes, BackwardPoint, ModelProfile, OperatorWork, PassWork
from engine.spec import ModelSpec, PythonSpec, spec_fingerprint
from engine.tasks.base import Batch, Task, checked_batch, checked_loss, task_blocks
from engine.tasks.build import build_task
from engine.values import BYTES_PER_ELEMENT, Precision

_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
_FAKE_SIZES = (2, 8)
_REAL_SIZES = (1, 2)
_STRETCHES = 16
"""Of a backward pass."""
_CPU = torch.device("cpu")

_FAKE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException,
                UnsupportedOperatorException)
_FAKE_WORDS = re.compile(r"FakeTensor|\b[Mm]eta\b|tensor subclasses|data is not allocated|no fake impl|TorchScript")
"""Of torch's other errors when it is asked for data that fake tensors lack."""

_REAL_SHARE = 0.5
"""Of the memory that the host can spare, what a task may take that runs on real tensors."""


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages made while it is entered, fake or real, until they are freed.

    Args:
        known: tensors whose storages do not count.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._known = [tensor.untyped_storage() for tensor in known]
        for storage in self._known:
            self._sizes[storage._cdata] = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._track, result)
        return result

    def take_peak(self) -> int:
        """The peak since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.bytes
        return peak

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes:
            return
        size = self._sizes[storage._cdata] = storage.nbytes()
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)


class _Room(StorageTracker):  # type: ignore[no-untyped-call]
    """Ends what takes more memory than the host can spare, before it is written to.

    Args:
        reason: why fake tensors do not do.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__([])
        self._reason = reason
        free = available_memory_bytes()
        self._most = round(_REAL_SHARE * (host_memory_bytes() if free is None else min(free, host_memory_bytes())))

    def _track(self, tensor: Tensor) -> None:
        super()._track(tensor)
        if self.bytes > self._most:
            reason = f"{type(self._reason).__name__}: {self._reason}".partition("\n")[0]
            raise TaskError(
                f"the task needs values to be probed ({reason}), and with real weights it takes more than "
                f"{self._most / 2**30:.1f} GiB, {_REAL_SHARE:.0%} of what this host can spare: read no values in "
                "build_model and loss, and register a fake implementation for operators of your own, or use a host "
                "with more memory")


def probe(spec: ModelSpec, *, precisions: Sequence[Precision] = ("fp32", "bf16", "fp16")) -> ModelProfile:
    """Profile a model.

    Raises:
        TaskError: the task cannot be built or breaks its contract, or runs on real tensors alone and the host has no
            room for them.
        Exception: whatever the task itself raises when it runs.
    """
    task = build_task(spec)
    try:
        return _probe(spec, task, precisions, fake=True)
    except (RuntimeError, TypeError) as error:
        if not isinstance(error, _FAKE_ERRORS) and not _FAKE_WORDS.search(str(error)):
            raise
        with _Room(error):
            return _probe(spec, task, precisions, fake=False)


def profile_fingerprint(spec: ModelSpec) -> str:
    """Equal for equal tasks: for a user's own task its module's source counts too."""
    fingerprint = spec_fingerprint(spec)
    if not isinstance(spec, PythonSpec):
        return fingerprint
    try:
        source = inspect.getsource(importlib.import_module(spec.entry_point.partition(":")[0]))
    except (OSError, TypeError):
        source = ""
    return hashlib.sha256(f"{fingerprint}\n{source}".encode()).hexdigest()[:32]


def _probe(spec: ModelSpec, task: Task, precisions: Sequence[Precision], *, fake: bool) -> ModelProfile:
    with _mode(fake):
        model = task.build_model()
        blocks = _blocks(task, model)
    parameters = list(model.parameters())
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    activations, work = zip(*_passes(task, precisions, _CHECKPOINTING if blocks else ("none",), fake=fake), strict=True)
    seen = _dimensions(task, precisions[0], fake=fake)
    return ModelProfile(
        fingerprint=profile_fingerprint(spec),
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameter_tensors=len(parameters),
        largest_parameter=max((parameter.numel() for parameter in parameters), default=0),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        block_class=type(blocks[0]).__name__ if blocks else None,
        block_count=len(blocks),
        block_parameters=max(sizes, default=0),
        block_sizes=tuple(sizes),
        largest_block_parameter=max((each.numel() for block in blocks for each in block.parameters()), default=0),
        tokens_per_sample=task.tokens_per_sample,
        flops_per_sample=sum(operators.flops_per_sample for operators in work[0].operators.values()),
        activations=activations, work=work, hidden=seen.hidden, heads=seen.heads, vocab=seen.vocab,
        attention=seen.attention)


def _passes(
    task: Task, precisions: Sequence[Precision], choices: Sequence[Checkpointing], *, fake: bool
) -> Iterator[tuple[ActivationBytes, PassWork]]:
    """Every choice in every precision; those of equal width do the same and are measured once."""
    sizes = _FAKE_SIZES if fake else _REAL_SIZES
    measured: dict[tuple[int, Checkpointing], tuple[ActivationBytes, PassWork]] = {}
    for precision in precisions:
        for checkpointing in choices:
            key = BYTES_PER_ELEMENT[precision], checkpointing
            if key not in measured:
                small, large = (_run(task, size, precision, checkpointing, fake=fake) for size in sizes)
                measured[key] = (_fit(small, large, sizes, precision, checkpointing),
                                 _fit_work(small.operators, large.operators, sizes, precision, checkpointing))
            activations, work = measured[key]
            yield (activations.model_copy(update={"precision": precision}),
                   work.model_copy(update={"precision": precision}))


@dataclass(frozen=True)
class _Pass:
    """Bytes of one forward and backward pass, and what its operators did.

    Attributes:
        arrivals: of each gradient, its elements and the peak since the one before.
    """

    saved: int
    arrivals: list[tuple[int, int]]
    operators: OperatorCounter

    @property
    def peak(self) -> int:
        return max(peak for _, peak in self.arrivals)

    def stretches(self) -> list[tuple[int, int]]:
        """(elements up to its end, peak) of equal parts of the gradients."""
        total = sum(elements for elements, _ in self.arrivals)
        found, so_far = [[0, 0] for _ in range(_STRETCHES)], 0
        for elements, peak in self.arrivals:
            so_far += elements
            stretch = found[min(so_far * _STRETCHES // max(total, 1), _STRETCHES - 1)]
            stretch[:] = so_far, max(stretch[1], peak)
        return [(elements, peak) for elements, peak in found]


def _fit_work(small: OperatorCounter, large: OperatorCounter, sizes: tuple[int, int], precision: Precision,
              checkpointing: Checkpointing) -> PassWork:
    span = sizes[1] - sizes[0]
    operators = {}
    for kind in large.bytes:
        moved = max((large.bytes[kind] - small.bytes[kind]) / span, 0.0)
        operators[kind] = OperatorWork(
            flops_per_sample=large.flops[kind] / sizes[1], bytes_per_sample=moved,
            bytes_fixed=max(large.bytes[kind] - moved * sizes[1], 0.0), kernels=large.kernels[kind])
    return PassWork(checkpointing=checkpointing, precision=precision, operators=operators)


def _fit(small: _Pass, large: _Pass, sizes: tuple[int, int], precision: Precision, checkpointing: Checkpointing
         ) -> ActivationBytes:
    """The line through two micro-batch sizes; `fixed` is the peak's share that does not grow."""
    span = sizes[1] - sizes[0]
    saved = (large.saved - small.saved) / span
    peak = (large.peak - small.peak) / span
    return ActivationBytes(
        checkpointing=checkpointing, precision=precision, saved_per_sample=max(round(saved), 0),
        peak_per_sample=max(round(peak), 0), fixed=max(round(large.peak - peak * sizes[1]), 0),
        backward=tuple(_fit_backward(small, large, sizes)))


def _fit_backward(small: _Pass, large: _Pass, sizes: tuple[int, int]) -> Iterator[BackwardPoint]:
    if [elements for elements, _ in small.arrivals] != [elements for elements, _ in large.arrivals]:
        return  # what is trained depends on the batch
    for (elements, low), (_, high) in zip(small.stretches(), large.stretches(), strict=True):
        if high:
            slope = max((high - low) / (sizes[1] - sizes[0]), 0.0)
            yield BackwardPoint(gradients=elements, per_sample=round(slope),
                                fixed=max(round(high - slope * sizes[1]), 0))


def _dimensions(task: Task, precision: Precision, *, fake: bool) -> DimensionReader:
    """Of the model as it computes without checkpointing."""
    size = (_FAKE_SIZES if fake else _REAL_SIZES)[0]
    with _mode(fake) as mode:
        model = task.build_model().train()
        _cast(model, precision)
    batch = cast_floating(_on_mode(checked_batch(task, range(size)), mode), DTYPES[precision])
    reader = DimensionReader(_blocks(task, model), samples=size, tokens=task.tokens_per_sample)
    with nullcontext() if mode is None else mode, reader:
        checked_loss(task, model, batch)
    return reader


def _run(task: Task, size: int, precision: Precision, checkpointing: Checkpointing, *, fake: bool) -> _Pass:
    """One forward and backward pass, its gradients freed as the engine's buckets take them over."""
    with _mode(fake) as mode:
        model = task.build_model().train()
        blocks = _blocks(task, model)
        _cast(model, precision)
        config = TrainConfig(activation_checkpointing=checkpointing)
        wrap_inside(blocks, config)
        wrap_outside(blocks, config)
    batch = _on_mode(checked_batch(task, range(size)), mode)
    batch = cast_floating(batch, DTYPES[precision])
    tracker = StorageTracker([*model.parameters(), *model.buffers()])
    inputs = sum(tensor.untyped_storage().nbytes() for tensor in _tensors(batch))
    counter, arrivals = OperatorCounter(), list[tuple[int, int]]()

    def arrive(parameter: Tensor) -> None:
        arrivals.append((parameter.numel(), tracker.take_peak() + inputs))
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(arrive)  # type: ignore[no-untyped-call]
    with nullcontext() if mode is None else mode, tracker, counter:
        loss = checked_loss(task, model, batch)
        saved = tracker.bytes
        loss.backward()  # type: ignore[no-untyped-call]
        arrivals.append((0, tracker.take_peak() + inputs))
    return _Pass(saved=saved + inputs, arrivals=arrivals, operators=counter)


@contextmanager
def _mode(fake: bool) -> Iterator[FakeTensorMode | None]:
    if not fake:
        torch.manual_seed(0)
        yield None
        return
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def _blocks(task: Task, model: nn.Module) -> Sequence[nn.Module]:
    blocks = task_blocks(task, model)
    return find_blocks(model) if blocks is None else blocks


def _cast(model: nn.Module, precision: Precision) -> None:
    for parameter, dtype in compute_dtypes(model, DTYPES[precision]).items():
        parameter.data = parameter.data.to(dtype)
    place_buffers(model, device=_CPU, compute=DTYPES[precision])


def _on_mode(batch: Batch, mode: FakeTensorMode | None) -> Batch:
    if mode is None:
        return batch
    if isinstance(batch, dict):
        return {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
    return tuple(mode.from_tensor(tensor) for tensor in batch)


def _tensors(batch: Batch) -> list[Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)
