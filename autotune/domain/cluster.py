"""A cluster described as data: what planning needs to know of hardware that is not here."""

import hashlib
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from engine.profile import HardwareProfile, Links
from engine.values import Count, Precision, Real, Value

Rate = Annotated[Real, Field(gt=0)]
"""Of bytes or operations, per second."""

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=120,
                                        pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


class ClusterLinks(Links):
    """`Links`, with the bounds that a description is held to."""

    devices_per_node: Count
    intra_bytes_per_second: Rate = Field(description="per device, between devices of a node")
    inter_bytes_per_second: Rate = Field(description="per node, through all of its network adapters together")
    intra_latency_seconds: Real = Field(ge=0, description="of a collective, for each doubling of its ranks")
    inter_latency_seconds: Real = Field(ge=0)


class Cluster(Value):
    """Equal devices in equal nodes.

    Attributes:
        memory_bytes: of one device, what the driver leaves of it.
        host_memory_bytes: of one node.
        matmul_peak_flops_per_second: of the data sheet; nothing can be faster.
        copy_bytes_per_second: within a device's memory; each byte is read once and written once.
        host_bytes_per_second: between a device and its host, in one direction.
        host_update_bytes_per_second: of AdamW on the host, for each device while the others' is under way; where it is
            not told, a usual rate is assumed.
        sources: by field, where its figures are from.
    """

    name: Text
    device_name: Text
    memory_bytes: Count
    host_memory_bytes: Count
    matmul_flops_per_second: dict[Precision, Rate] = Field(min_length=1, description="what large products reach")
    matmul_peak_flops_per_second: dict[Precision, Rate]
    copy_bytes_per_second: Rate
    host_bytes_per_second: Rate
    links: ClusterLinks
    host_update_bytes_per_second: Rate | None = None
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _stays_under_its_peak(self) -> Self:
        for precision, rate in self.matmul_flops_per_second.items():
            peak = self.matmul_peak_flops_per_second.get(precision)
            if peak is None:
                raise ValueError(f"matmul_peak_flops_per_second lacks {precision}: give the data sheet's figure for "
                                 "each precision of matmul_flops_per_second")
            if rate > peak:
                raise ValueError(f"matmul_flops_per_second of {precision}, {rate:g}, is above the peak {peak:g}: give "
                                 "what large products reach, usually 70 to 90 % of it")
        return self

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
            host_bytes_per_second=self.host_bytes_per_second,
            host_update_bytes_per_second=self.host_update_bytes_per_second)
