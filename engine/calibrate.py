"""What the hardware can do, measured in a few seconds by the group that is going to use it. Collective.

All ranks measure at the same time, as they will when they train; the slowest rank counts.
"""

import hashlib
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from engine.precision import DTYPES
from engine.process import cpu_name, host_memory_bytes
from engine.profile import HardwareProfile
from engine.ranks import RankContext
from engine.values import Precision

_MATMUL_SECONDS = 0.4
_COPY_SECONDS = 0.3
_COPY_BYTES = 64 * 2**20
_MESSAGE_BYTES = 16 * 2**20
_LATENCY_ROUNDS = 50
_BANDWIDTH_ROUNDS = 4
_HOST_RESERVE = 0.1
"""Share of the host's memory that is left to everything else."""


def calibrate(context: RankContext) -> HardwareProfile:
    """Measure the devices of this group.

    Returns:
        The same profile on all ranks.
    """
    device = context.device
    precisions = tuple(name for name in DTYPES if _agreed(context, can_train(name, device)))
    rates: dict[Precision, float] = {
        name: _slowest(context, partial(matmul_flops_per_second, name, device)) for name in precisions}
    copy = _slowest(context, partial(copy_bytes_per_second, device))
    latency, bandwidth = allreduce_speed(context)
    host = int(host_memory_bytes() * (1 - _HOST_RESERVE))
    memory = _device_memory_bytes(device, host, context.host_devices)
    device_name = cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    software = {"torch": torch.__version__, "threads_per_rank": str(torch.get_num_threads())}
    return HardwareProfile(
        fingerprint=hardware_fingerprint(device.type, device_name, context.world_size, memory, software),
        device_type=device.type, device_name=device_name, world_size=context.world_size, memory_bytes=memory,
        host_memory_bytes=host, precisions=precisions, matmul_flops_per_second=rates, copy_bytes_per_second=copy,
        allreduce_bytes_per_second=bandwidth, allreduce_latency_seconds=latency, software=software)


def hardware_fingerprint(
    device_type: str, device_name: str, world_size: int, memory_bytes: int, software: dict[str, str]
) -> str:
    """Equal for equal devices, device count and software; memory counts in GiB, as totals differ by a few pages."""
    gib = round(memory_bytes / 2**30)
    parts = (device_type, device_name, str(world_size), str(gib), *map(str, sorted(software.items())))
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
    """The best rate over a few square shapes."""
    sizes = (256, 512, 1024) if device.type == "cpu" else (1024, 4096, 8192)
    best = 0.0
    for size in sizes:
        if best and 2.0 * size**3 / best > _MATMUL_SECONDS / 8:
            break  # slow as it is, a larger one would only take long
        left = torch.randn(size, size, device=device).to(DTYPES[precision])
        right = torch.randn(size, size, device=device).to(DTYPES[precision])
        best = max(best, _rate(partial(torch.matmul, left, right), device, _MATMUL_SECONDS / len(sizes),
                               work=2.0 * size**3))
    return best


def copy_bytes_per_second(device: torch.device) -> float:
    """Bytes copied per second within the device's memory; each is read once and written once."""
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), device, _COPY_SECONDS, work=float(_COPY_BYTES))


def allreduce_speed(context: RankContext) -> tuple[float | None, float | None]:
    """(latency in seconds, message bytes per second) of an all-reduce over the group; None at one rank."""
    if context.world_size == 1:
        return None, None
    small = _allreduce_seconds(context, 1, _LATENCY_ROUNDS)
    large = _allreduce_seconds(context, _MESSAGE_BYTES // 4, _BANDWIDTH_ROUNDS)
    return small, _MESSAGE_BYTES / max(large - small, 1e-9)


def _allreduce_seconds(context: RankContext, elements: int, rounds: int) -> float:
    message = torch.zeros(elements, device=context.device)
    dist.all_reduce(message)
    _synchronize(context.device)
    samples = []
    for _ in range(rounds):
        context.barrier()
        begun = time.perf_counter()
        dist.all_reduce(message)
        _synchronize(context.device)
        samples.append(context.largest((time.perf_counter() - begun,))[0])
    return sorted(samples)[len(samples) // 2]


def _rate(operation: Callable[[], object], device: torch.device, seconds: float, *, work: float) -> float:
    """The best work per second over repetitions for so long; at least three, the first one not counted."""
    operation()
    best, end, rounds = float("inf"), time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        _synchronize(device)
        begun = time.perf_counter()
        operation()
        _synchronize(device)
        best = min(best, time.perf_counter() - begun)
        rounds += 1
    return work / best


def _slowest(context: RankContext, measure: Callable[[], float]) -> float:
    context.barrier()
    return -context.largest((-measure(),))[0]


def _agreed(context: RankContext, value: bool) -> bool:
    return not context.largest((float(not value),))[0]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _device_memory_bytes(device: torch.device, host_bytes: int, host_devices: int) -> int:
    """What a rank may use: the device's own memory, on CPU its share of the host's."""
    if device.type == "cpu":
        return host_bytes // max(host_devices, 1)
    return int(torch.accelerator.get_memory_info(device)[1])
