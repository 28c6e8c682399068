"""A grid of configurations of the bundled engine, every one measured on this machine: a search problem that is real.

The file keeps all measurements with what was known beforehand, so that a search over it needs no device.
"""

import asyncio
from contextlib import aclosing
from pathlib import Path
from random import Random
from statistics import fmean

from autotune.domain.request import StudyRequest
from autotune.scheduler.launcher.local import LocalLauncher
from autotune.search.plan import Plan, make_plan
from autotune.search.space import parse_space
from benchmarks.search.problems import Problem, Truth, make_problem
from benchmarks.trials import reports
from engine.config import TrainConfig
from engine.profile import HardwareProfile, ModelProfile
from engine.report import (
    CalibrateReport,
    CalibrateRequest,
    MeasurePolicy,
    Outcome,
    ProbeReport,
    ProbeRequest,
    TrialReport,
    TrialRequest,
)
from engine.statistics import robust_mean
from engine.values import Value

FILE = Path(__file__).parents[1] / "data" / "search_grid.json"

REQUEST = StudyRequest.model_validate({
    "name": "grid",
    "model": {"kind": "gpt", "layers": 2, "hidden": 128, "heads": 4, "vocab": 1024, "sequence_length": 64},
    "training": {"global_batch_size": 16}, "hardware": {"device": "cpu", "devices": 2},
    "search": {"space": {"zero_stage": [0, 1, 2, 3], "micro_batch_size": [1, 2, 4, 8], "precision": ["fp32", "bf16"],
                         "activation_checkpointing": ["none", "full"], "overlap_comm": [True, False]}}})
"""128 configurations, of which all should fit."""

_POLICY = MeasurePolicy(min_steps=10, max_steps=20, target_relative_interval=0.02)


class Measured(Value):
    """One configuration; step seconds and peaks by round, none where it failed."""

    config: TrainConfig
    outcomes: tuple[Outcome, ...]
    step_seconds: tuple[float, ...]
    peak_device_bytes: tuple[int, ...]
    peak_host_bytes: tuple[int, ...]


class Grid(Value):
    request: StudyRequest
    model: ModelProfile
    hardware: HardwareProfile
    measured: tuple[Measured, ...]


def stored_problem(file: Path = FILE) -> Problem | None:
    """The grid as a problem; None where the file is missing.

    A trial measures what the first round measured; what is true is the mean of all rounds.

    Raises:
        ValueError: the file is of another space; it must be measured again.
    """
    if not file.exists():
        return None
    grid = Grid.model_validate_json(file.read_text())
    plan = _plan(grid.request, grid.model, grid.hardware)
    truths = {plan.canonical(each.config): _truth(plan, each) for each in grid.measured}
    if missing := plan.index.keys() - truths.keys():
        raise ValueError(f"{file} lacks {len(missing)} configurations of the plan: measure it again")
    return make_problem("grid", plan, lambda config: truths[plan.canonical(config)])


def measure(rounds: int) -> Grid:
    """Measure every configuration in several rounds, each in another order. Takes minutes of a quiet machine."""
    return asyncio.run(_measure(rounds))


async def _measure(rounds: int) -> Grid:
    launcher = LocalLauncher(device_type="cpu")
    known = [report async for report in reports(
        launcher, [ProbeRequest(model=REQUEST.model), CalibrateRequest()], devices=REQUEST.hardware.devices)]
    probed, calibrated = known
    assert isinstance(probed, ProbeReport), probed
    assert isinstance(calibrated, CalibrateReport), calibrated
    plan = _plan(REQUEST, probed.profile, calibrated.profile)
    order = [candidate.config for candidate in plan.candidates] * rounds
    for number in range(rounds):
        part = order[number * len(plan.candidates):(number + 1) * len(plan.candidates)]
        Random(number).shuffle(part)
        order[number * len(part):(number + 1) * len(part)] = part
    found: dict[TrainConfig, list[TrialReport]] = {candidate.config: [] for candidate in plan.candidates}
    async with aclosing(reports(launcher, map(_trial, order), devices=REQUEST.hardware.devices)) as arriving:
        place = 0
        async for report in arriving:
            assert isinstance(report, TrialReport), report
            found[order[place]].append(report)
            place += 1
    return Grid(request=REQUEST, model=plan.model, hardware=plan.hardware,
                measured=tuple(_measured(config, done) for config, done in found.items()))


def _trial(config: TrainConfig) -> TrialRequest:
    return TrialRequest(model=REQUEST.model, optimizer=REQUEST.training.optimizer, config=config, policy=_POLICY,
                        global_batch_size=REQUEST.training.global_batch_size)


def _measured(config: TrainConfig, done: list[TrialReport]) -> Measured:
    runs = [report.measurement for report in done if report.outcome is Outcome.OK and report.measurement is not None]
    return Measured(config=config, outcomes=tuple(report.outcome for report in done),
                    step_seconds=tuple(robust_mean(run.step_seconds) for run in runs),
                    peak_device_bytes=tuple(run.peak_device_bytes for run in runs),
                    peak_host_bytes=tuple(run.peak_host_bytes for run in runs))


def _truth(plan: Plan, each: Measured) -> Truth:
    if not each.step_seconds:
        # never ran to its end: as if it ran out of memory
        return Truth(float("inf"), float("inf"), 2 * plan.limits.device_bytes, 0)
    return Truth(fmean(each.step_seconds), each.step_seconds[0], max(each.peak_device_bytes),
                 max(each.peak_host_bytes))


def _plan(request: StudyRequest, model: ModelProfile, hardware: HardwareProfile) -> Plan:
    return make_plan(request, parse_space(request), model, hardware)
