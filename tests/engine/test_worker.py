"""The worker as a process: its life, its memory over many trials, and what disturbs a measurement."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.config import TrainConfig
from engine.errors import DeviceMemoryLimitError, HostMemoryLimitError, RankFailedError
from engine.failure import describe, is_echo, outcome_of
from engine.process import CpuTimes, cpu_times, foreign_share, is_contended, resident_memory
from engine.report import MeasurePolicy, Outcome, TrialReport
from engine.wire import WorkerSettings
from tests.support import tasks
from tests.support.trials import TINY_GPT, group, run, run_once, trial


def test_a_worker_whose_parent_is_gone_leaves_at_once_without_loading_torch() -> None:
    settings = WorkerSettings(rank=0, world_size=1, device_type="cpu", device_index=0, parent_pid=1 if os.getpid() != 1
                              else 2, control_fd=0, rendezvous_file="unused", threads=1, host_devices=1)
    result = subprocess.run([sys.executable, "-X", "importtime", "-m", "engine.worker", settings.model_dump_json()],
                            capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert " torch" not in result.stderr


def test_a_step_that_sleeps_half_a_second_gives_eight_samples_a_second() -> None:
    """Two ranks, two samples each."""
    policy = MeasurePolicy(max_warmup_steps=1, min_steps=3, max_steps=3)
    for attempt in range(3):
        request = trial(tasks.spec("sleeps", then=0.5, tokens_per_sample=10), ranks=2, policy=policy)
        report = run(run_once(request, ranks=2))
        assert report.measurement is not None
        measurement = report.measurement
        assert measurement.tokens_per_second == pytest.approx(10 * measurement.samples_per_second, rel=1e-9)
        assert measurement.samples_per_second <= 8.0
        if measurement.samples_per_second == pytest.approx(8.0, rel=0.05):
            return
        assert attempt < 2, f"{measurement.samples_per_second} samples/s: {measurement.step_seconds}"


def test_twenty_trials_do_not_grow_memory() -> None:
    """A model of 200 MB of weights: 20 peaks within 2 %, and the worker and this process are no larger afterwards."""
    peaks, resident = [], []
    own_before = resident_memory().now
    policy = MeasurePolicy(max_warmup_steps=1, min_steps=2, max_steps=2)

    async def scenario() -> None:
        async with group(1) as started:
            for _ in range(20):
                request = trial(tasks.spec("toy", width=2600, depth=8), micro=1, policy=policy)
                report = await started.run(request, deadline_seconds=120)
                assert isinstance(report, TrialReport)
                assert report.measurement is not None
                assert started.healthy
                peaks.append(report.measurement.peak_device_bytes)
                resident.append(resident_memory(started.pids[0]).now)

    run(scenario())
    weights = 8 * (2600 * 2600 + 2600) * 4
    assert max(peaks) <= 1.02 * min(peaks)
    assert 4 * weights < min(peaks) < 6 * weights
    assert max(resident) - resident[0] < 20 * 2**20
    assert resident_memory().now - own_before < 20 * 2**20


def test_ranks_agree_on_losses_that_do_not_depend_on_their_number() -> None:
    one = run(run_once(trial(TINY_GPT, config=TrainConfig(micro_batch_size=4))))
    two = run(run_once(trial(TINY_GPT, ranks=2, config=TrainConfig(micro_batch_size=2, zero_stage=3)), ranks=2))
    assert one.measurement is not None
    assert two.measurement is not None
    assert two.measurement.losses == pytest.approx(one.measurement.losses, abs=1e-5)


def test_offloaded_states_count_as_host_bytes() -> None:
    def config(ratio: float) -> TrainConfig:
        return TrainConfig(micro_batch_size=1, zero_stage=1, offload_optimizer_ratio=ratio)

    toy = tasks.spec("toy", width=1500, depth=4)
    weights = 4 * (1500 * 1500 + 1500) * 4
    kept, offloaded = (run(run_once(trial(toy, config=config(ratio)))).measurement for ratio in (0.0, 1.0))
    assert kept is not None
    assert offloaded is not None
    assert kept.peak_host_bytes == 0
    assert offloaded.peak_host_bytes >= 2 * weights
    assert offloaded.peak_device_bytes < kept.peak_device_bytes - weights


@contextmanager
def _load_on(core: int) -> Iterator[None]:
    program = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            yield
        finally:
            process.kill()


def test_a_measurement_beside_an_outside_load_is_marked() -> None:
    async def scenario() -> None:
        async with group(1) as started:
            core = started.devices[0].index
            policy = MeasurePolicy(max_warmup_steps=1, min_steps=20, max_steps=20)
            with _load_on(core):
                time.sleep(0.2)
                config = TrainConfig(micro_batch_size=16, gradient_accumulation_steps=4)
                report = await started.run(trial(TINY_GPT, config=config, policy=policy), deadline_seconds=120)
            assert isinstance(report, TrialReport)
            assert report.measurement is not None
            assert report.measurement.contended

    run(scenario())


@pytest.mark.parametrize(("own", "busy", "wall", "share"), [
    (1.0, 1.0, 1.0, 0.0), (0.5, 1.0, 1.0, 0.5), (0.2, 0.2, 1.0, 0.0), (0.9, 0.85, 1.0, 0.0), (0.0, 2.0, 1.0, 1.0)])
def test_the_foreign_share_is_what_others_ran(own: float, busy: float, wall: float, share: float) -> None:
    before, after = CpuTimes(10.0, 20.0, 30.0), CpuTimes(10.0 + own, 20.0 + busy, 30.0 + wall)
    assert foreign_share(before, after) == pytest.approx(share)
    assert is_contended(before, after) is (share >= 0.1)


def test_a_short_blip_or_an_unknown_core_is_no_contention() -> None:
    assert not is_contended(CpuTimes(0.0, 0.0, 0.0), CpuTimes(0.06, 0.1, 0.1))  # 0.04 s are within the clock's ticks
    assert foreign_share(CpuTimes(0.0, None, 0.0), CpuTimes(0.0, None, 1.0)) == 0.0
    assert cpu_times(None).core_busy is None
    assert cpu_times(min(os.sched_getaffinity(0))).core_busy is not None


@pytest.mark.parametrize(("error", "on_cpu", "on_cuda"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), Outcome.OOM_DEVICE, Outcome.OOM_DEVICE),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
     Outcome.OOM_DEVICE, Outcome.OOM_HOST),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
     Outcome.OOM_DEVICE, Outcome.OOM_DEVICE),
    (RuntimeError("CUDA error: out of memory"), Outcome.OOM_DEVICE, Outcome.OOM_DEVICE),
    (MemoryError(), Outcome.OOM_DEVICE, Outcome.OOM_HOST),
    (DeviceMemoryLimitError("over"), Outcome.OOM_DEVICE, Outcome.OOM_DEVICE),
    (HostMemoryLimitError("over"), Outcome.OOM_HOST, Outcome.OOM_HOST),
    (FloatingPointError("gradients were not finite in 100 steps"), Outcome.NON_FINITE, Outcome.NON_FINITE),
    (ValueError("out of memory of bad arguments"), Outcome.CRASHED, Outcome.CRASHED),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), Outcome.CRASHED, Outcome.CRASHED),
    (SystemExit(3), Outcome.CRASHED, Outcome.CRASHED),
])
def test_what_an_exception_means(error: BaseException, on_cpu: Outcome, on_cuda: Outcome) -> None:
    assert (outcome_of(error, "cpu"), outcome_of(error, "cuda")) == (on_cpu, on_cuda)


@pytest.mark.parametrize(("error", "echo"), [
    (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:1"), True),
    (RuntimeError("Read error [127.0.0.1]:9: Connection reset by peer"), True),
    (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
    (RuntimeError("[unbound_buffer.cc:81] Timed out waiting 10000ms for recv operation to complete"), True),
    (RankFailedError("rank 1: boom"), True),
    (ValueError("boom"), False),
    (RuntimeError("expected scalar type Float"), False),
])
def test_an_echo_is_told_from_a_cause(error: BaseException, echo: bool) -> None:
    assert is_echo(error) is echo


def test_a_description_names_rank_type_and_text() -> None:
    assert describe(ValueError(" boom\n"), 3) == "rank 3: ValueError: boom"
    assert describe(MemoryError(), 0) == "rank 0: MemoryError"
    assert describe(ValueError("half \ud800"), 0) == "rank 0: ValueError: half \\ud800"


def test_a_memory_limit_far_exceeded_within_one_step_ends_the_step() -> None:
    request: Any = trial(tasks.spec("hoards", megabytes_per_second=1000), memory_limit_bytes=50 * 2**20)
    report = run(run_once(request, deadline_seconds=60))
    assert report.outcome is Outcome.OOM_DEVICE
    assert report.failed_step == 1
