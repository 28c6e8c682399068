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
