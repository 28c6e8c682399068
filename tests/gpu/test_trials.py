"""Trials on one accelerator, through the launcher, measured by the allocator."""

import asyncio

import torch

from autotune.scheduler.launcher import LocalLauncher
from engine.config import OptimizerConfig, TrainConfig
from engine.report import CalibrateReport, CalibrateRequest, Outcome, TrialReport, TrialRequest
from engine.spec import GptSpec
from tests.support.trials import QUICK

MODEL = GptSpec(kind="gpt", layers=4, hidden=512, heads=8, vocab=8192, sequence_length=256)


def request(**config: object) -> TrialRequest:
    parsed = TrainConfig.model_validate({"micro_batch_size": 4, "precision": "bf16", **config})
    return TrialRequest(model=MODEL, optimizer=OptimizerConfig(), config=parsed, policy=QUICK,
                        global_batch_size=parsed.global_batch_size(1))


async def _run_all(requests: list[TrialRequest | CalibrateRequest]) -> list[object]:
    launcher = LocalLauncher(device_type=torch.accelerator.current_accelerator().type)
    reports: list[object] = []
    group = None
    for each in requests:
        if group is None or not group.healthy:
            if group is not None:
                await group.close()
            group = await launcher.start(launcher.devices()[:1])
        reports.append(await group.run(each, deadline_seconds=180))
    if group is not None:
        await group.close()
    return reports


def run_all(*requests: TrialRequest | CalibrateRequest) -> list[object]:
    return asyncio.run(_run_all(list(requests)))


def test_a_trial_measures_allocator_bytes_and_memory_falls_with_offload() -> None:
    plain, offloaded = run_all(request(zero_stage=2), request(zero_stage=2, offload_optimizer_ratio=1.0))
    assert isinstance(plain, TrialReport)
    assert isinstance(offloaded, TrialReport)
    assert (plain.outcome, offloaded.outcome) == (Outcome.OK, Outcome.OK), (plain.detail, offloaded.detail)
    assert plain.measurement is not None
    assert offloaded.measurement is not None
    state = plain.measurement.state_bytes
    assert plain.measurement.peak_device_bytes > state.parameters + state.optimizer
    assert plain.measurement.peak_host_bytes == 0
    assert offloaded.measurement.peak_host_bytes >= state.optimizer
    assert offloaded.measurement.peak_device_bytes < plain.measurement.peak_device_bytes


def test_running_out_of_device_memory_is_an_outcome_and_the_next_trial_runs() -> None:
    vast, small = run_all(request(micro_batch_size=200_000), request())
    assert isinstance(vast, TrialReport)
    assert isinstance(small, TrialReport)
    assert vast.outcome is Outcome.OOM_DEVICE, vast.detail
    assert small.outcome is Outcome.OK, small.detail


def test_a_memory_limit_holds_on_the_device() -> None:
    free, = run_all(request())
    assert isinstance(free, TrialReport)
    assert free.measurement is not None
    limited, = run_all(request().model_copy(
        update={"memory_limit_bytes": free.measurement.peak_device_bytes // 2}))
    assert isinstance(limited, TrialReport)
    assert limited.outcome is Outcome.OOM_DEVICE


def test_calibration_finds_the_device() -> None:
    report, = run_all(CalibrateRequest())
    assert isinstance(report, CalibrateReport)
    assert report.profile.device_type == torch.accelerator.current_accelerator().type
    assert report.profile.matmul_flops_per_second["bf16"] > report.profile.matmul_flops_per_second["fp32"] > 1e11
