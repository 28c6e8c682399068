"""Messages between ranks through sockets."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from engine.transports.pairwise import Message


class SocketCarrier:
    """gloo's send and receive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._tag = 0

    def staged(self, values: Tensor) -> Tensor:
        return values.clone()

    def sends_in_place(self, values: Tensor) -> bool:
        return False

    def exchange(self, to_peers: Sequence[Tensor], destinations: Sequence[Tensor] | None = None) -> list[Message]:
        self._tag = (self._tag + 1) % 2**24
        messages: list[Message] = []
        for step, sent in enumerate(to_peers):
            peer, source = (self._rank + step + 1) % self._size, (self._rank - step - 1) % self._size
            received = torch.empty_like(sent) if destinations is None else destinations[step]
            sending = dist.isend(sent, group=self._group, group_dst=peer, tag=self._tag)
            receiving = dist.irecv(received, group=self._group, group_src=source, tag=self._tag)
            messages.append(_SocketMessage(received, sending, receiving))
        return messages

    def release(self, memory: Tensor, *, keep: bool = False) -> None:
        pass


class _SocketMessage:
    """Also keeps what is sent the other way until it was."""

    def __init__(self, received: Tensor, *works: dist.Work | None) -> None:
        self._received, self._works = received, works

    def wait(self) -> Tensor:
        for work in self._works:
            if work is not None:
                work.wait()
        return self._received
