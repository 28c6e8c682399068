"""A trial measures what it says: the right steps, times, losses, bytes, and a step for every failure. One rank."""

import dataclasses
import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest
import torch

from engine.config import OptimizerConfig, TrainConfig
from engine.errors import BatchSizeError, DeviceMemoryLimitError
from engine.loop import LoopStep, TrainingLoop
from engine.memory import ResidentMeter, check_limit
from engine.ranks import RankContext
from engine.report import Measurement, MeasurePolicy, Outcome, TrialProgress, TrialReport, TrialRequest
from engine.spec import ALLOWED_TASKS_VARIABLE, GptSpec
from engine.tasks import build_task
from engine.trainer import Trainer
from engine.trial import SilentReporter, run_trial
from tests.support import tasks
from tests.support.trials import run, run_once

CONTEXT = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
GPT = GptSpec(kind="gpt", layers=2, hidden=64, heads=2, vocab=256, sequence_length=32)
MIB = 2**20


@pytest.fixture(autouse=True)
def _set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(ALLOWED_TASKS_VARIABLE, tasks.MODULE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _request(
    model: Any, *, policy: MeasurePolicy | None = None, limit: int | None = None, **config: Any
) -> TrialRequest:
    made = TrainConfig.model_validate({"micro_batch_size": 2, **config})
    return TrialRequest(model=model, optimizer=OptimizerConfig(), config=made, memory_limit_bytes=limit,
                        global_batch_size=made.global_batch_size(1),
                        policy=policy or MeasurePolicy(max_warmup_steps=2, min_steps=2, max_steps=2))


def _run(model: Any, *, deadline_seconds: float = math.inf, reporter: Any = None, **options: Any) -> TrialReport:
    report, _ = run_trial(_request(model, **options), CONTEXT, reporter or SilentReporter(),
                          deadline_seconds=deadline_seconds)
    return report


def _measured(model: Any, **options: Any) -> Measurement:
    report = _run(model, **options)
    assert report.outcome is Outcome.OK
    assert report.measurement is not None
    return report.measurement


class _Listener(SilentReporter):
    def __init__(self) -> None:
        self.heard: list[TrialProgress] = []

    def progress(self, progress: TrialProgress) -> None:
        self.heard.append(progress)


def test_warm_up_steps_are_reported_apart_and_do_not_count() -> None:
    """Two slow steps at first, then fast ones, beat steps that are always of middling speed."""
    policy = MeasurePolicy(max_warmup_steps=8, min_steps=10, max_steps=10)
    slow_start = _measured(tasks.spec("sleeps", first=[0.6, 0.6], then=0.01), policy=policy)
    middling = _measured(tasks.spec("sleeps", then=0.06), policy=policy)
    assert slow_start.tokens_per_second > middling.tokens_per_second
    assert slow_start.warmup_seconds[0] >= 0.6
    assert slow_start.warmup_seconds[1] >= 0.6
    assert min(slow_start.step_seconds) < 0.1
    assert len(slow_start.losses) == len(slow_start.warmup_seconds) + len(slow_start.step_seconds)


def test_the_steps_that_show_a_steady_pace_are_measured() -> None:
    """One watched and one slow step, then three that agree, and the two that are missing; phases are of those five."""
    policy = MeasurePolicy(max_warmup_steps=8, min_steps=5, max_steps=5, target_relative_interval=0.14)
    measurement = _measured(tasks.spec("sleeps", first=[0.05, 0.3], then=0.05), policy=policy)
    assert (len(measurement.warmup_seconds), len(measurement.step_seconds)) == (2, 5)
    assert measurement.warmup_seconds[1] >= 0.3
    assert 0.05 <= min(measurement.step_seconds) <= max(measurement.step_seconds) < 0.1
    assert measurement.phases.forward == pytest.approx(0.05, abs=0.01)
    assert len(measurement.losses) == 7


def test_a_step_that_takes_a_little_longer_is_warm_up_where_the_mean_would_show_it() -> None:
    task = tasks.spec("sleeps", first=[0.2, 0.22], then=0.2)
    policies = (MeasurePolicy(max_warmup_steps=8, min_steps=3, max_steps=3, target_relative_interval=interval)
                for interval in (0.05, 0.14))
    exact, rough = (_measured(task, policy=policy) for policy in policies)
    assert exact.warmup_seconds[1] >= 0.22
    assert (len(rough.warmup_seconds), len(rough.step_seconds)) == (1, 3)
    assert rough.step_seconds[0] >= 0.22


def test_no_more_steps_are_measured_than_are_wanted() -> None:
    policy = MeasurePolicy(max_warmup_steps=8, min_steps=2, max_steps=2)
    measurement = _measured(tasks.spec("sleeps", then=0.05), policy=policy)
    assert (len(measurement.warmup_seconds), len(measurement.step_seconds)) == (2, 2)


@pytest.mark.parametrize(("optimizer", "config", "watched"), [
    ("adamw", {}, 1), ("radam", {}, 2), ("adamw", {"zero_stage": 3}, 2),
    ("adamw", {"precision": "fp16", "initial_scale_power": 26, "hysteresis": 1}, None)])
def test_the_memory_of_steps_is_watched_until_one_has_needed_everything(
        optimizer: str, config: dict[str, Any], watched: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16 the first steps overflow, and need no memory for an update; with this seed no later one does."""
    heard = _Listener()
    rests: list[int] = []
    rest = ResidentMeter.rest

    def noted(meter: ResidentMeter) -> None:
        rests.append(len(heard.heard) - 1)
        rest(meter)

    monkeypatch.setattr(ResidentMeter, "rest", noted)
    policy = MeasurePolicy(max_warmup_steps=40, min_steps=2, max_steps=2, target_relative_interval=10)
    request = _request(GPT, policy=policy, **config).model_copy(update={
        "seed": 3, "optimizer": OptimizerConfig.model_validate({"name": optimizer})})
    report, _ = run_trial(request, CONTEXT, heard)
    assert report.measurement is not None
    skipped = report.measurement.skipped_steps
    assert (skipped > 1) == (watched is None)
    assert rests == [skipped + (watched or 1)]


def test_steps_that_compile_are_not_measured() -> None:
    policy = MeasurePolicy(max_warmup_steps=8, min_steps=6, max_steps=6)
    measurement = _measured(tasks.spec("compiles", steps=[0, 2, 8, 9], seconds=0.3), policy=policy)
    assert sum(seconds > 0.3 for seconds in measurement.warmup_seconds) >= 4
    assert max(measurement.step_seconds) < 0.3
    assert len(measurement.step_seconds) == 6
    assert len(measurement.losses) == len(measurement.warmup_seconds) + 6
    assert "code was compiled again in 2 steps after the warm-up, which do not count" in measurement.notes


def test_a_trial_that_is_surely_too_slow_ends_early_with_what_it_measured() -> None:
    policy = MeasurePolicy(max_warmup_steps=3, min_steps=12, max_steps=12)
    request = _request(tasks.spec("sleeps", then=0.05), policy=policy)
    slow, fits = (run_trial(request.model_copy(update={"hopeless_step_seconds": limit}), CONTEXT, SilentReporter())
                  for limit in (0.02, 0.2))
    assert slow[0].outcome is Outcome.PRUNED
    assert slow[0].detail.endswith("surely longer than the 0.02 s that are worth measuring")
    assert slow[0].measurement is not None
    assert 3 <= len(slow[0].measurement.step_seconds) < 12
    assert slow[0].measurement.tokens_per_second > 0
    assert slow[1], "the worker can go on"
    assert fits[0].outcome is Outcome.OK
    assert fits[0].measurement is not None
    assert len(fits[0].measurement.step_seconds) == 12


def test_what_compiles_in_every_step_is_measured_with_it() -> None:
    policy = MeasurePolicy(max_warmup_steps=1, min_steps=2, max_steps=2)
    measurement = _measured(tasks.spec("compiles", steps=range(5), seconds=0.1), policy=policy)
    assert len(measurement.warmup_seconds) == 3
    assert min(measurement.step_seconds) > 0.1


def test_throughput_is_samples_over_seconds_and_tokens_a_constant_times_that() -> None:
    measurement = _measured(tasks.spec("sleeps", then=0.2, tokens_per_sample=7), micro_batch_size=3,
                            gradient_accumulation_steps=2)
    mean = fmean(measurement.step_seconds)
    assert mean >= 0.4  # two micro-batches
    assert measurement.samples_per_second == pytest.approx(6 / mean)
    assert measurement.tokens_per_second == pytest.approx(7 * measurement.samples_per_second)
    low, high = measurement.tokens_per_second_interval
    assert low < measurement.tokens_per_second < high


def test_phases_sum_to_the_mean_step_time() -> None:
    measurement = _measured(GPT, gradient_accumulation_steps=2)
    phases = measurement.phases
    total = phases.data + phases.forward + phases.backward + phases.step
    assert total == pytest.approx(fmean(measurement.step_seconds), rel=1e-6)
    assert min(phases.data, phases.forward, phases.backward, phases.step) > 0


def test_a_step_with_offload_tells_the_hosts_part_from_the_transfers() -> None:
    assert (_measured(GPT).phases.host_step, _measured(GPT).phases.transfer) == (None, None)
    phases = _measured(GPT, precision="bf16", offload_optimizer_ratio=1.0).phases
    assert phases.host_step is not None
    assert phases.transfer is not None
    assert 0 < phases.host_step + phases.transfer < phases.step


def test_memory_that_could_not_be_page_locked_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "host_is_pageable", True)  # as on an accelerator whose host refuses
    notes = _measured(GPT, offload_optimizer_ratio=1.0).notes
    assert "host memory could not be page-locked: offload's transfers are slower for it" in notes


def test_offload_to_the_memory_that_the_device_has_is_noted() -> None:
    note = "the device is the CPU: offloaded state lies in the same memory, page-locked nowhere"
    assert note in _measured(GPT, zero_stage=1, offload_optimizer_ratio=0.5).notes
    assert note not in _measured(GPT, zero_stage=1).notes


@pytest.mark.parametrize(("policy", "steps"), [
    (MeasurePolicy(max_warmup_steps=1, min_steps=2, max_steps=30, target_relative_interval=10), 2),
    (MeasurePolicy(max_warmup_steps=1, min_steps=4, max_steps=30, target_relative_interval=10), 4),
    (MeasurePolicy(max_warmup_steps=1, min_steps=2, max_steps=6, target_relative_interval=1e-9), 6),
    (MeasurePolicy(max_warmup_steps=1, min_steps=20, max_steps=30, max_seconds=1e-6), 2),
])
def test_measuring_ends_when_enough_is_known(policy: MeasurePolicy, steps: int) -> None:
    assert len(_measured(tasks.spec("toy"), policy=policy).step_seconds) == steps


def test_measuring_ends_before_the_deadline() -> None:
    policy = MeasurePolicy(max_warmup_steps=8, min_steps=20, max_steps=20)
    measurement = _measured(tasks.spec("sleeps", then=0.2), policy=policy, deadline_seconds=1.0)
    assert 2 <= len(measurement.step_seconds) < 6
    assert "measuring was cut short by the trial's deadline" in measurement.notes


def test_step_times_that_never_settle_are_noted() -> None:
    policy = MeasurePolicy(max_warmup_steps=4, min_steps=2, max_steps=2)
    measurement = _measured(tasks.spec("sleeps", first=[0.0, 0.2, 0.0, 0.2], then=0.0), policy=policy)
    assert len(measurement.warmup_seconds) == 4
    assert "step time was not steady after 4 warm-up steps" in measurement.notes


def test_where_the_core_is_not_known_other_work_goes_unseen_and_that_is_noted() -> None:
    note = "whether other work shared the device was not checked"
    assert note in _measured(GPT).notes
    pinned = dataclasses.replace(CONTEXT, core=0)
    report, _ = run_trial(_request(GPT), pinned, SilentReporter(), deadline_seconds=math.inf)
    assert report.measurement is not None
    assert note not in report.measurement.notes


def test_losses_are_those_of_plain_training() -> None:
    """Against a loop without the engine: one process, the whole global batch."""
    measurement = _measured(GPT, micro_batch_size=2, gradient_accumulation_steps=3, zero_stage=2)
    task = build_task(GPT)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    expected = []
    for step in range(len(measurement.losses)):
        loss = task.loss(model, task.batch(range(step * 6, step * 6 + 6)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert measurement.losses == pytest.approx(expected, abs=1e-4)


def test_equal_requests_give_equal_losses() -> None:
    assert _measured(GPT).losses == _measured(GPT).losses
    other = TrialRequest.model_validate({**_request(GPT).model_dump(), "seed": 1})
    report, _ = run_trial(other, CONTEXT, SilentReporter())
    assert report.measurement is not None
    assert report.measurement.losses != _measured(GPT).losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_compute_dtype_is_read_from_the_parameters(precision: str) -> None:
    measurement = _measured(GPT, precision=precision)
    assert measurement.compute_dtype == precision
    parameters = sum(parameter.numel() for parameter in build_task(GPT).build_model().parameters())
    width = 4 if precision == "fp32" else 2
    assert measurement.state_bytes.parameters == pytest.approx(parameters * width, rel=0.02)
    assert (measurement.world_size, measurement.threads_per_rank) == (1, 1)


def test_progress_is_told_step_by_step() -> None:
    listener = _Listener()
    _run(tasks.spec("toy"), reporter=listener)
    assert [(progress.phase, progress.step) for progress in listener.heard] == [
        ("setup", 0), ("warmup", 0), ("warmup", 1), ("measuring", 2), ("measuring", 3)]
    assert listener.heard[1].step_seconds is None
    assert listener.heard[2].step_seconds is not None


def test_a_failure_is_told_with_its_step() -> None:
    listener = _Listener()
    with pytest.raises(ValueError, match="boom"):
        _run(tasks.spec("raises", rank=0, step=3), reporter=listener)
    assert listener.heard[-1].step == 3


def test_a_loss_that_is_not_finite_ends_the_trial() -> None:
    report = _run(tasks.spec("becomes_nan", step=3))
    assert report.outcome is Outcome.NON_FINITE
    assert report.failed_step == 3
    report = _run(tasks.spec("becomes_nan", step=4),
                  policy=MeasurePolicy(max_warmup_steps=2, min_steps=9, max_steps=9))
    assert report.measurement is not None
    assert report.measurement.losses[4] is None
    assert None not in report.measurement.losses[:4]


def test_steps_that_are_never_applied_are_no_result() -> None:
    """A loss scale beyond what fp16 holds overflows every gradient."""
    report = _run(GPT, precision="fp16", loss_scale=2.0**60)
    assert report.outcome is Outcome.NON_FINITE
    assert report.detail == "gradients were not finite in 4 of 4 steps: too few were applied"


@pytest.mark.parametrize(("every", "outcome"), [(3, Outcome.NON_FINITE), (5, Outcome.NON_FINITE), (12, Outcome.OK)])
def test_going_on_skipping_steps_is_no_result(every: int, outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """An overflow now and then is usual; a scale that keeps overflowing leaves updates out."""
    step = TrainingLoop.step

    def overflows(loop: TrainingLoop, number: int) -> LoopStep:
        result = step(loop, number)
        return dataclasses.replace(result, applied=number < 3 or number % every > 0)

    monkeypatch.setattr(TrainingLoop, "step", overflows)
    policy = MeasurePolicy(max_warmup_steps=3, min_steps=20, max_steps=20, target_relative_interval=10)
    report = _run(GPT, policy=policy)
    assert report.outcome is outcome, report.detail
    assert ("steps since the first that was applied" in report.detail) == (outcome is Outcome.NON_FINITE)


def test_skipped_steps_are_counted() -> None:
    policy = MeasurePolicy(max_warmup_steps=8, min_steps=4, max_steps=4)
    measurement = _measured(GPT, precision="fp16", initial_scale_power=24, hysteresis=1, policy=policy)
    assert 0 < measurement.skipped_steps < len(measurement.losses)


def test_skipped_steps_are_not_measured() -> None:
    policy = MeasurePolicy(max_warmup_steps=1, min_steps=4, max_steps=30, target_relative_interval=10)
    measurement = _measured(GPT, precision="fp16", initial_scale_power=24, hysteresis=1, policy=policy)
    skipped = measurement.skipped_steps
    assert skipped > 1
    assert len(measurement.step_seconds) == 4
    assert len(measurement.warmup_seconds) == skipped + 1  # the first that is applied is watched: it makes the states
    assert len(measurement.losses) == skipped + 1 + 4
    assert f"gradients overflowed in {skipped - 1} steps after the warm-up, which do not count" in measurement.notes


def test_a_need_that_comes_with_a_later_step_is_out_of_memory_at_that_step() -> None:
    for step in (2, 3):
        report = run(run_once(_request(tasks.spec("needs_memory", step=step, megabytes=200), limit=100 * MIB)))
        assert report.outcome is Outcome.OOM_DEVICE
        assert report.failed_step == step
        assert f"exceeds the memory limit of {100 * MIB} at step {step}" in report.detail
        assert report.peak_device_bytes == pytest.approx(200 * MIB, rel=0.05)


def test_optimizer_states_count_though_they_come_with_the_first_step() -> None:
    """Parameters, gradients and activations fit; the two states do not. In workers, where equal trials peak alike."""
    size = 2000 * 2000 * 4
    toy = tasks.spec("toy", width=2000, depth=4)
    needed = run(run_once(_request(toy))).peak_device_bytes
    assert needed is not None
    assert needed > 4 * 4 * size
    report = run(run_once(_request(toy, limit=int(2.6 * 4 * size))))
    assert report.outcome is Outcome.OOM_DEVICE
    assert report.failed_step == 0
    assert run(run_once(_request(toy, limit=int(needed * 1.1)))).outcome is Outcome.OK


def test_the_longest_sample_must_fit_too() -> None:
    report = _run(tasks.spec("longest", megabytes=200), limit=100 * MIB)
    assert report.outcome is Outcome.OOM_DEVICE
    assert report.failed_step == 4
    assert report.measurement is not None
    without_limit = _measured(tasks.spec("longest", megabytes=200))
    assert without_limit.peak_device_bytes == pytest.approx(200 * MIB, rel=0.02)
    assert len(without_limit.losses) == 4


def test_a_configuration_that_does_not_make_the_global_batch_is_refused() -> None:
    request = _request(GPT).model_copy(update={"global_batch_size": 3})
    with pytest.raises(BatchSizeError, match="3 != 2\\*1\\*1"):
        run_trial(request, CONTEXT, SilentReporter())


def test_the_resident_meter_sees_what_was_held_at_once() -> None:
    meter = ResidentMeter()
    meter.start(None)
    first = torch.ones(50 * MIB // 4)
    del first
    second = torch.ones(80 * MIB // 4)
    assert meter.peak_device_bytes(host_bytes=0, shared_bytes=0) == pytest.approx(80 * MIB, rel=0.05)
    assert meter.peak_device_bytes(host_bytes=30 * MIB, shared_bytes=20 * MIB) == pytest.approx(70 * MIB, rel=0.05)
    assert meter.finish() == pytest.approx(80 * MIB, rel=0.05)
    del second
    meter.start(None)
    assert meter.peak_device_bytes(host_bytes=0, shared_bytes=0) < 4 * MIB


def test_the_limit_itself_may_be_reached() -> None:
    check_limit(100, 100)
    check_limit(100, None)
    with pytest.raises(DeviceMemoryLimitError, match="peak of 101 device bytes exceeds the memory limit of 100"):
        check_limit(101, 100)
