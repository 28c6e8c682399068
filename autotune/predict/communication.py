"""How long a collective takes in a group of ranks, from where the ranks are."""

import math
from dataclasses import dataclass

from engine.profile import HardwareProfile


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A group of ranks that pass pieces around.

    Attributes:
        bytes_per_second: what each rank sends at once with all others.
        latency_seconds: of one all-reduce, however small.
    """

    ranks: int
    bytes_per_second: float
    latency_seconds: float

    def allreduce(self, size: float, *, pieces: int = 1) -> float:
        """Seconds to sum `size` bytes, in so many collectives."""
        return 2 * self._share * size / self.bytes_per_second + pieces * self.latency_seconds

    def gather(self, size: float, *, pieces: int = 1) -> float:
        """Seconds to gather, or to reduce and scatter, `size` bytes in all: half of an all-reduce's traffic."""
        return self._share * size / self.bytes_per_second + pieces * self.latency_seconds

    def send(self, size: float) -> float:
        """Seconds to send `size` bytes to the next rank."""
        return size / self.bytes_per_second + self.latency_seconds

    @property
    def _share(self) -> float:
        return (self.ranks - 1) / self.ranks


def ring(hardware: HardwareProfile, *, ranks: int, stride: int) -> Ring:
    """The group of every `stride`-th of the devices, which are numbered node by node.

    Where nothing is known of the links, groups communicate as fast as measured over all devices, and where nothing was
    measured in no time. Between nodes, groups that run side by side share the network adapters.
    """
    links = hardware.links
    if links is None:
        if not hardware.allreduce_bytes_per_second:
            return Ring(ranks=ranks, bytes_per_second=math.inf, latency_seconds=0.0)
        share = (hardware.world_size - 1) / hardware.world_size
        return Ring(ranks=ranks, bytes_per_second=2 * share * hardware.allreduce_bytes_per_second,
                    latency_seconds=hardware.allreduce_latency_seconds or 0.0)
    doublings = math.ceil(math.log2(ranks))
    if ranks * stride <= links.devices_per_node:
        return Ring(ranks=ranks, bytes_per_second=links.intra_bytes_per_second,
                    latency_seconds=doublings * links.intra_latency_seconds)
    rate = min(links.inter_bytes_per_second / min(stride, links.devices_per_node), links.intra_bytes_per_second)
    return Ring(ranks=ranks, bytes_per_second=rate, latency_seconds=doublings * links.inter_latency_seconds)
