"""What the pages show: pure functions from domain values to frozen view values. Formatting is the templates' part."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from autotune.domain.explanation import phase_seconds
from autotune.domain.prediction import Prediction
from autotune.domain.study import BestConfig, Study, StudyPhase, StudyState, Trial
from autotune.domain.throughput import (
    Throughput,
    is_of_rounds,
    rate_unit,
    shown_gain,
    shown_throughput,
    throughput,
    told_throughput,
    valid_runs,
)
from engine.config import TrainConfig
from engine.report import Measurement, Outcome
from web.measured import fastest
from web.plan_view import PlanView, Segment, segments
from web.trials_view import KNOBS, gain_over
from web.words import MEASURED_PARTS, OUTCOMES, PHASES, ROLES, Cue, describe_model, study_cue, trial_cue


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One line of the studies list."""

    id: str
    name: str
    model: str
    devices: str
    cue: Cue
    phase: str | None
    error: str | None
    progress: "ProgressView"
    tokens_per_second: float | None
    unit: str
    gain: float | None
    tie: bool
    only_plans: bool
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class ProgressView:
    """How far a study is.

    Attributes:
        fraction: 0 to 1; None where the total is not known yet.
    """

    finished: int
    total: int | None
    repeats_finished: int
    repeats_total: int | None
    elapsed_seconds: float
    rest_seconds: float | None
    fraction: float | None


@dataclass(frozen=True, kw_only=True)
class PhaseStep:
    """One step of the phases' line: `state` is done, now or next."""

    label: str
    meaning: str
    state: str


@dataclass(frozen=True, kw_only=True)
class DiffRow:
    """One knob, in the baseline and in the best configuration."""

    knob: str
    baseline: Any
    best: Any

    @property
    def changed(self) -> bool:
        return bool(self.baseline != self.best)


@dataclass(frozen=True, kw_only=True)
class NotToldApart:
    """A trial that may be as fast as the fastest; `runs` of its measurements count."""

    number: int
    tokens_per_second: float
    runs: int


@dataclass(frozen=True, kw_only=True)
class BestView:
    """The best configuration against the baseline.

    Attributes:
        standing: ``so far`` while the study runs, then ``confirmed`` or ``not confirmed``.
        is_baseline: nothing was faster than the configuration there was.
        speedup: tokens per second over the baseline's.
        of_rounds: that is from rounds that measured both, and not the ratio of the two rates.
        unit: of throughput.
    """

    trial_number: int
    standing: str
    tokens_per_second: float
    unit: str
    interval: tuple[float, float]
    step_seconds: float
    peak_device_bytes: int
    peak_host_bytes: int
    baseline_number: int | None
    baseline_tokens_per_second: float | None
    baseline_peak_device_bytes: int | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    ties: tuple[NotToldApart, ...]
    diff: tuple[DiffRow, ...]

    @property
    def of_rounds(self) -> bool:
        return is_of_rounds(self)

    @property
    def is_baseline(self) -> bool:
        return self.trial_number == self.baseline_number

    @property
    def memory_change(self) -> float | None:
        """Peak device bytes over the baseline's."""
        if not self.baseline_peak_device_bytes:
            return None
        return self.peak_device_bytes / self.baseline_peak_device_bytes


@dataclass(frozen=True, kw_only=True)
class StudyPage:
    """The study page but for the trials table and the charts."""

    study: Study
    cue: Cue
    model: str
    devices: str
    progress: ProgressView
    phases: tuple[PhaseStep, ...]
    current: Trial | None
    best: BestView | None
    plan: PlanView | None
    outcomes: tuple[tuple[Cue, int], ...]
    limit_bytes: int | None

    @property
    def live(self) -> bool:
        """Whether anything can still change."""
        return not self.study.state.is_final

    @property
    def only_plans(self) -> bool:
        """Whether nothing is measured: the page shows the plan alone."""
        return self.study.request.mode == "plan"

    @property
    def phase_meaning(self) -> str:
        return PHASES[self.study.phase][1] if self.study.phase else ""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A predicted quantity beside the measured one; `error` is predicted over measured, less one."""

    label: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class MemoryBar:
    """Predicted device bytes by term, with marks for the measured peak and the limit, on one scale."""

    segments: tuple[Segment, ...]
    measured: float | None
    limit: float | None
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class TrialPage:
    """The page of one trial."""

    study: Study
    trial: Trial
    cue: Cue
    role: str
    rate: Throughput | None
    gain: float | None
    peak_device_bytes: int | None
    peak_host_bytes: int | None
    last_run: Measurement | None
    compared: tuple[Compared, ...]
    phases: tuple[Segment, ...]
    memory: MemoryBar | None
    diff: tuple[DiffRow, ...]
    previous: int | None
    next: int | None

    @property
    def some_contended(self) -> bool:
        """Whether some runs, but not all, were taken under contention: these do not count."""
        marks = {run.contended for run in self.trial.measurements}
        return marks == {True, False}


def study_row(study: Study) -> StudyRow:
    """A study in one line."""
    best = study.best
    return StudyRow(
        id=study.id, name=study.request.name, model=describe_model(study.request.model), devices=devices_text(study),
        cue=study_cue(study), phase=_phase_text(study), error=study.error, progress=progress_view(study),
        tokens_per_second=best.tokens_per_second if best else None, unit=rate_unit(best) if best else "",
        gain=best.speedup if best else None,
        tie=bool(best and best.tie_with), only_plans=study.request.mode == "plan", created_at=study.created_at)


def study_page(study: Study, trials: Sequence[Trial], *, plan: PlanView | None = None) -> StudyPage:
    """The study page from the study and all its trials."""
    counts = {outcome: sum(trial.outcome is outcome for trial in trials) for outcome in Outcome}
    return StudyPage(
        study=study, cue=study_cue(study), model=describe_model(study.request.model), devices=devices_text(study),
        progress=progress_view(study), phases=phase_steps(study),
        current=next((trial for trial in reversed(trials) if trial.outcome is None), None),
        best=best_view(study, trials), plan=plan,
        outcomes=tuple((OUTCOMES[outcome], number) for outcome, number in counts.items() if number),
        limit_bytes=memory_limit(study))


def trial_page(study: Study, trial: Trial, trials: Sequence[Trial]) -> TrialPage:
    """The page of one trial, compared with trial 0 of its study."""
    rate = told_throughput(trial)
    baseline = next((other for other in trials if other.number == 0), None)
    numbers = [other.number for other in trials]
    last_run = trial.measurements[-1] if trial.measurements else None
    return TrialPage(
        study=study, trial=trial, cue=trial_cue(trial), role=ROLES[trial.role], rate=rate,
        gain=gain_over(baseline, trial, study.best),
        peak_device_bytes=trial.peak_device_bytes, peak_host_bytes=trial.peak_host_bytes, last_run=last_run,
        compared=compare(trial), phases=phase_segments(trial),
        memory=memory_bar(trial.prediction, trial.peak_device_bytes, memory_limit(study)),
        diff=config_diff(baseline.config if baseline else trial.config, trial.config),
        previous=max((number for number in numbers if number < trial.number), default=None),
        next=min((number for number in numbers if number > trial.number), default=None))


def devices_text(study: Study) -> str:
    """How many of which: ``2 × CPU``, and by the device's name once it is known; of a plan, by the cluster's."""
    hardware = study.request.hardware
    if hardware.cluster_name is not None:
        return f"{hardware.devices} × {hardware.cluster_name}"
    if study.best is not None:
        return f"{hardware.devices} × {study.best.hardware_profile.device_name}"
    if hardware.device != "auto":
        return f"{hardware.devices} × {hardware.device.upper()}"
    return "1 device" if hardware.devices == 1 else f"{hardware.devices} devices"


def memory_limit(study: Study) -> int | None:
    """Device bytes per rank a trial may use: the request's limit, else an accelerator's memory where it is known."""
    limit = study.request.hardware.memory_limit_bytes
    if limit is None and study.best is not None and study.best.hardware_profile.device_type != "cpu":
        return study.best.hardware_profile.memory_bytes
    return limit


def progress_view(study: Study) -> ProgressView:
    """Progress with repeats counted as work, so that the bar does not stand still while finalists are confirmed."""
    progress = study.progress
    done = progress.trials_finished + progress.repeats_finished
    total = None if progress.trials_total is None else progress.trials_total + (progress.repeats_total or 0)
    fraction = None if not total else min(done / total, 1.0)
    if study.state is StudyState.SUCCEEDED:
        fraction = 1.0
    elapsed = progress.elapsed_seconds
    if study.state.is_final and study.started_at and study.finished_at:
        elapsed = (study.finished_at - study.started_at).total_seconds()
    return ProgressView(finished=progress.trials_finished, total=progress.trials_total,
                        repeats_finished=progress.repeats_finished, repeats_total=progress.repeats_total,
                        elapsed_seconds=elapsed, rest_seconds=progress.predicted_rest_seconds, fraction=fraction)


def phase_steps(study: Study) -> tuple[PhaseStep, ...]:
    """The phases in order, each done, now or next. A finished study has done all; one that stopped, what it reached."""
    order = [StudyPhase.PROBING] if study.request.mode == "plan" else list(StudyPhase)
    reached = order.index(study.phase) if study.phase else -1
    if study.state is StudyState.SUCCEEDED:
        reached = len(order)
    running = study.state is StudyState.RUNNING
    states = ["done" if index < reached else "next" if index > reached else "now" if running else "stopped"
              for index in range(len(order))]
    return tuple(PhaseStep(label=PHASES[phase][0], meaning=PHASES[phase][1], state=state)
                 for phase, state in zip(order, states, strict=True))


def best_view(study: Study, trials: Sequence[Trial]) -> BestView | None:
    """The winner, or the fastest trial so far; None where no trial ended well."""
    if study.best is not None:
        return _stored_best(study, study.best, trials)
    best = fastest(tuple(trials))
    if best is None:
        return None
    rate, peak = shown_throughput(best), best.peak_device_bytes
    assert rate is not None
    assert peak is not None
    baseline = next((trial for trial in trials if trial.number == 0), None)
    baseline_rate = shown_throughput(baseline) if baseline else None
    return BestView(
        trial_number=best.number, standing="not confirmed" if study.state.is_final else "so far",
        tokens_per_second=rate.tokens_per_second, unit=rate_unit(rate), interval=rate.interval,
        step_seconds=rate.step_seconds,
        peak_device_bytes=peak, peak_host_bytes=best.peak_host_bytes or 0,
        baseline_number=baseline.number if baseline else None,
        baseline_tokens_per_second=baseline_rate.tokens_per_second if baseline_rate else None,
        baseline_peak_device_bytes=baseline.peak_device_bytes if baseline else None,
        speedup=shown_gain(best, baseline),
        speedup_interval=None, ties=(), diff=config_diff(baseline.config if baseline else best.config, best.config))


def config_diff(baseline: TrainConfig, best: TrainConfig) -> tuple[DiffRow, ...]:
    """Every knob; the changed ones first, in the contract's order."""
    rows = [DiffRow(knob=name, baseline=getattr(baseline, name), best=getattr(best, name)) for name in KNOBS]
    return tuple(sorted(rows, key=lambda row: not row.changed))


def compare(trial: Trial) -> tuple[Compared, ...]:
    """Prediction beside measurement, where there is a prediction."""
    prediction, rate = trial.prediction, shown_throughput(trial)
    if prediction is None:
        return ()
    return (Compared(label="Peak device memory", unit="bytes", predicted=prediction.peak_device_bytes,
                     measured=trial.peak_device_bytes),
            Compared(label="Peak host memory", unit="bytes", predicted=prediction.peak_host_bytes,
                     measured=trial.peak_host_bytes),
            Compared(label="Step time", unit="seconds", predicted=prediction.step_seconds,
                     measured=rate.step_seconds if rate else None))


def phase_segments(trial: Trial) -> tuple[Segment, ...]:
    """Mean seconds per step by phase, as pieces of one bar."""
    values = {MEASURED_PARTS[name]: seconds for name, seconds in phase_seconds(trial).items()}
    return segments(values, scale=sum(values.values()))


def memory_bar(prediction: Prediction | None, measured: int | None, limit: int | None) -> MemoryBar | None:
    """Predicted terms on a scale that also holds the measured peak and, if it is not far off, the limit."""
    if prediction is None:
        return None
    total = sum(prediction.device_bytes.values())
    largest = max(total, measured or 0)
    shown_limit = limit if limit is not None and limit <= 3 * largest else None
    scale = 1.04 * max(largest, shown_limit or 0)
    if not scale:
        return None
    return MemoryBar(segments=segments(dict(prediction.device_bytes), scale=scale), total_bytes=total,
                     measured=None if measured is None else 100 * measured / scale,
                     limit=None if shown_limit is None else 100 * shown_limit / scale)


def _stored_best(study: Study, best: BestConfig, trials: Sequence[Trial]) -> BestView:
    standing = "confirmed" if best.confirmed else "not confirmed" if study.state.is_final else "so far"
    baseline = next((trial for trial in trials if trial.number == best.baseline_trial_number), None)
    baseline_rate = throughput(baseline) if baseline else None
    return BestView(
        trial_number=best.trial_number, standing=standing, tokens_per_second=best.tokens_per_second,
        unit=rate_unit(best),
        interval=best.tokens_per_second_interval, step_seconds=best.step_seconds,
        peak_device_bytes=best.peak_device_bytes, peak_host_bytes=best.peak_host_bytes,
        baseline_number=best.baseline_trial_number,
        baseline_tokens_per_second=baseline_rate.tokens_per_second if baseline_rate else None,
        baseline_peak_device_bytes=best.baseline_peak_device_bytes, speedup=best.speedup,
        speedup_interval=best.speedup_interval, ties=_ties(best, trials),
        diff=config_diff(baseline.config if baseline else best.config, best.config))


def _ties(best: BestConfig, trials: Sequence[Trial]) -> tuple[NotToldApart, ...]:
    tied = [(trial, throughput(trial)) for trial in trials if trial.number in best.tie_with]
    return tuple(NotToldApart(number=trial.number, tokens_per_second=rate.tokens_per_second, runs=valid_runs(trial))
                 for trial, rate in tied if rate is not None)


def _phase_text(study: Study) -> str | None:
    return study.phase.value if study.phase and study.state is StudyState.RUNNING else None
