"""Devices and who holds them."""

from datetime import datetime

from engine.values import Value


class Device(Value):
    """One device of one host; on CPU a core."""

    host: str
    device_type: str
    index: int


class DeviceLease(Value):
    """A device held by a study until `expires_at`, unless renewed."""

    device: Device
    study_id: str
    epoch: int
    expires_at: datetime


class Host(Value):
    """A machine whose scheduler offers its devices.

    Attributes:
        device_indices: of its devices; on CPU the cores that the scheduler may use, which need not start at 0.
        owner: the scheduler process that reported last.
        last_seen_at: when it did; a host that has been silent for long is gone.
    """

    host: str
    device_type: str
    device_name: str
    device_count: int
    device_indices: tuple[int, ...]
    owner: str
    last_seen_at: datetime
