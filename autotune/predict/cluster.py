"""Clusters described as data, for predictions where there is no hardware: published figures, with their sources."""

import hashlib
from importlib import resources

from pydantic import Field

from engine.profile import HardwareProfile, Links
from engine.values import Count, Precision, Real, Value

_FOLDER = resources.files("autotune.predict") / "hardware"


class Cluster(Value):
    """Equal devices in equal nodes.

    Attributes:
        host_memory_bytes: of one node.
        matmul_peak_flops_per_second: of the data sheet; nothing can be faster.
        copy_bytes_per_second: within a device's memory; each byte is read once and written once.
        sources: by field, where its figures are from.
    """

    name: str
    device_name: str
    memory_bytes: Count
    host_memory_bytes: Count
    matmul_flops_per_second: dict[Precision, Real] = Field(description="what large products reach")
    matmul_peak_flops_per_second: dict[Precision, Real]
    copy_bytes_per_second: Real
    host_bytes_per_second: Real
    links: Links
    sources: dict[str, str] = Field(default_factory=dict)

    def hardware(self, devices: int) -> HardwareProfile:
        """So many of its devices, filling node by node, as if they had been calibrated."""
        per_node = min(devices, self.links.devices_per_node)
        described = f"{self.model_dump_json()}\n{devices}"
        return HardwareProfile(
            fingerprint=hashlib.sha256(described.encode()).hexdigest()[:32], device_type="cuda",
            device_name=self.device_name, world_size=devices, memory_bytes=self.memory_bytes,
            host_memory_bytes=self.host_memory_bytes * devices // per_node,
            precisions=tuple(self.matmul_flops_per_second), matmul_flops_per_second=self.matmul_flops_per_second,
            copy_bytes_per_second=self.copy_bytes_per_second, allreduce_bytes_per_second=None,
            allreduce_latency_seconds=None, software={}, links=self.links,
            host_bytes_per_second=self.host_bytes_per_second)


def bundled_clusters() -> tuple[str, ...]:
    """Names that `bundled_cluster` takes."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _FOLDER.iterdir()
                        if entry.name.endswith(".json")))


def bundled_cluster(name: str) -> Cluster:
    """A published cluster.

    Raises:
        KeyError: there is none of this name.
    """
    if name not in bundled_clusters():
        raise KeyError(f"no bundled cluster {name}; there are {', '.join(bundled_clusters())}")
    return Cluster.model_validate_json((_FOLDER / f"{name}.json").read_text())
