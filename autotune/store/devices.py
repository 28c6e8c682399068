"""Hosts, their devices, and who holds them."""

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import delete, or_, select, update

from autotune.domain.hardware import Device, DeviceLease, Host
from autotune.store.base import Repository
from autotune.store.tables import device_leases, hosts


class HostRepository(Repository):
    """Machines whose schedulers offer devices."""

    def register(self, host: str, *, device_type: str, device_name: str, device_count: int, owner: str,
                 device_indices: Sequence[int] | None = None) -> Host:
        """Report a host, or that it is still there.

        Args:
            device_indices: of its devices; counted from 0 where not given.
        """
        indices = tuple(range(device_count) if device_indices is None else device_indices)
        assert len(indices) == device_count, (device_count, indices)
        found = Host(host=host, device_type=device_type, device_name=device_name, device_count=device_count,
                     device_indices=indices, owner=owner, last_seen_at=self._clock())
        self._upsert(hosts, dict(found))
        return found

    def list(self) -> tuple[Host, ...]:
        """All hosts ever seen, by name; `last_seen_at` tells which are there."""
        rows = self._connection.execute(select(hosts).order_by(hosts.c.host, hosts.c.device_type))
        return tuple(Host.model_validate(dict(row._mapping)) for row in rows)


class DeviceLeaseRepository(Repository):
    """Devices in use. A device is free when no lease that has not expired names it; there is no other count."""

    def acquire(self, devices: Sequence[Device], *, study_id: str, epoch: int, seconds: float) -> bool:
        """Take all of the devices, or none.

        A lease of the same study under an older epoch gives way: that scheduler has lost the study.

        Returns:
            Whether they were taken.
        """
        now = self._clock()
        gives_way = or_(device_leases.c.expires_at < now,
                        (device_leases.c.study_id == study_id) & (device_leases.c.epoch < epoch))
        savepoint = self._connection.begin_nested()
        for device in sorted(devices, key=lambda device: (device.host, device.device_type, device.index)):
            taken = self._upsert(device_leases, {
                "host": device.host, "device_type": device.device_type, "device_index": device.index,
                "study_id": study_id, "epoch": epoch, "expires_at": now + timedelta(seconds=seconds)}, where=gives_way)
            if not taken:
                savepoint.rollback()
                return False
        savepoint.commit()
        return True

    def renew(self, study_id: str, epoch: int, *, seconds: float) -> int:
        """Keep a study's devices for `seconds` more.

        Returns:
            How many it still holds; fewer than were acquired means that others were lost.
        """
        return self._connection.execute(
            update(device_leases).where(device_leases.c.study_id == study_id, device_leases.c.epoch == epoch)
            .values(expires_at=self._clock() + timedelta(seconds=seconds))).rowcount

    def release(self, study_id: str, epoch: int | None = None) -> int:
        """Free a study's devices, those of one epoch or all.

        Returns:
            How many there were.
        """
        statement = delete(device_leases).where(device_leases.c.study_id == study_id)
        if epoch is not None:
            statement = statement.where(device_leases.c.epoch == epoch)
        return self._connection.execute(statement).rowcount

    def live(self) -> tuple[DeviceLease, ...]:
        """Leases that have not expired, by device."""
        rows = self._connection.execute(
            select(device_leases).where(device_leases.c.expires_at >= self._clock())
            .order_by(device_leases.c.host, device_leases.c.device_type, device_leases.c.device_index))
        return tuple(
            DeviceLease(device=Device(host=row.host, device_type=row.device_type, index=row.device_index),
                        study_id=row.study_id, epoch=row.epoch, expires_at=row.expires_at) for row in rows)
