"""Devices, who holds them, and what calibration measured."""

from fastapi import APIRouter

from autotune.service.queries import HardwareView
from autotune.service.state import QueriesDep

router = APIRouter(prefix="/hardware", tags=["hardware"])


@router.get("", summary="Devices and who holds them")
def get_hardware(queries: QueriesDep) -> HardwareView:
    """Hosts whose schedulers reported, their devices with the studies that hold them, and calibrations."""
    return queries.hardware()
