"""Measurements that cannot be trusted, however fast: training that went another way, rates that hardware cannot have.

Batches are made by the sample's global number, so every trial of a study trains on the same samples in the same order,
from the same weights, and its losses are those of the reference trial up to rounding. Pure.
"""

from collections.abc import Sequence
from itertools import product
from statistics import fmean, median
from typing import Any

from autotune.domain.study import Trial, TrialState
from autotune.search.plan import Plan
from engine.config import TrainConfig
from engine.report import Measurement, Outcome, TrialReport
from engine.values import Precision

_TOLERANCE: dict[Precision, float] = {"fp32": 0.005, "bf16": 0.02, "fp16": 0.02}
"""Relative difference of losses that rounding explains; the larger of the trial's and the reference's counts."""

_COMPARED_STEPS = 20
"""Later ones tell less: rounding grows with every step."""

_CALMER = 1.5
"""Two curves of equal noise, of a dozen steps, seem to differ by about so much."""

_ANOTHER_MICRO_BATCH = "another micro_batch_size"

_PLAUSIBLE = 1.2
"""Of the calibrated matmul rate: that was measured too, maybe beside other work."""


def gated(report: TrialReport, config: TrainConfig, plan: Plan, trials: Sequence[Trial]) -> TrialReport:
    """The report as it counts: a good one that cannot be trusted gets the outcome that says why.

    Args:
        trials: of the study so far.
    """
    measurement = report.measurement
    if report.outcome is not Outcome.OK or measurement is None:
        return report
    if (reason := implausible(measurement, config, plan)) is not None:
        return report.model_copy(update={"outcome": Outcome.IMPLAUSIBLE, "detail": reason})
    if (reason := _drift(measurement, config, reference_trial(trials))) is not None:
        return report.model_copy(update={"outcome": Outcome.NUMERICS_DRIFT, "detail": reason})
    return report


def judged_again(trials: Sequence[Trial]) -> list[Trial]:
    """Those that end otherwise beside the reference that there is now, as they then count: it may have come after them.

    Args:
        trials: of a study that has not begun to repeat measurements.
    """
    changed = []
    reference = reference_trial(trials)
    for trial in trials:
        if trial.measurement is None or trial.outcome not in (Outcome.OK, Outcome.NUMERICS_DRIFT):
            continue
        reason = _drift(trial.measurement, trial.config, reference)
        outcome = Outcome.OK if reason is None else Outcome.NUMERICS_DRIFT
        if outcome is not trial.outcome:
            changed.append(trial.model_copy(update={"outcome": outcome, "detail": reason or ""}))
    return changed


def implausible(measurement: Measurement, config: TrainConfig, plan: Plan) -> str | None:
    """Why a rate cannot be true: more operations a second than the devices' best matrix products."""
    peak = plan.hardware.matmul_flops_per_second.get(config.precision)
    rate = plan.model.flops_per_sample * measurement.samples_per_second / plan.hardware.world_size
    if not peak or rate <= _PLAUSIBLE * peak:
        return None
    return (f"{rate / 1e9:.3g} GFLOP/s per device would be {rate / peak:.2g} times the {peak / 1e9:.3g} GFLOP/s that "
            f"{config.precision} matrix products reach here: the model's operations cannot all have run")


def reference_trial(trials: Sequence[Trial]) -> Trial | None:
    """The one whose losses the others are held against: with fp32 masters, in fp32 where there is one, the earliest."""
    able = [trial for trial in trials if trial.state is TrialState.FINISHED and trial.outcome is Outcome.OK
            and trial.measurement is not None and _exactness(trial.config) > 0]
    return min(able, key=lambda trial: (-_exactness(trial.config), trial.number), default=None)


def _exactness(config: TrainConfig) -> int:
    """2: all in fp32; 1: with fp32 masters; 0: without."""
    if config.precision == "fp32":
        return 2
    return 1 if config.optimizer_precision == "fp32" else 0


def _drift(measurement: Measurement, config: TrainConfig, reference: Trial | None) -> str | None:
    """As `drifted`; a trial more exact than the reference is not held against it: that would blame the better one."""
    if reference is None or _exactness(config) > _exactness(reference.config):
        return None
    return drifted(measurement, config, reference)


def drifted(measurement: Measurement, config: TrainConfig, reference: Trial) -> str | None:
    """How a trial's losses differ from the reference's by more than rounding explains; None where they do not.

    The first step's loss, before any update, must agree, the median of the steps' differences, and within twice as much
    their upper quartile, lest every other step be far off. A step that was skipped for overflow delays what follows, so
    that a loss may also be one of so many steps before.
    """
    assert reference.measurement is not None
    theirs, skipped = reference.measurement.losses, measurement.skipped_steps
    compared: list[tuple[int, float, float, float]] = []  # step, loss, expected, difference
    for step, loss in enumerate(measurement.losses[:_COMPARED_STEPS]):
        expected = [value for value in theirs[max(step - skipped, 0):step + 1] if value is not None]
        if loss is not None and step < len(theirs) and expected:
            nearest = min(max(loss, min(expected)), max(expected))
            compared.append((step, loss, nearest, abs(loss - nearest)))
    if not compared:
        return None
    scale = max(abs(expected) for _, _, expected, _ in compared) or 1.0
    tolerance = max(_TOLERANCE[config.precision], _TOLERANCE[reference.config.precision])
    noise = _noise(measurement.losses, theirs)
    differences = sorted(difference for *_, difference in compared)
    typical, allowed = median(differences), tolerance * scale + 2.5 * noise
    if (compared[0][-1] <= tolerance * scale + 6 * noise and typical <= allowed  # of one difference, 4 deviations
            and differences[3 * len(differences) // 4] <= 2 * allowed):
        return None
    step, loss, expected_loss, _ = max(compared, key=lambda entry: entry[-1])
    return (f"losses are not those of trial {reference.number} ({reference.config.precision}), trained on the same "
            f"samples: {loss:.6g} instead of {expected_loss:.6g} in step {step}, off by {typical / scale:.2%} in the "
            f"median step where {allowed / scale:.2%} are allowed; it differs in {_differences(config, reference)}")


def reference_configs(plan: Plan) -> list[TrainConfig]:
    """What to try for the others' losses to be held against, where the baseline is not exact, the most exact first.

    The baseline in fp32, and for a baseline without fp32 masters the same with them; each with the baseline's
    micro-batch, or the next smaller one, at the smallest stage that should fit. None that should not fit.
    """
    choices = [{"precision": "fp32", "reduce_dtype": "fp32"}, {}][:2 - _exactness(plan.baseline)]
    found = (_smallest_fitting(plan, {**choice, "optimizer_precision": "fp32"}) for choice in choices)
    return [config for config in found if config is not None]


def improves_reference(config: TrainConfig, trials: Sequence[Trial]) -> bool:
    """Whether no trial so far is as good a reference as this configuration would be."""
    reference = reference_trial(trials)
    return reference is None or _exactness(reference.config) < _exactness(config)


def _smallest_fitting(plan: Plan, changes: dict[str, Any]) -> TrainConfig | None:
    baseline = plan.baseline
    samples = baseline.micro_batch_size * baseline.gradient_accumulation_steps
    sizes = [size for size in range(baseline.micro_batch_size, 0, -1) if samples % size == 0]
    for size, stage in product(sizes, (0, 1, 2, 3)):
        fields = {**baseline.model_dump(), **changes, "zero_stage": stage, "micro_batch_size": size,
                  "gradient_accumulation_steps": samples // size}
        if stage < 3:
            fields["offload_param"] = False
        if stage < 1:
            fields["offload_optimizer_ratio"] = 0.0
        config = TrainConfig.model_validate(fields)
        prediction = plan.predict_or_none(config)
        if prediction is not None and plan.limits.allow(prediction):
            return config
    return None


def set_aside(trials: Sequence[Trial]) -> str | None:
    """Which choices made trials untrustworthy, for the study's note; None where none did."""
    parts = []
    reference = reference_trial(trials)
    for outcome in (Outcome.NUMERICS_DRIFT, Outcome.NON_FINITE, Outcome.IMPLAUSIBLE):
        numbers: dict[str, list[int]] = {}
        for trial in trials:
            if trial.outcome is outcome:
                drifts = outcome is Outcome.NUMERICS_DRIFT and reference is not None
                choice = _differences(trial.config, reference) if drifts else _precision(trial.config)
                numbers.setdefault(choice, []).append(trial.number)
        parts += [f"{outcome.value} in {choice}: {_listed(which)}" for choice, which in numbers.items()]
    if any(_ANOTHER_MICRO_BATCH in part for part in parts):
        parts.append("losses that change with the micro-batch depend on how samples are batched, as with BatchNorm or "
                     "means over unmasked tokens")
    return f"not to be trusted, so left out: {'; '.join(parts)}" if parts else None


def _differences(config: TrainConfig, reference: Trial | None) -> str:
    """The choices that may explain other losses than the reference's: of precision and micro-batch, else all others."""
    assert reference is not None
    theirs = reference.config
    found = []
    if _precision(config) != _precision(theirs):
        found.append(_precision(config))
    if config.micro_batch_size != theirs.micro_batch_size:
        found.append(f"{_ANOTHER_MICRO_BATCH} than trial {reference.number}'s {theirs.micro_batch_size}")
    others = [f"{name} {value}" for name, value in config.model_dump().items() if value != getattr(theirs, name)]
    return " and ".join(found) or ", ".join(others) or "nothing"


def _precision(config: TrainConfig) -> str:
    reduced = "" if config.reduce_dtype == config.precision else f" with reduce_dtype {config.reduce_dtype}"
    if config.optimizer_precision != "fp32":
        return f"precision {config.precision} with optimizer_precision {config.optimizer_precision}{reduced}"
    return f"precision {config.precision}{reduced}"


def _listed(numbers: Sequence[int]) -> str:
    return f"trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _noise(*curves: Sequence[float | None]) -> float:
    """Standard deviation of what is random in a step's loss, such as dropout: of both curves, but hardly more than that
    of the calmer one. What only one of them shows is no property of the task."""
    each = [_deviation(curve) for curve in curves]
    return min(fmean(each), _CALMER * min(each))


def _deviation(curve: Sequence[float | None]) -> float:
    """Of one curve's steps, from how it bends."""
    losses = [loss for loss in curve[:_COMPARED_STEPS] if loss is not None]
    bends = [abs(before - 2 * here + after)
             for before, here, after in zip(losses, losses[1:], losses[2:], strict=False)]
    return fmean(bends) / 1.95 if bends else 0.0  # of normal noise, the mean bend is 1.95 deviations
