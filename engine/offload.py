"""Host memory that the engine holds for a device, and the transfers between the two.

With the CPU as device both are the same RAM; host tensors are separate tensors all the same, and counted apart.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class HostMemory:
    """Allocates host tensors and counts them.

    Attributes:
        bytes: allocated by `empty`.
        peak_bytes: the most `bytes` has been, together with what `note` was told.
        can_pin: whether page-locked memory is to be had; False after the first refusal, and on CPU-only machines.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0
        self.peak_bytes = 0
        self.can_pin = device.type != "cpu"

    def empty(self, numel: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        """A new (numel,) tensor on the host.

        Args:
            pinned: page-locked where the machine allows it, for what transfers read or write. Such memory is scarce.
        """
        tensor = self._pinned(numel, dtype) if pinned and self.can_pin else torch.empty(numel, dtype=dtype)
        self.bytes += tensor.nbytes
        self.note()
        return tensor

    def note(self, also: int = 0) -> None:
        """Record for the peak that `also` bytes are held on the host beside those allocated here."""
        self.peak_bytes = max(self.peak_bytes, self.bytes + also)

    def _pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        try:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        except RuntimeError:  # limits on locked memory, WSL, ...: slower transfers, nothing else
            self.can_pin = False
            return torch.empty(numel, dtype=dtype)


class Transfers(Protocol):
    """Copies between device and host."""

    def begin(self) -> None:
        """Transfers from now on come after all that the device was given so far."""

    def fetch(self, source: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Start copying a device tensor (n,) to the host, as it was at the last `begin`.

        Returns:
            Waits and gives the host tensor, converted; good until `in_use` others were waited for.
        """

    def store(self, source: Tensor, destination: Tensor) -> None:
        """Copy a host tensor to a device tensor, converted; the device's current stream sees it afterwards.

        The destination is used for nothing else since the last `begin`. Where parameters are offloaded too, it is on
        the host.
        """


def make_transfers(device: torch.device, host: HostMemory, *, in_use: int, upcoming: int) -> Transfers:
    """Transfers of a device.

    Args:
        in_use: fetched tensors that are used at once, at most.
        upcoming: those that are fetched meanwhile.
    """
    if device.type == "cpu":
        return DirectTransfers(host, in_use=in_use)
    return StreamedTransfers(device, host, in_use=in_use, upcoming=upcoming)


class DirectTransfers:
    """The device is the host."""

    def __init__(self, host: HostMemory, *, in_use: int) -> None:
        self._converted = _Buffers(host, in_use, pinned=False)

    def begin(self) -> None:
        pass

    def fetch(self, source: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        return lambda: self._converted.converted(source, dtype)

    def store(self, source: Tensor, destination: Tensor) -> None:
        destination.copy_(source)


class StreamedTransfers:
    """On a stream for each direction beside the device's computation, ordered by events, through reused host buffers.

    Neither direction waits for the other, nor for what the device was given after `begin`.
    """

    def __init__(self, device: torch.device, host: HostMemory, *, in_use: int, upcoming: int) -> None:
        self._device = device
        self._to_host, self._to_device = torch.Stream(device), torch.Stream(device)
        self._incoming = _Buffers(host, in_use + upcoming, pinned=True)
        self._converted = _Buffers(host, in_use, pinned=False)
        self._outgoing = _Buffers(host, 2, pinned=True)

    def begin(self) -> None:
        begun = torch.accelerator.current_stream(self._device).record_event()
        self._to_host.wait_event(begun)
        self._to_device.wait_event(begun)

    def fetch(self, source: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
        buffer = self._incoming.next()
        staged = buffer.of(source.numel(), source.dtype)
        with self._to_host:
            staged.copy_(source, non_blocking=True)
            buffer.event = self._to_host.record_event()
        source.record_stream(self._to_host)

        def wait() -> Tensor:
            buffer.wait()
            return self._converted.converted(staged, dtype)

        return wait

    def store(self, source: Tensor, destination: Tensor) -> None:
        if destination.device.type != self._device.type:
            destination.copy_(source)
            return
        buffer = self._outgoing.next()
        buffer.wait()
        staged = buffer.of(source.numel(), destination.dtype)
        staged.copy_(source)
        with self._to_device:
            destination.copy_(staged, non_blocking=True)
            buffer.event = self._to_device.record_event()
        torch.accelerator.current_stream(self._device).wait_event(buffer.event)


class _Buffers:
    """Host buffers that are used in turn."""

    def __init__(self, host: HostMemory, count: int, *, pinned: bool) -> None:
        self._buffers = deque(_Buffer(host, pinned=pinned) for _ in range(count))

    def next(self) -> "_Buffer":
        self._buffers.rotate(-1)
        return self._buffers[-1]

    def converted(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """A host tensor itself where it has the dtype, else its values in the next buffer."""
        return source if source.dtype == dtype else self.next().of(source.numel(), dtype).copy_(source)


class _Buffer:
    """A host buffer that grows to the largest request, and the event after which it may be touched."""

    def __init__(self, host: HostMemory, *, pinned: bool) -> None:
        self.event: torch.Event | None = None
        self._host, self._is_pinned = host, pinned
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, numel: int, dtype: torch.dtype) -> Tensor:
        needed = numel * dtype.itemsize
        if self._bytes.numel() < needed:
            self._host.bytes -= self._bytes.numel()
            self._bytes = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is taken
            self._bytes = self._host.empty(needed, torch.uint8, pinned=self._is_pinned)
        return self._bytes[:needed].view(dtype)

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
            self.event = None
