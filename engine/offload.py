"""Host memory that the engine holds for a device, and the transfers between the two.

With the CPU as device both are the same RAM; host tensors are separate tensors all the same, and counted apart.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class HostMemory:
    """Allocates host tensors and counts them.

    Attributes:
        bytes: allocated by `empty`.
        peak_bytes: the most `bytes` has been, together with what `note` was told.
        pinned: whether new tensors are page-locked; False after the first refusal, and on CPU-only machines.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0
        self.peak_bytes = 0
        self.pinned = device.type != "cpu"

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new (numel,) tensor on the host, page-locked where the machine allows it."""
        tensor = self._allocate(numel, dtype)
        self.bytes += tensor.nbytes
        self.note()
        return tensor

    def note(self, also: int = 0) -> None:
        """Record for the peak that `also` bytes are held on the host beside those allocated here."""
        self.peak_bytes = max(self.peak_bytes, self.bytes + also)

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self.pinned:
            try:
                return torch.empty(numel, dtype=dtype, pin_memory=True)
            except RuntimeError:  # limits on locked memory, WSL, ...: slower transfers, nothing else
                self.pinned = False
        return torch.empty(numel, dtype=dtype)


class Transfers(Protocol):
    """Copies between device and host."""

    def fetch(self, source: Tensor) -> Callable[[], Tensor]:
        """Start copying a device tensor (n,) to the host.

        Returns:
            Waits and gives the host tensor, which is good until `fetch` was called `buffers` times more.
        """

    def store(self, source: Tensor, destination: Tensor) -> None:
        """Copy a host tensor to a device tensor, converted; the device's current stream sees it afterwards.

        Where parameters are offloaded too, the destination is on the host.
        """


def make_transfers(device: torch.device, host: HostMemory, *, buffers: int) -> Transfers:
    """Transfers of a device.

    Args:
        buffers: fetched tensors that are in use at once, at most.
    """
    return DirectTransfers() if device.type == "cpu" else StreamedTransfers(device, host, buffers=buffers)


class DirectTransfers:
    """The device is the host."""

    def fetch(self, source: Tensor) -> Callable[[], Tensor]:
        return lambda: source

    def store(self, source: Tensor, destination: Tensor) -> None:
        destination.copy_(source)


class StreamedTransfers:
    """On a stream of their own beside the device's computation, ordered by events, through reused host buffers."""

    def __init__(self, device: torch.device, host: HostMemory, *, buffers: int) -> None:
        self._device, self._host = device, host
        self._stream = torch.Stream(device)
        self._incoming = [_Buffer() for _ in range(buffers)]
        self._outgoing = [_Buffer(), _Buffer()]

    def fetch(self, source: Tensor) -> Callable[[], Tensor]:
        buffer = self._next(self._incoming)
        staged = buffer.of(source.numel(), source.dtype, self._host)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            staged.copy_(source, non_blocking=True)
            buffer.event = self._stream.record_event()
        source.record_stream(self._stream)

        def wait() -> Tensor:
            buffer.wait()
            return staged

        return wait

    def store(self, source: Tensor, destination: Tensor) -> None:
        if destination.device.type != self._device.type:
            destination.copy_(source)
            return
        buffer = self._next(self._outgoing)
        buffer.wait()
        staged = buffer.of(source.numel(), destination.dtype, self._host)
        staged.copy_(source)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            destination.copy_(staged, non_blocking=True)
            buffer.event = self._stream.record_event()
        torch.accelerator.current_stream(self._device).wait_event(buffer.event)

    @staticmethod
    def _next(buffers: list["_Buffer"]) -> "_Buffer":
        buffers.append(buffers.pop(0))
        return buffers[-1]


class _Buffer:
    """A host buffer that grows to the largest request, and the event after which it may be touched."""

    def __init__(self) -> None:
        self.event: torch.Event | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, numel: int, dtype: torch.dtype, host: HostMemory) -> Tensor:
        needed = numel * dtype.itemsize
        if self._bytes.numel() < needed:
            host.bytes -= self._bytes.numel()
            self._bytes = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is taken
            self._bytes = host.empty(needed, torch.uint8)
        return self._bytes[:needed].view(dtype)

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
            self.event = None
