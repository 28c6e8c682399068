"""Why the winner won: where its memory and time go, what binds, and what each knob would have cost. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.domain.explanation import Evidence, Explanation, KnobEffect, Memory, Step, Time, held_bytes, phase_seconds
from autotune.domain.prediction import Prediction
from autotune.domain.study import BestConfig, Trial
from autotune.domain.throughput import shown_throughput
from autotune.search.arrays import plan_arrays
from autotune.search.history import measured_rate
from autotune.search.plan import Plan, make_plan
from autotune.search.points import Knob, reason_of
from autotune.search.space import parse_space
from autotune.search.surrogate import learn
from engine.config import TrainConfig
from engine.report import Outcome


def explain(best: BestConfig, trials: Sequence[Trial]) -> Explanation:
    """The winner's evidence, from it and the trials of its study."""
    winner = next(trial for trial in trials if trial.number == best.trial_number)
    assert winner.measurement is not None
    space = parse_space(best.request)
    plan = make_plan(best.request, space, best.model_profile, best.hardware_profile)
    neighbours = _Neighbours(best, plan, trials)
    prediction = plan.predict_or_none(best.config)
    on_device, on_host = held_bytes(winner.measurement.state_bytes, best.config, device_peak=best.peak_device_bytes,
                                    host_peak=best.peak_host_bytes)
    knobs = tuple(KnobEffect(name=knob.name, value=getattr(best.config, knob.name),
                             steps=tuple(neighbours.steps(knob)))
                  for knob in space.knobs if knob.is_active(best.config))
    return Explanation(
        trial_number=best.trial_number, config=best.config,
        memory=Memory(predicted_bytes=prediction.device_bytes if prediction else {},
                      predicted_peak_bytes=prediction.peak_device_bytes if prediction else 0,
                      measured_bytes=on_device, measured_peak_bytes=best.peak_device_bytes,
                      predicted_host_bytes=prediction.host_bytes if prediction else {},
                      measured_host_bytes=on_host, measured_peak_host_bytes=best.peak_host_bytes,
                      limit_bytes=plan.limits.device_bytes),
        time=Time(predicted_seconds=prediction.seconds if prediction else {},
                  predicted_step_seconds=prediction.step_seconds if prediction else None,
                  measured_seconds=phase_seconds(winner), measured_step_seconds=best.step_seconds),
        binding=_binding(knobs, prediction), knobs=knobs)


class _Neighbours:
    """Configurations one knob away from the winner, and what is known of them."""

    def __init__(self, best: BestConfig, plan: Plan, trials: Sequence[Trial]) -> None:
        self._best, self._plan, self._space, self._limits = best, plan, plan.space, plan.limits
        self._tried = {plan.canonical(trial.config): trial for trial in trials}
        self._own = plan.predict_or_none(best.config)
        self._expected = _expected_seconds(plan, trials)

    def steps(self, knob: Knob) -> Iterator[Step]:
        for value in _others(knob, getattr(self._best.config, knob.name)):
            try:
                config = self._space.moved(self._best.config, knob.name, value)
            except ValueError as error:
                yield Step(value=value, evidence="impossible", tokens_per_second=None, change=None,
                           detail=reason_of(error))
                continue
            yield self._step(value, config)

    def _step(self, value: Any, config: TrainConfig) -> Step:
        trial = self._tried.get(self._plan.canonical(config))
        if trial is not None and trial.outcome in (Outcome.OK, Outcome.PRUNED):
            rate = shown_throughput(trial)
            tokens = rate.tokens_per_second if rate is not None else measured_rate(trial)
            if tokens is not None:
                return self._at_rate(value, "measured", tokens, trial.number)
        if trial is not None and trial.outcome is not None:
            return Step(value=value, evidence="failed", tokens_per_second=None, change=None, trial_number=trial.number,
                        detail=f"{trial.outcome.value}: {trial.detail.partition(chr(10))[0]}".rstrip(": "))
        prediction = self._plan.predict_or_none(config)
        if prediction is None:
            return Step(value=value, evidence="impossible", tokens_per_second=None, change=None,
                        detail="the model could not be probed for it")
        if not self._limits.allow(prediction):
            return Step(value=value, evidence="does_not_fit", tokens_per_second=None, change=None,
                        detail=self._limits.excess(prediction))
        if prediction.step_seconds is None or self._own is None or not self._own.step_seconds:
            return Step(value=value, evidence="predicted", tokens_per_second=None, change=None)
        ratio = self._own.step_seconds / prediction.step_seconds
        place, own = (self._plan.index.get(self._plan.canonical(each)) for each in (config, self._best.config))
        if self._expected is not None and place is not None and own is not None:
            ratio = float(self._expected[own] / self._expected[place])
        return self._at_rate(value, "predicted", self._best.tokens_per_second * ratio, None)

    def _at_rate(self, value: Any, evidence: Evidence, tokens_per_second: float, trial_number: int | None) -> Step:
        best, change = self._best, tokens_per_second / self._best.tokens_per_second - 1
        if best.speedup is not None and trial_number is not None and trial_number == best.baseline_trial_number:
            change = 1 / best.speedup - 1  # the study compared these two round by round
        return Step(value=value, evidence=evidence, tokens_per_second=tokens_per_second, trial_number=trial_number,
                    change=change)


def _expected_seconds(plan: Plan, trials: Sequence[Trial]) -> NDArray[np.float64] | None:
    """(candidates,) step seconds expected of each from its prediction and what the trials measured; None before any."""
    measured = {place: rate for trial in trials if trial.outcome in (Outcome.OK, Outcome.PRUNED)
                and (place := plan.index.get(plan.canonical(trial.config))) is not None
                and (rate := measured_rate(trial)) is not None}
    if not measured:
        return None
    seconds = np.log(plan.tokens_per_step / np.array([*measured.values()]))
    expected: NDArray[np.float64] = np.exp(learn(plan_arrays(plan).time, [*measured], seconds).mean)
    return expected


def _others(knob: Knob, value: Any) -> Sequence[Any]:
    if not knob.kind.ordinal or value not in knob.values:
        return [other for other in knob.values if other != value]
    place = knob.values.index(value)
    return [*knob.values[max(place - 1, 0):place], *knob.values[place + 1:place + 2]]


def _binding(knobs: Sequence[KnobEffect], prediction: Prediction | None) -> str:
    """Memory where one step to something else does not fit; else the largest part of the time."""
    tight = [f"{knob.name} {step.value} does not fit ({step.detail})" for knob in knobs for step in knob.steps
             if step.evidence == "does_not_fit" or (step.evidence == "failed" and step.detail.startswith("oom"))]
    if tight:
        return f"memory: {'; '.join(tight)}"
    if prediction is None or not prediction.step_seconds:
        return "time: nothing is known of where it goes"
    term = max(prediction.seconds, key=lambda name: prediction.seconds[name], default="")
    share = prediction.seconds.get(term, 0.0) / prediction.step_seconds
    return f"time: {share:.0%} of the predicted step is {term.replace('_', ' ')}; memory is left"
