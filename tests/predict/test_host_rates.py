"""What is offloaded takes the time that the host was measured to need, or that a cluster's description tells."""

import pytest

from autotune.predict import predict
from autotune.predict.cluster import bundled_cluster
from engine.config import OptimizerConfig, TrainConfig
from engine.profile import HardwareProfile
from tests.search.support import hardware_profile, model_profile

OFFLOADED = TrainConfig(zero_stage=2, offload_optimizer_ratio=1.0)


def seconds(hardware: HardwareProfile) -> dict[str, float]:
    return predict(model_profile(), hardware, OptimizerConfig(), OFFLOADED).seconds


def test_a_host_s_update_takes_its_measured_rate() -> None:
    usual, same, slower = (
        seconds(hardware_profile(device_type="cuda", host_update_bytes_per_second=rate))["optimizer"]
        for rate in (None, 10e9, 5e9))
    traffic = 7 * 4 * model_profile().parameters / 2
    assert usual == same
    assert slower - usual == pytest.approx(traffic / 5e9 - traffic / 10e9, rel=1e-3)


def test_transfers_take_the_measured_rate_between_host_and_device() -> None:
    usual, same, slower = (
        seconds(hardware_profile(device_type="cuda", host_bytes_per_second=rate))["host_transfer"]
        for rate in (None, 10e9, 5e9))
    assert usual == same
    assert slower == pytest.approx(2 * usual)


def test_on_a_cpu_the_host_is_the_device() -> None:
    assert seconds(hardware_profile()) == seconds(hardware_profile(host_update_bytes_per_second=1.0))


def test_a_described_cluster_may_tell_its_host_s_rate() -> None:
    cluster = bundled_cluster("a100-80gb")
    assert cluster.hardware(8).host_update_bytes_per_second is None
    told = cluster.model_copy(update={"host_update_bytes_per_second": 4e10})
    assert told.hardware(8).host_update_bytes_per_second == 4e10
