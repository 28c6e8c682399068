"""Calibration of one accelerator: soon done, beyond its caches, and with what the host costs."""

import time

import pytest
import torch
from torch.nn import functional as F

from engine.calibrate import _cold_bytes, _rate, _usable_bytes, calibrate, copy_bytes_per_second
from engine.profile import HardwareProfile
from engine.ranks import RankContext

SECONDS = 10


@pytest.fixture(scope="module")
def calibrated() -> tuple[HardwareProfile, float]:
    """The profile, and how long it took with the device's libraries loaded, as in a worker that has warmed up."""
    device = torch.accelerator.current_accelerator(check_available=True)
    square = torch.ones(64, 64, device=device)
    F.conv2d(torch.mm(square, square).view(1, 1, 64, 64), square[:3, :3].reshape(1, 1, 3, 3))
    torch.accelerator.synchronize()
    begun = time.perf_counter()
    profile = calibrate(RankContext(rank=0, world_size=1, device=device, host_devices=2))
    return profile, time.perf_counter() - begun


def test_it_is_done_within_ten_seconds(calibrated: tuple[HardwareProfile, float]) -> None:
    assert calibrated[1] < SECONDS


def test_the_host_s_rates_are_measured(calibrated: tuple[HardwareProfile, float], device: torch.device) -> None:
    profile, _ = calibrated
    assert 1e9 < (profile.host_bytes_per_second or 0) < profile.copy_bytes_per_second
    assert 1e9 < (profile.host_update_bytes_per_second or 0) < (profile.update_bytes_per_second or 0)


def test_copies_are_the_memory_s_and_not_a_cache_s(device: torch.device) -> None:
    source = torch.ones(2**28, device=device)
    target = torch.empty_like(source)
    large = _rate(lambda: target.copy_(source), device, 0.3, work=float(source.nbytes))
    assert copy_bytes_per_second(device) == pytest.approx(large, rel=0.15)


def test_weights_of_products_do_not_fit_into_the_cache(device: torch.device) -> None:
    properties = torch.get_device_module(device).get_device_properties(device)
    assert _cold_bytes(device) >= 2 * getattr(properties, "L2_cache_size", 0)


def test_small_operations_are_not_timed_with_the_wait_for_each(device: torch.device) -> None:
    value = torch.zeros(1, device=device)
    queued = _rate(lambda: value.add_(1.0), device, 0.1, work=1.0)
    waited = []
    for _ in range(100):
        begun = time.perf_counter()
        value.add_(1.0)
        torch.accelerator.synchronize(device)
        waited.append(time.perf_counter() - begun)
    assert 1 / queued < 0.7 * sorted(waited)[50]


def test_a_convolution_of_fp32_does_not_exceed_the_peak(calibrated: tuple[HardwareProfile, float],
                                                        device: torch.device) -> None:
    """It may use shorter products than matrix products do."""
    values, weight = torch.randn(16, 256, 28, 28, device=device), torch.randn(256, 256, 3, 3, device=device)
    rate = _rate(lambda: F.conv2d(values, weight, padding=1), device, 0.1, work=2.0 * 9 * 16 * 28**2 * 256**2)
    assert rate < 1.1 * calibrated[0].matmul_flops_per_second["fp32"]


def test_memory_is_what_is_free(calibrated: tuple[HardwareProfile, float], device: torch.device) -> None:
    free, total = torch.accelerator.get_memory_info(device)
    assert 0.5 * free < calibrated[0].memory_bytes < total
    before = _usable_bytes(device)
    held = torch.empty(2**30, dtype=torch.uint8, device=device)
    assert before - _usable_bytes(device) == pytest.approx(held.nbytes, rel=0.05)
    del held
    assert _usable_bytes(device) == pytest.approx(before, rel=0.01)
