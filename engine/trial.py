"""One trial: build, step until steps are steady, measure until the mean is known well enough, tell all of it.

Every decision follows from numbers that all ranks agreed on, so all ranks take the same number of steps.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple, Protocol

import torch
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from engine.config import Checkpointing, OptimizerConfig, TrainConfig, require_global_batch
from engine.errors import DeviceMemoryLimitError
from engine.loop import PHASES, LoopStep, PhaseClock, PhaseName, TrainingLoop
from engine.memory import LEFT_BEHIND_BYTES, MemoryMeter, check_limit, meter_for
from engine.precision import DTYPES
from engine.process import CpuTimes, cpu_times, is_contended
from engine.ranks import RankContext
from engine.report import (
    Measurement,
    MeasurePolicy,
    Outcome,
    PhaseSeconds,
    StateBytes,
    TrialProgress,
    TrialReport,
    TrialRequest,
)
from engine.spec import GptSpec
from engine.statistics import STEADY_WINDOW, measured_interval, middle, robust_interval, robust_mean, steady_steps
from engine.tasks.build import build_task
from engine.values import Precision

_DEADLINE_SHARE = 0.8
"""Measuring ends, once two steps are measured, when this share of the deadline is used up."""

_SKIPS, _SKIPPED_SHARE = 2, 0.1
"""As many steps after the first that is applied may overflow, or this share of them: a loss scale that was just too
large is halved by then. One that goes on leaving updates out trains less than its steps say, however fast they are."""

_LEAST_MEASURED = 2

_LEAST_TO_PRUNE = 3
"""Two step times may agree by chance, and their interval then says too much."""

_LOOKS_IN_BACKWARD = 16
"""At memory, in the first steps only: together they take a millisecond."""

WATCHED_STEPS = 2
"""So many by the memory meter, which makes them slow on a CPU: they are never measured. The second is like all later
ones: the optimizer's states are there throughout, and stage 3 knows in which order it gathers. Where neither comes
with the first step, that alone is watched."""

_WARM_UPS: tuple[tuple[Precision, Checkpointing, int], ...] = (("fp32", "full", 3), ("bf16", "selective", 2))
"""Precision, checkpointing and stage: between them all that libraries load or keep on first use."""


class Reporter(Protocol):
    """Hears of a trial as it goes on."""

    def baseline(self) -> None:
        """Memory is about to be taken: what is held now is not the trial's."""

    def progress(self, progress: TrialProgress) -> None:
        """A step, or the set-up, begins."""


class SilentReporter:
    def baseline(self) -> None:
        pass

    def progress(self, progress: TrialProgress) -> None:
        pass


def run_trial(
    request: TrialRequest, context: RankContext, reporter: Reporter, *, deadline_seconds: float = math.inf
) -> tuple[TrialReport, bool]:
    """Measure one configuration once. Collective: every rank of the group calls it with the same request.

    Args:
        deadline_seconds: the launcher ends the trial then; measuring stops well before if enough is known.

    Returns:
        The report, the same on all ranks in outcome, times and losses; and whether this rank may run another trial.

    Raises:
        Exception: whatever the task or the engine raises. The step is the last one that `reporter` heard of.
    """
    budget = _Budget(started=time.perf_counter(), seconds=deadline_seconds * _DEADLINE_SHARE)
    require_global_batch(request.config, global_batch_size=request.global_batch_size,
                         data_parallel_size=context.world_size)
    reporter.progress(TrialProgress(phase="setup", step=0))
    task = build_task(request.model, seed=request.seed)
    meter = meter_for(context.device)
    meter.start(request.memory_limit_bytes)
    reporter.baseline()
    loop = TrainingLoop(task, request.config, request.optimizer, seed=request.seed, context=context)
    trial = _Trial(request, context, reporter, loop, meter, budget)
    report = trial.run()
    loop.close()
    del loop, trial, task
    if request.config.compile:
        torch.compiler.reset()
    left_behind = meter.finish()
    clean = report.outcome in (Outcome.OK, Outcome.PRUNED, Outcome.NON_FINITE) and left_behind <= LEFT_BEHIND_BYTES
    return report, clean


def _steps_to_watch(loop: TrainingLoop, device: torch.device) -> int:
    """How many steps have to be applied until one has needed all that later ones need."""
    if device.type != "cpu":
        return 0  # the allocator keeps the peak by itself
    config = loop.config
    gathers = config.zero_stage == 3 and (config.offload_param or not loop.trainer.shared_bytes)
    trims = config.precision != "fp32" and loop.trainer.shared_bytes  # rooms and casts are taken anew after the first
    return 1 if loop.has_states and not gathers and not trims else WATCHED_STEPS


def _look_in_backward(loop: TrainingLoop, meter: MemoryMeter) -> list[RemovableHandle]:
    """Look now and then: memory that ranks share is taken in backward, and at some stages given back in the step."""
    trained = [parameter for parameter in loop.trainer.module.parameters() if parameter.requires_grad]
    watched = trained[::-(-len(trained) // _LOOKS_IN_BACKWARD)]
    return [parameter.register_post_accumulate_grad_hook(lambda _: meter.look())  # type: ignore[no-untyped-call]
            for parameter in watched]


class _WatchedClock:
    """Tells the memory meter whenever a phase is over."""

    def __init__(self, clock: PhaseClock, meter: MemoryMeter) -> None:
        self._clock, self._meter = clock, meter
        self.start, self.seconds = clock.start, clock.seconds

    def lap(self, phase: PhaseName) -> None:
        self._clock.lap(phase)
        if phase != "data":
            self._meter.end_phase()


class _Budget(NamedTuple):
    """When the trial began, and the seconds after which it measures no more."""

    started: float
    seconds: float

    def elapsed(self) -> float:
        return time.perf_counter() - self.started


@dataclass(frozen=True, kw_only=True)
class _Agreed:
    """One step as all ranks see it: the slowest one's time, the worst one's troubles."""

    seconds: float
    elapsed: float
    peak_bytes: int
    grown: bool
    non_finite: bool
    applied: bool
    compiled: bool


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step that was taken, and what it was made of on this rank.

    Attributes:
        watched: whether the memory meter made it slow.
        offload: seconds of the host's step, and of transfers.
        before: the readings at its beginning.
    """

    agreed: _Agreed
    watched: bool
    phases: dict[PhaseName, float]
    offload: tuple[float, float]
    before: CpuTimes

    @property
    def is_ordinary(self) -> bool:
        """Whether it did all that a step does, and nothing else."""
        return self.agreed.applied and not self.agreed.compiled and not self.watched


@dataclass
class _Record:
    """What has been seen so far. Every step that ended well is either of the warm-up or measured."""

    setup_seconds: float
    warmup: list[_Step] = field(default_factory=list)
    measured: list[_Step] = field(default_factory=list)
    loss_sums: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    contended: bool = False

    @property
    def step_seconds(self) -> list[float]:
        return _seconds(self.measured)


def _seconds(steps: Sequence[_Step]) -> list[float]:
    return [step.agreed.seconds for step in steps]


class _Stopped(Exception):
    """The trial ends here on all ranks, with what was measured so far."""

    def __init__(self, outcome: Outcome, detail: str, step: int | None) -> None:
        super().__init__(detail)
        self.outcome, self.detail, self.step = outcome, detail, step


class _Trial:
    """The steps of one trial on one rank."""

    def __init__(self, request: TrialRequest, context: RankContext, reporter: Reporter, loop: TrainingLoop,
                 meter: MemoryMeter, budget: _Budget) -> None:
        self._request, self._context, self._reporter = request, context, reporter
        self._loop, self._meter = loop, meter
        self._budget, self._record = budget, _Record(setup_seconds=budget.elapsed())
        self._looks: list[RemovableHandle] = []
        if context.device.type == "cpu":
            loop.clock = _WatchedClock(loop.clock, meter)
            self._looks = self._look()
            if request.config.compile:
                self._record.notes.append("peak bytes include what the compiler took in the same process")
        self._watches = True
        self._still_to_watch = _steps_to_watch(loop, context.device)
        self._last_seconds: float | None = None

    def run(self) -> TrialReport:
        """The main path of a trial."""
        outcome, detail, failed_step = Outcome.OK, "", None
        try:
            self._warm_up()
            self._measure()
            self._require_applied_steps()
            self._run_longest_sample()
            self._require_hope()
        except _Stopped as stop:
            outcome, detail, failed_step = stop.outcome, stop.detail, stop.step
        peak = self._context.largest((self._peak_bytes(),))[0]
        return TrialReport(outcome=outcome, detail=detail, failed_step=failed_step, peak_device_bytes=int(peak),
                           measurement=self._measurement(int(peak)))

    # -- phases

    def _warm_up(self) -> None:
        """Steps until the last ones agree, were applied and compiled nothing: those are measured already.

        Ends with nothing measured at `max_warmup_steps` or `max_seconds`, not counting what compiled, where that is
        sooner.
        """
        policy, record = self._request.policy, self._record
        settling = 0.0
        while len(record.warmup) < policy.max_warmup_steps:
            step = self._step("warmup")
            record.warmup.append(step)
            steady = self._steady_steps()
            if steady:
                record.measured = record.warmup[-steady:]
                del record.warmup[-steady:]
                return
            settling += 0.0 if step.agreed.compiled else step.agreed.seconds
            if settling > policy.max_seconds or step.agreed.elapsed > self._budget.seconds:
                break
        record.notes.append(f"step time was not steady after {len(record.warmup)} warm-up steps")

    def _steady_steps(self) -> int:
        """How many of the last steps count. What one is off by must not matter to the mean that was asked for, which
        spares the slowest where it is of enough steps."""
        policy, last = self._request.policy, self._record.warmup[-STEADY_WINDOW:]
        if not all(step.is_ordinary for step in last):
            return 0
        spares_one = len(middle(range(policy.min_steps), float)) < policy.min_steps
        tolerance = math.inf if spares_one else policy.target_relative_interval
        return min(steady_steps(_seconds(last), tolerance=tolerance), policy.max_steps)

    def _measure(self) -> None:
        """Steps until the mean's interval is narrow enough, or a limit is reached; two at the least.

        Steps that were not applied, which leave the update out, belong to the warm-up, as do those that are watched; so
        do those that compile anew, unless they never end.
        """
        record, recompiled, skipped = self._record, 0, 0
        while (self._still_to_watch or not self._is_enough()) and skipped < self._request.policy.max_steps:
            step = self._step("measuring")
            if not step.agreed.applied:
                skipped += 1
                record.warmup.append(step)
            elif step.watched:
                record.warmup.append(step)
            elif step.agreed.compiled and recompiled < self._request.policy.max_steps:
                recompiled += 1
                record.warmup.append(step)
            else:
                record.measured.append(step)
            if step.agreed.elapsed > self._budget.seconds and len(record.measured) >= _LEAST_MEASURED:
                record.notes.append("measuring was cut short by the trial's deadline")
                break
        if recompiled:
            record.notes.append(f"code was compiled again in {recompiled} steps after the warm-up, which do not count")
        if skipped:
            record.notes.append(f"gradients overflowed in {skipped} steps after the warm-up, which do not count")
        if self._loop.trainer.host_is_pageable:
            record.notes.append("host memory could not be page-locked: offload's transfers are slower for it")
        elif self._context.device.type == "cpu" and self._loop.trainer.host_bytes:
            record.notes.append("the device is the CPU: offloaded state lies in the same memory, page-locked nowhere")
        record.contended = bool(record.measured) and self._is_contended(record.measured[0].before)
        if self._context.core is None:
            record.notes.append("whether other work shared the device was not checked")

    def _require_applied_steps(self) -> None:
        steps, skipped = len(self._record.applied), self._record.applied.count(False)
        if len(self._record.measured) < _LEAST_MEASURED:
            raise _Stopped(Outcome.NON_FINITE, f"gradients were not finite in {skipped} of {steps} steps: too few were "
                           "applied", steps - 1)
        since = self._record.applied[self._record.applied.index(True):]  # before, a loss scale is searched for
        if since.count(False) > max(_SKIPS, _SKIPPED_SHARE * len(since)):
            raise _Stopped(Outcome.NON_FINITE, f"gradients were not finite in {since.count(False)} of {len(since)} "
                           "steps since the first that was applied: updates are left out for good", steps - 1)

    def _is_enough(self) -> bool:
        samples, policy = self._record.step_seconds, self._request.policy
        if len(samples) < _LEAST_MEASURED:
            return False
        if len(samples) >= policy.max_steps or sum(samples) > policy.max_seconds or self._is_hopeless():
            return True
        if len(samples) < policy.min_steps:
            return False
        low, high = robust_interval(samples)
        return (high - low) / 2 <= policy.target_relative_interval * robust_mean(samples)

    def _is_hopeless(self) -> bool:
        samples, limit = self._record.step_seconds, self._request.hopeless_step_seconds
        return limit is not None and len(samples) >= _LEAST_TO_PRUNE and measured_interval(samples)[0] > limit

    def _require_hope(self) -> None:
        if self._is_hopeless():
            samples, limit = self._record.step_seconds, self._request.hopeless_step_seconds
            low, high = measured_interval(samples)
            raise _Stopped(Outcome.PRUNED, f"a step takes {low:.4g} to {high:.4g} s (95 % interval, {len(samples)} "
                           f"steps), surely longer than the {limit:.4g} s that are worth measuring", None)

    def _run_longest_sample(self) -> None:
        """One more step, unmeasured, where the task names a sample of the largest size: its memory counts."""
        sample = getattr(self._loop.task, "longest_sample", None)
        if sample is None:
            return
        step = len(self._record.applied)
        self._announce("measuring", step)
        self._meter.watch()
        self._loop.step_on_sample(int(sample))
        self._hold_limit(self._agree(0.0, LoopStep(loss_sum=0.0, applied=True, compiled=False)), step)

    # -- one step

    def _step(self, phase: Literal["warmup", "measuring"]) -> _Step:
        record, trainer, number = self._record, self._loop.trainer, len(self._record.applied)
        if self._still_to_watch:
            self._watch()
        else:
            self._rest()
        watched = self._watches
        self._announce(phase, number)
        before = cpu_times(self._context.core)
        host, transfer = trainer.offload_seconds
        begun = time.perf_counter()
        result = self._loop.step(number)
        agreed = self._agree(time.perf_counter() - begun, result)
        host_now, transfer_now = trainer.offload_seconds
        self._last_seconds = agreed.seconds
        record.loss_sums.append(result.loss_sum)
        record.applied.append(agreed.applied)
        if agreed.non_finite:
            raise _Stopped(Outcome.NON_FINITE, f"the loss was not finite at step {number}", number)
        self._hold_limit(agreed, number)
        if watched:
            self._still_to_watch -= agreed.applied
        elif agreed.grown:
            self._still_to_watch = 1  # the next step, which hopefully is alike
        return _Step(agreed=agreed, watched=watched, phases=self._loop.clock.seconds(), before=before,
                     offload=(host_now - host, transfer_now - transfer))

    def _rest(self) -> None:
        """The memory meter has seen all that a step needs."""
        if self._watches:
            self._watches = False
            self._meter.rest()
            for look in self._looks:
                look.remove()

    def _watch(self) -> None:
        """The next steps may need more than the memory meter has seen."""
        if not self._watches:
            self._watches = True
            self._meter.watch()
            self._looks = self._look()

    def _look(self) -> list[RemovableHandle]:
        """On a CPU, where alone a step is watched."""
        return _look_in_backward(self._loop, self._meter) if self._context.world_size > 1 else []

    def _announce(self, phase: Literal["warmup", "measuring"], step: int) -> None:
        self._reporter.progress(TrialProgress(phase=phase, step=step, step_seconds=self._last_seconds))

    def _agree(self, seconds: float, result: LoopStep) -> _Agreed:
        peak = self._peak_bytes()
        largest = self._context.largest((seconds, self._budget.elapsed(), peak, self._meter.has_grown(),
                                         not math.isfinite(result.loss_sum), not result.applied, result.compiled))
        return _Agreed(seconds=largest[0], elapsed=largest[1], peak_bytes=int(largest[2]), grown=bool(largest[3]),
                       non_finite=bool(largest[4]), applied=not largest[5], compiled=bool(largest[6]))

    def _peak_bytes(self) -> int:
        trainer = self._loop.trainer
        return self._meter.peak_device_bytes(host_bytes=trainer.peak_host_bytes, shared_bytes=trainer.shared_bytes)

    def _hold_limit(self, agreed: _Agreed, step: int) -> None:
        try:
            check_limit(agreed.peak_bytes, self._request.memory_limit_bytes)
        except DeviceMemoryLimitError as error:
            raise _Stopped(Outcome.OOM_DEVICE, f"{error} at step {step}", step) from error

    def _is_contended(self, before: CpuTimes) -> bool:
        here = is_contended(before, cpu_times(self._context.core))
        return bool(self._context.largest((float(here),))[0])

    # -- the result

    def _measurement(self, peak_device_bytes: int) -> Measurement | None:
        """What was measured, None where too little was. Collective."""
        record, context, loop = self._record, self._context, self._loop
        losses = loop.mean_losses(record.loss_sums)
        host, setup = context.largest((loop.trainer.peak_host_bytes, record.setup_seconds))
        held = loop.trainer.state_bytes()
        state = context.largest((held.parameters, held.gradients, held.optimizer, held.host))
        step_seconds = record.step_seconds
        if len(step_seconds) < _LEAST_MEASURED:
            return None
        tokens = self._request.global_batch_size * loop.task.tokens_per_sample
        mean = robust_mean(step_seconds)
        low, high = measured_interval(step_seconds)
        return Measurement(
            step_seconds=tuple(step_seconds), warmup_seconds=tuple(_seconds(record.warmup)),
            tokens_per_second=tokens / mean, samples_per_second=self._request.global_batch_size / mean,
            tokens_per_second_interval=(tokens / high, tokens / max(low, mean / 10)),
            peak_device_bytes=peak_device_bytes, peak_host_bytes=int(host),
            phases=_mean_phases(record.measured, mean), losses=losses,
            skipped_steps=record.applied.count(False), state_bytes=StateBytes(
                parameters=int(state[0]), gradients=int(state[1]), optimizer=int(state[2]), host=int(state[3])),
            world_size=context.world_size, threads_per_rank=torch.get_num_threads(), setup_seconds=setup,
            contended=record.contended, compute_dtype=loop.compute_dtype(), notes=tuple(record.notes))


def _mean_phases(measured: Sequence[_Step], mean_step_seconds: float) -> PhaseSeconds:
    """Means over the steps that `robust_mean` is of; waiting for slower ranks belongs to the step phase."""
    kept = middle(measured, lambda step: step.agreed.seconds)
    means = {name: fmean(step.phases[name] for step in kept) for name in PHASES}
    means["step"] += max(mean_step_seconds - sum(means.values()), 0.0)
    host, transfer = (fmean(seconds) for seconds in zip(*(step.offload for step in kept), strict=True))
    return PhaseSeconds(data=means["data"], forward=means["forward"], backward=means["backward"], step=means["step"],
                        host_step=host or None, transfer=transfer or None)


def warm_up_engine(context: RankContext) -> None:
    """Run tiny trials once, so that code and buffers that are loaded or made on first use are there. Collective."""
    for precision, checkpointing, stage in _WARM_UPS:
        wide = torch.ones(1024, 512, device=context.device, dtype=DTYPES[precision])
        functional.linear(wide, wide.repeat(4, 1))  # has the library take the scratch memory that it then keeps
        request = TrialRequest(
            model=GptSpec(kind="gpt", layers=1, hidden=64, heads=1, vocab=64, sequence_length=32),
            optimizer=OptimizerConfig(), config=TrainConfig(precision=precision, zero_stage=stage, micro_batch_size=2,
                                                            activation_checkpointing=checkpointing),
            global_batch_size=2 * context.world_size,
            policy=MeasurePolicy(max_warmup_steps=1, min_steps=2, max_steps=2))
        run_trial(request, context, SilentReporter())
