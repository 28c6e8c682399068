"""Which devices a host has, found without torch."""

import os
from pathlib import Path

import pytest

from autotune.domain.errors import LaunchError
from autotune.scheduler.launcher import LocalLauncher, devices
from autotune.scheduler.launcher.devices import find_devices, threads_per_rank


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with three graphics cards."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H100\\nNVIDIA H100\\nNVIDIA A100\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_core_is_a_device() -> None:
    found = find_devices("cpu")
    assert found.device_type == "cpu"
    assert set(found.indices) <= os.sched_getaffinity(0)
    assert found.device_name
    launcher = LocalLauncher(host="here", device_type="cpu")
    assert [device.index for device in launcher.devices()] == list(found.indices)
    assert {device.host for device in launcher.devices()} == {"here"}


def test_cores_that_this_process_may_not_use_are_no_devices() -> None:
    allowed = os.sched_getaffinity(0)
    one = max(allowed)
    os.sched_setaffinity(0, {one})
    try:
        assert find_devices("cpu").indices == (one,)
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_containers_quota_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_cpu_quota", lambda: 1.5)
    assert len(find_devices("cpu").indices) == 1


@pytest.mark.usefixtures("nvidia_smi")
def test_accelerators_come_before_cores() -> None:
    assert find_devices("auto") == ("cuda", "NVIDIA H100", (0, 1, 2))
    assert find_devices("cpu").device_type == "cpu"


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize(("visible", "found"), [
    ("2", ("cuda", "NVIDIA A100", (0,))), ("1,0", ("cuda", "NVIDIA H100", (0, 1)))])
def test_hidden_accelerators_do_not_count(
    visible: str, found: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_devices("auto") == found


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize("visible", ["", "-1"])
def test_asking_for_what_is_not_there_says_so(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_devices("auto").device_type == "cpu"
    with pytest.raises(LaunchError, match="no CUDA device found"):
        LocalLauncher(device_type="cuda")


def test_threads_are_one_per_core_or_a_share_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_cores", lambda: tuple(range(16)))
    assert threads_per_rank("cpu", 16) == 1
    assert threads_per_rank("cuda", 4) == 4
    assert threads_per_rank("cuda", 32) == 1
