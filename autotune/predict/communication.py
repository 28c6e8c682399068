"""How long a collective takes in a group of ranks, from where the ranks are."""

import math
from dataclasses import dataclass
from typing import Protocol

from engine.profile import Collective, HardwareProfile
from engine.values import Precision


class Group(Protocol):
    """Ranks that hold the same part of the model; sizes are bytes of whole tensors.

    Attributes:
        by_computing: collectives are copies that the ranks make themselves, so that computing hides none of them.
        reads_in_place: ranks read each other's parameters where they lie.
    """

    @property
    def by_computing(self) -> bool: ...
    @property
    def reads_in_place(self) -> bool: ...
    def allreduce(self, size: float, *, pieces: int = 1) -> float: ...
    def reduce(self, size: float, *, pieces: int = 1) -> float: ...
    def gather(self, size: float, *, pieces: int = 1) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Collectives as measured among these ranks."""

    all_reduce: Collective
    reduce_scatter: Collective
    all_gather: Collective
    by_computing: bool
    reads_in_place: bool

    def allreduce(self, size: float, *, pieces: int = 1) -> float:
        return _seconds(self.all_reduce, size, pieces)

    def reduce(self, size: float, *, pieces: int = 1) -> float:
        return _seconds(self.reduce_scatter, size, pieces)

    def gather(self, size: float, *, pieces: int = 1) -> float:
        return _seconds(self.all_gather, size, pieces)


def _seconds(collective: Collective, size: float, pieces: int) -> float:
    return size / collective.bytes_per_second + pieces * collective.latency_seconds


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
    by_computing: bool = False
    reads_in_place: bool = False

    def allreduce(self, size: float, *, pieces: int = 1) -> float:
        """Seconds to sum `size` bytes, in so many collectives."""
        return 2 * self._share * size / self.bytes_per_second + pieces * self.latency_seconds

    def reduce(self, size: float, *, pieces: int = 1) -> float:
        """Seconds to reduce and scatter, as long as to gather them."""
        return self.gather(size, pieces=pieces)

    def gather(self, size: float, *, pieces: int = 1) -> float:
        """Seconds to gather `size` bytes in all: half of an all-reduce's traffic."""
        return self._share * size / self.bytes_per_second + pieces * self.latency_seconds

    def send(self, size: float) -> float:
        """Seconds to send `size` bytes to the next rank."""
        return size / self.bytes_per_second + self.latency_seconds

    @property
    def _share(self) -> float:
        return (self.ranks - 1) / self.ranks


def data_group(hardware: HardwareProfile, *, ranks: int, stride: int, precision: Precision) -> Group:
    """The group of every `stride`-th device, which sends gradients in this precision: as calibrated, if it was."""
    gather = hardware.all_gather
    if gather is None or ranks != hardware.world_size or precision not in hardware.reduce_scatter:
        return ring(hardware, ranks=ranks, stride=stride)
    return Calibrated(all_reduce=hardware.all_reduce[precision], reduce_scatter=hardware.reduce_scatter[precision],
                      all_gather=gather, by_computing=hardware.device_type == "cpu",
                      reads_in_place=reads_in_place(hardware))


def reads_in_place(hardware: HardwareProfile) -> bool:
    """Whether ranks read each other's memory where it lies."""
    return hardware.device_type == "cpu" if hardware.shares_memory is None else hardware.shares_memory


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
