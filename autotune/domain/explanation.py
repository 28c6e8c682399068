"""The evidence beside a winner, as values, and the part of it that a measurement tells by itself."""

from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from autotune.domain.study import Trial
from autotune.domain.throughput import shown_runs, told_throughput
from engine.config import TrainConfig
from engine.report import PhaseSeconds, StateBytes
from engine.statistics import robust_mean
from engine.values import Value

Evidence = Literal["measured", "predicted", "does_not_fit", "failed", "impossible"]


class Memory(Value):
    """Bytes of the rank that holds most.

    Terms sum to their peak. Those measured are together more, and their rest is 0, where each is most on another rank.
    """

    predicted_bytes: dict[str, int] = Field(description="on the device, by term; empty where nothing was predicted")
    predicted_peak_bytes: int
    measured_bytes: dict[str, int] = Field(
        description="on the device, by term: parameters; gradients, the most held at once, with those being reduced; "
        "optimizer; rest: what the peak has beyond them, such as activations, buckets and workspace")
    measured_peak_bytes: int
    predicted_host_bytes: dict[str, int] = Field(description="on the host (offload), by term; empty where nothing was "
                                                 "predicted")
    measured_host_bytes: dict[str, int] = Field(description="on the host, by term: parameters, optimizer, and rest: "
                                                "buffers for transfers")
    measured_peak_host_bytes: int
    limit_bytes: int = Field(description="that a rank may use on the device")


class Time(Value):
    """Seconds of one optimizer step."""

    predicted_seconds: dict[str, float] = Field(description="by term; empty where no time was predicted")
    predicted_step_seconds: float | None
    measured_seconds: dict[str, float] = Field(
        description="by phase: data, forward, backward, step; with offload host_step, the optimizer on the host, and "
        "transfer, which the host waited for: step is then what it took beside these")
    measured_step_seconds: float


class Step(Value):
    """One knob at another value, everything else as the winner has it."""

    value: Any
    evidence: Evidence
    tokens_per_second: float | None = Field(description="measured, or expected from all trials of the study")
    change: float | None = Field(description="of throughput against the winner; -0.1: a tenth slower")
    trial_number: int | None = None
    detail: str = ""


class KnobEffect(Value):
    name: str
    value: Any = Field(description="the winner's")
    steps: tuple[Step, ...] = Field(description="one up and one down of an ordinal knob, every other value of a choice")


class Explanation(Value):
    """The evidence beside a winner.

    Attributes:
        binding: what keeps it from being faster, in words.
    """

    trial_number: int
    config: TrainConfig
    memory: Memory
    time: Time
    binding: str
    knobs: tuple[KnobEffect, ...]


def phase_seconds(trial: Trial) -> dict[str, float]:
    """A step's mean seconds by phase, over the runs that its step time is over; empty where nothing was measured."""
    runs = shown_runs(trial)
    if not runs:
        return {}
    means, rate = fmean(robust_mean(run.step_seconds) for run in runs), told_throughput(trial)
    scale = rate.step_seconds / means if rate is not None else 1.0  # a trimmed mean is not the mean of trimmed means
    by_run = [_phases(run.phases) for run in runs]
    return {name: scale * fmean(phases.get(name, 0.0) for phases in by_run) for name in by_run[0]}


def _phases(phases: PhaseSeconds) -> dict[str, float]:
    """Those of offload apart where they were measured."""
    offload = {name: seconds for name in ("host_step", "transfer") if (seconds := getattr(phases, name)) is not None}
    return {"data": phases.data, "forward": phases.forward, "backward": phases.backward,
            "step": max(phases.step - sum(offload.values()), 0.0), **offload}


def held_bytes(state: StateBytes, config: TrainConfig, *, device_peak: int, host_peak: int
               ) -> tuple[dict[str, int], dict[str, int]]:
    """What a trial held on its device, and on its host: state by kind, and the rest of the peak."""
    host_parameters = state.parameters if config.offload_param else 0
    host_optimizer = max(state.host - host_parameters, 0)
    return (_with_rest(device_peak, parameters=state.parameters - host_parameters, gradients=state.gradients,
                       optimizer=max(state.optimizer - host_optimizer, 0)),
            _with_rest(host_peak, parameters=host_parameters, optimizer=host_optimizer))


def _with_rest(peak: int, **kinds: int) -> dict[str, int]:
    return {**kinds, "rest": max(peak - sum(kinds.values()), 0)}
