"""What the hardware can do, measured in a few seconds by the group that is going to use it. Collective.

All ranks measure at the same time, as they will when they train; the slowest rank counts.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from engine.collectives import Ranks
from engine.operators import OperatorCounter
from engine.precision import DTYPES
from engine.process import cpu_name, cpu_times, host_memory_bytes, is_contended
from engine.profile import Collective, HardwareProfile, OperatorClass, OperatorCost
from engine.ranks import RankContext
from engine.transports.base import PendingSum
from engine.values import Precision

_MATMUL_SECONDS = 0.4
_COPY_SECONDS = 0.3
_COPY_BYTES = {True: 64 * 2**20, False: 512 * 2**20}
"""By whether the device is a CPU; an accelerator's caches hold 100 MiB and copy faster than its memory."""
_HOST_BYTES = 64 * 2**20
_MESSAGE_BYTES = 16 * 2**20
_LATENCY_ROUNDS = 50
_BANDWIDTH_ROUNDS = 4
_LAUNCHES = 200
_OPERATOR_SECONDS = 0.06
_QUEUED = 200
"""Operations that are at most started before an accelerator is waited for."""
_COLD_BYTES = {True: 48 * 2**20, False: 128 * 2**20}
"""Of weights, so that they are read from memory; by whether the device is a CPU."""
_SCALES = (8, 4, 2, 1)
"""Of the sizes of operators on an accelerator, along each side."""
_LARGEST_FLOPS = 7e9
"""Of the largest operator at scale 1."""
_REPEAT_SECONDS = 5.0
"""A calibration that other work disturbed is repeated once, where it took no longer than this."""
_COLLECTIVE_BYTES = {True: (2**16, 4 * 2**20), False: (2**20, 128 * 2**20)}
"""Of small and large messages, by whether the device is a CPU."""
_SLOW_FLOPS_PER_SECOND = 1e10
"""A precision so slow is calibrated by its products alone."""
_HOST_RESERVE = 0.1
"""Share of the host's memory that is left to everything else."""


def calibrate(context: RankContext) -> HardwareProfile:
    """Measure the devices of this group; once more where other work disturbed it.

    Returns:
        The same profile on all ranks.
    """
    begun = time.perf_counter()
    profile = _watched(context)
    seconds, = context.largest((time.perf_counter() - begun,))
    return _watched(context) if profile.contended and seconds <= _REPEAT_SECONDS else profile


def _watched(context: RankContext) -> HardwareProfile:
    """Measured once, with whether any rank's core was shared meanwhile."""
    before = cpu_times(context.core)
    profile = _measured(context)
    contended = not _agreed(context, not is_contended(before, cpu_times(context.core)))
    return profile.model_copy(update={"contended": contended})


def _measured(context: RankContext) -> HardwareProfile:
    device = context.device
    on_cpu = device.type == "cpu"
    precisions = tuple(name for name in DTYPES if _agreed(context, can_train(name, device)))
    rates: dict[Precision, float] = {
        name: _slowest(context, partial(matmul_flops_per_second, name, device)) for name in precisions}
    copy = _slowest(context, partial(copy_bytes_per_second, device))
    latency, bandwidth = allreduce_speed(context)
    host = int(_slowest(context, lambda: float(host_memory_bytes() * (1 - _HOST_RESERVE))))
    device_name = _joined(context, cpu_name() if on_cpu else torch.get_device_module(device).get_device_name(device))
    operators = {name: operator_costs(context, name, operator_scale(device.type, rates[name]))
                 for name in precisions if rates[name] > _SLOW_FLOPS_PER_SECOND}
    collectives = _collectives(context, tuple(operators))
    software = {"torch": torch.__version__, "threads_per_rank": str(torch.get_num_threads())}
    if not on_cpu:
        software["fp32_products"] = torch.get_float32_matmul_precision()
    share = host // max(context.host_devices, 1)
    launch, = context.largest((launch_seconds(device),))
    update = _slowest(context, partial(update_rate, device, _COPY_BYTES[on_cpu] // 2))
    to_host = None if on_cpu else _slowest(context, partial(host_bytes_per_second, device))
    host_update = None if on_cpu else _slowest(context, partial(update_rate, torch.device("cpu"), _HOST_BYTES))
    total = share if on_cpu else int(_slowest(context, lambda: _total_bytes(device)))
    return HardwareProfile(
        fingerprint=hardware_fingerprint(device.type, device_name, context.world_size, total, software,
                                         shares_memory=collectives.shares_memory),
        device_type=device.type, device_name=device_name, world_size=context.world_size,
        memory_bytes=share if on_cpu else int(_slowest(context, lambda: _usable_bytes(device))),
        host_memory_bytes=host, host_devices=context.host_devices, precisions=precisions,
        matmul_flops_per_second=rates, copy_bytes_per_second=copy, allreduce_bytes_per_second=bandwidth,
        allreduce_latency_seconds=latency, software=software, launch_seconds=launch, operators=operators,
        reduce_scatter=collectives.reduce_scatter, all_reduce=collectives.all_reduce,
        all_gather=collectives.all_gather, shares_memory=collectives.shares_memory, update_bytes_per_second=update,
        host_bytes_per_second=to_host, host_update_bytes_per_second=host_update)


def hardware_fingerprint(
    device_type: str, device_name: str, world_size: int, memory_bytes: int, software: dict[str, str], *,
    shares_memory: bool | None = None,
) -> str:
    """Equal for equal devices, device count and software, and for CPUs of one host or of several; memory counts in
    GiB, as totals differ by a few pages."""
    gib = round(memory_bytes / 2**30)
    apart = ("apart",) if device_type == "cpu" and shares_memory is False else ()
    parts = (device_type, device_name, str(world_size), str(gib), *map(str, sorted(software.items())), *apart)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def can_train(precision: Precision, device: torch.device) -> bool:
    """Whether a forward and backward pass of the usual operations runs in a precision and yields finite gradients."""
    dtype = DTYPES[precision]
    try:
        norm, linear = nn.LayerNorm(64).to(device, dtype), nn.Linear(64, 64).to(device, dtype)
        query = linear(norm(torch.randn(2, 8, 64, device=device, dtype=dtype))).view(2, 8, 4, 16).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        logits = F.gelu(linear(mixed.transpose(1, 2).reshape(2, 8, 64)))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), torch.arange(16, device=device))
        loss.backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):
        return False
    gradient = linear.weight.grad
    return gradient is not None and gradient.dtype == dtype and bool(gradient.isfinite().all())


def matmul_flops_per_second(precision: Precision, device: torch.device) -> float:
    """The best rate over a few square shapes and, on an accelerator, a convolution.

    In fp32 this process's switches hold: convolutions may use shorter products than matrix products may."""
    sizes = (256, 512, 1024) if device.type == "cpu" else (1024, 4096, 8192)
    best = 0.0
    for size in sizes:
        if best and 2.0 * size**3 / best > _MATMUL_SECONDS / 8:
            break  # slow as it is, a larger one would only take long
        left = torch.randn(size, size, device=device).to(DTYPES[precision])
        right = torch.randn(size, size, device=device).to(DTYPES[precision])
        best = max(best, _rate(partial(torch.matmul, left, right), device, _MATMUL_SECONDS / len(sizes),
                               work=2.0 * size**3))
    return best if device.type == "cpu" else max(best, _convolution_flops_per_second(precision, device))


def _convolution_flops_per_second(precision: Precision, device: torch.device) -> float:
    """Of 3 x 3 windows over 256 channels; 0 where it does not run."""
    images, channels, side = 16, 256, 28
    values = torch.randn(images, channels, side, side, device=device).to(DTYPES[precision])
    weight = torch.randn(channels, channels, 3, 3, device=device).to(DTYPES[precision])
    try:
        return _rate(partial(F.conv2d, values, weight, padding=1), device, _MATMUL_SECONDS / 4,
                     work=2.0 * 9 * images * side**2 * channels**2)
    except RuntimeError:
        return 0.0


def copy_bytes_per_second(device: torch.device) -> float:
    """Bytes copied per second within the device's memory; each is read once and written once."""
    source = torch.ones(_COPY_BYTES[device.type == "cpu"] // 4, device=device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), device, _COPY_SECONDS, work=float(source.nbytes))


def host_bytes_per_second(device: torch.device) -> float:
    """Between pinned memory of the host and an accelerator, in the slower direction."""
    here = torch.ones(_HOST_BYTES // 4).pin_memory()
    there = torch.ones(_HOST_BYTES // 4, device=device)
    return min(_rate(partial(target.copy_, source, non_blocking=True), device, _COPY_SECONDS / 3,
                     work=float(_HOST_BYTES)) for target, source in ((there, here), (here, there)))


def launch_seconds(device: torch.device) -> float:
    """The host's time to start one operation that does next to nothing."""
    value = torch.zeros(1, device=device)

    def start() -> None:
        for _ in range(_LAUNCHES):
            value.add_(1.0)

    return 1 / _rate(start, device, _COPY_SECONDS / 10, work=float(_LAUNCHES))


def update_rate(device: torch.device, parameter_bytes: int) -> float:
    """Bytes per second of fused AdamW, which reads or writes 7 numbers for each parameter."""
    parameter = nn.Parameter(torch.zeros(parameter_bytes // 4, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return _rate(optimizer.step, device, _COPY_SECONDS / 2, work=7.0 * parameter.nbytes)


def operator_scale(device_type: str, flops_per_second: float) -> int:
    """How large operators to be measured are: as large as the time for one of them allows."""
    if device_type == "cpu":
        return 1
    fast = (scale for scale in _SCALES if _LARGEST_FLOPS * scale**3 <= flops_per_second * _OPERATOR_SECONDS)
    return next(fast, _SCALES[-1])


def operator_costs(context: RankContext, precision: Precision, scale: int) -> dict[OperatorClass, OperatorCost]:
    """What operators of each class cost in forward and backward: the line through a few sizes, on the slowest rank."""
    kinds: dict[OperatorClass, Callable[..., Iterator[Callable[[], object]]]] = {
        "product": _products, "attention": _attentions, "other": _others}
    return {kind: _cost([_sampled(context, run) for run in runs(context.device, precision, scale)])
            for kind, runs in kinds.items()}


def _sampled(context: RankContext, run: Callable[[], object]) -> "_Sample":
    counter = OperatorCounter()
    with counter:
        run()
    per_second = _slowest(context, lambda: _rate(run, context.device, _OPERATOR_SECONDS, work=1.0))
    return _Sample(sum(counter.flops.values()), sum(counter.bytes.values()), 1 / per_second)


class _Sample(NamedTuple):
    flops: float
    moved: float
    seconds: float


def _cost(samples: Sequence[_Sample]) -> OperatorCost:
    """Least squares of relative errors, neither rate negative."""
    rows = [(sample.flops / sample.seconds, sample.moved / sample.seconds) for sample in samples]
    ff, fb, bb = (sum(left[i] * left[j] for left in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    f, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = ff * bb - fb * fb
    if determinant > 1e-9 * ff * bb:
        flop, byte = (f * bb - b * fb) / determinant, (b * ff - f * fb) / determinant
        if flop >= 0 and byte >= 0:
            return OperatorCost(seconds_per_flop=flop, seconds_per_byte=byte)
    by_flops, by_bytes = (f / ff if ff else math.inf), b / bb
    misses = [sum((1 - row[i] * each) ** 2 for row in rows) for i, each in ((0, by_flops), (1, by_bytes))]
    if ff and misses[0] < misses[1]:
        return OperatorCost(seconds_per_flop=by_flops, seconds_per_byte=0.0)
    return OperatorCost(seconds_per_flop=0.0, seconds_per_byte=by_bytes)


def _products(device: torch.device, precision: Precision, scale: int) -> Iterator[Callable[[], object]]:
    """A linear layer's three products, in turn with so many weights that each comes from memory."""
    cold = _cold_bytes(device)
    for shape in ((64, 512, 512), (64, 512, 2048), (512, 512, 512), (512, 2048, 512)):
        tokens, inputs, outputs = (size * scale for size in shape)
        dtype = DTYPES[precision]
        values, gradient = (torch.randn(tokens, size, device=device).to(dtype) for size in (inputs, outputs))
        count = max(cold // (inputs * outputs * dtype.itemsize), 1) if tokens == 64 * scale else 2
        weights = [torch.randn(outputs, inputs, device=device).to(dtype) for _ in range(count)]

        def run(values: Tensor = values, gradient: Tensor = gradient, weights: list[Tensor] = weights) -> None:
            for weight in weights:
                torch.mm(values, weight.t())
                torch.mm(gradient, weight)
                torch.mm(gradient.t(), values)

        yield run


def _cold_bytes(device: torch.device) -> int:
    """Of weights that no cache holds; devices that tell their cache's size may have a large one."""
    if device.type == "cpu":
        return _COLD_BYTES[True]
    properties = torch.get_device_module(device).get_device_properties(device)
    return max(_COLD_BYTES[False], 2 * getattr(properties, "L2_cache_size", 0))


def _attentions(device: torch.device, precision: Precision, scale: int) -> Iterator[Callable[[], object]]:
    for length in (64, 256):
        shape = (256 // length, 8 * scale, length * scale, 64)
        query, key, value = (torch.randn(shape, device=device).to(DTYPES[precision]).requires_grad_() for _ in range(3))
        gradient = torch.ones_like(query)

        def run(query: Tensor = query, key: Tensor = key, value: Tensor = value, gradient: Tensor = gradient) -> None:
            result = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(result, (query, key, value), gradient)

        yield run


def _others(device: torch.device, precision: Precision, scale: int) -> Iterator[Callable[[], object]]:
    """Norm, activation, residual and loss."""
    for tokens in (64, 512):
        values = torch.randn(tokens * scale, 1024 * scale, device=device).to(DTYPES[precision]).requires_grad_()
        norm = nn.LayerNorm(1024 * scale).to(device, DTYPES[precision])
        labels = torch.arange(tokens * scale, device=device)

        def run(values: Tensor = values, norm: nn.Module = norm, labels: Tensor = labels) -> None:
            hidden = norm(values)
            loss = F.cross_entropy(hidden + F.gelu(hidden, approximate="tanh"), labels)
            torch.autograd.grad(loss, (values, *norm.parameters()))

        yield run


class _Collectives(NamedTuple):
    reduce_scatter: dict[Precision, Collective]
    all_reduce: dict[Precision, Collective]
    all_gather: Collective | None
    shares_memory: bool | None


def _collectives(context: RankContext, precisions: Sequence[Precision]) -> _Collectives:
    """The engine's own, by the transport that it would take."""
    if context.world_size == 1:
        return _Collectives({}, {}, None, None)
    ranks = Ranks(dist.group.WORLD, device=context.device)
    piece = 4 * context.world_size  # a number for every rank in each dtype
    sizes = tuple(-(-size // piece) * piece for size in _COLLECTIVE_BYTES[context.device.type == "cpu"])
    try:
        largest = max(sizes)
        ranks.reserve([largest] * 2)
        row = ranks.mirrored([largest])[0].view(context.world_size, -1)
        reduced, summed = {}, {}
        for name in precisions:
            reduced[name] = _collective(context, partial(_sum, ranks, ranks.reduce_scatter, DTYPES[name]), sizes)
            summed[name] = _collective(context, partial(_sum, ranks, ranks.all_reduce, DTYPES[name]), sizes)

        def gather(size: int) -> None:
            ranks.all_gather([row.view(-1)[:size].view(context.world_size, -1)]).wait()
            ranks.finish_reading()

        return _Collectives(reduced, summed, _collective(context, gather, sizes), ranks.shares_memory)
    finally:
        ranks.close()


def _sum(ranks: Ranks, collective: Callable[..., PendingSum], dtype: torch.dtype, size: int) -> None:
    full = ranks.empty(size // dtype.itemsize, dtype, room=0)
    ranks.discard(collective(full, dtype=dtype).wait())


def _collective(context: RankContext, run: Callable[[int], None], sizes: tuple[int, ...]) -> Collective:
    small, large = (_collective_seconds(context, partial(run, size)) for size in sizes)
    rate = (max(sizes) - min(sizes)) / _longer(large, small)
    return Collective(latency_seconds=max(small - min(sizes) / rate, 0.0), bytes_per_second=rate)


def _collective_seconds(context: RankContext, run: Callable[[], object], rounds: int = 12) -> float:
    """Median over rounds, each begun together, on the slowest rank."""
    samples = []
    for _ in range(rounds + 2):
        context.barrier()
        begun = time.perf_counter()
        run()
        _synchronize(context.device)
        samples.append(context.largest((time.perf_counter() - begun,))[0])
    return sorted(samples[2:])[rounds // 2]


def allreduce_speed(context: RankContext) -> tuple[float | None, float | None]:
    """(latency in seconds, message bytes per second) of an all-reduce over the group; None at one rank."""
    if context.world_size == 1:
        return None, None
    one, many = (torch.zeros(size, device=context.device) for size in (1, _MESSAGE_BYTES // 4))
    small = _collective_seconds(context, partial(dist.all_reduce, one), _LATENCY_ROUNDS)
    large = _collective_seconds(context, partial(dist.all_reduce, many), _BANDWIDTH_ROUNDS)
    return small, _MESSAGE_BYTES / _longer(large, small)


def _longer(large: float, small: float) -> float:
    """By how many seconds. Where other work held up the small message, a quarter of the large one's is believed."""
    return max(large - small, large / 4)


def _rate(operation: Callable[[], object], device: torch.device, seconds: float, *, work: float) -> float:
    """The best work per second over repetitions for so long; at least three, the first one not counted.

    An accelerator works off a queue: as many operations are waited for together as take a quarter of the time, so that
    starting and waiting hide as they do in a step."""
    operation()
    _synchronize(device)
    count = 1
    if device.type != "cpu":
        count = min(max(int(seconds / 4 / _seconds_of(operation, device, 1)), 1), _QUEUED)
    best, end, rounds = float("inf"), time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        best = min(best, _seconds_of(operation, device, count) / count)
        rounds += 1
    return work / best


def _seconds_of(operation: Callable[[], object], device: torch.device, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        operation()
    _synchronize(device)
    return time.perf_counter() - begun


def _slowest(context: RankContext, measure: Callable[[], float]) -> float:
    context.barrier()
    return -context.largest((-measure(),))[0]


def _agreed(context: RankContext, value: bool) -> bool:
    return not context.largest((float(not value),))[0]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _joined(context: RankContext, name: str) -> str:
    """The ranks' name, or where they differ each of them."""
    names = [name] * context.world_size
    if context.control is not None:
        dist.all_gather_object(names, name, group=context.control)
    return ", ".join(sorted(set(names)))


def _total_bytes(device: torch.device) -> float:
    return float(torch.accelerator.get_memory_info(device)[1])


def _usable_bytes(device: torch.device) -> float:
    """What a trial of this process may allocate: contexts and libraries, and other processes, hold some of the total.

    The allocator's own reserve is free to it, apart from what is allocated."""
    accelerator = torch.accelerator
    kept = accelerator.memory_reserved(device) - accelerator.memory_allocated(device)
    return float(accelerator.get_memory_info(device)[0] + kept)
