"""What a worker group is asked and what it answers: frozen values, JSON on the wire."""

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.config import OptimizerConfig, TrainConfig
from engine.profile import HardwareProfile, ModelProfile
from engine.spec import ModelSpec
from engine.values import Count, Precision, Real, Value, Whole


class Outcome(StrEnum):
    """How a trial ended. Only `ok` can win a study."""

    OK = "ok"
    PRUNED = "pruned"
    OOM_DEVICE = "oom_device"
    OOM_HOST = "oom_host"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    NON_FINITE = "non_finite"
    NUMERICS_DRIFT = "numerics_drift"
    IMPLAUSIBLE = "implausible"
    CANCELLED = "cancelled"

    @property
    def is_out_of_memory(self) -> bool:
        return self in (Outcome.OOM_DEVICE, Outcome.OOM_HOST)


MAYBE_FROM_OUTSIDE = "it may have been killed from outside"
"""Ends the first line of the detail of a trial that is `oom_host` for want of a better guess: a process was killed
without a word while the host did not seem short of memory."""


class MeasurePolicy(Value):
    """How long a trial measures.

    Steps are discarded until step time is steady. Those that show it, and the steps after them, are measured until the
    95 % confidence interval of their trimmed mean is within `target_relative_interval` of it (half width over mean), or
    a limit is reached.
    """

    max_warmup_steps: Whole = Field(8, ge=1)
    min_steps: Whole = Field(5, ge=2, description="where not given, no more than max_steps")
    max_steps: Whole = Field(30, ge=2)
    target_relative_interval: Real = Field(0.03, gt=0)
    max_seconds: Real = Field(60.0, gt=0, description="measured steps stop at the first step boundary after this")

    @model_validator(mode="before")
    @classmethod
    def _default_minimum_within_maximum(cls, data: Any) -> Any:
        if isinstance(data, dict) and "min_steps" not in data and data.get("max_steps") in (2, 3, 4):
            return {**data, "min_steps": data["max_steps"]}
        return data

    @model_validator(mode="after")
    def _minimum_within_maximum(self) -> Self:
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps {self.min_steps} is more than max_steps {self.max_steps}: lower one or raise "
                             "the other")
        return self


class TrialRequest(Value):
    """One configuration to measure once."""

    kind: Literal["trial"] = "trial"
    model: ModelSpec
    optimizer: OptimizerConfig
    config: TrainConfig
    global_batch_size: Count
    seed: int = 0
    policy: MeasurePolicy = MeasurePolicy()
    memory_limit_bytes: int | None = Field(None, ge=1, description="device bytes per rank; on CPU too")
    hopeless_step_seconds: Real | None = Field(None, gt=0, description="once the mean step time is surely longer, "
                                               "measuring ends, and the outcome is `pruned`")


class ProbeRequest(Value):
    kind: Literal["probe"] = "probe"
    model: ModelSpec
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


class CalibrateRequest(Value):
    kind: Literal["calibrate"] = "calibrate"


WorkerRequest = Annotated[TrialRequest | ProbeRequest | CalibrateRequest, Field(discriminator="kind")]


class StateBytes(Value):
    """Bytes of model state that one rank really holds, summed over storages, padding included."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = Field(description="of these, bytes that live on the host (offload)")


class PhaseSeconds(Value):
    """Mean seconds per optimizer step by phase, rank 0; they sum to the trimmed mean of the step time."""

    data: float
    forward: float
    backward: float
    step: float
    host_step: float | None = Field(None, description="of step, with offload: the optimizer on the host")
    transfer: float | None = Field(None, description="of step, with offload: transfers that the host waited for, and "
                                   "its copies for them")


class Measurement(Value):
    """What a trial yielded. Lists are in step order; losses are means over the global batch, None where not finite."""

    step_seconds: tuple[float, ...] = Field(description="end-to-end wall time of every measured optimizer step")
    warmup_seconds: tuple[float, ...] = Field(description="the discarded first steps")
    tokens_per_second: float
    tokens_per_second_interval: tuple[float, float] = Field(description="95 % confidence interval")
    samples_per_second: float
    peak_device_bytes: int = Field(description="largest over ranks")
    peak_host_bytes: int = Field(description="largest over ranks; offloaded state and its buffers")
    phases: PhaseSeconds
    losses: tuple[float | None, ...] = Field(description="of every step, warm-up included")
    skipped_steps: int = Field(0, description="of all steps, those not applied because gradients overflowed")
    state_bytes: StateBytes
    world_size: int
    threads_per_rank: int
    setup_seconds: float = Field(description="building the model and the engine, before the first step")
    contended: bool = Field(False, description="other processes took a noticeable part of the devices meanwhile")
    compute_dtype: Precision = Field(description="as read from the parameters while training")
    notes: tuple[str, ...] = ()


class TrialReport(Value):
    """The verdict on one trial; there always is one."""

    kind: Literal["trial"] = "trial"
    outcome: Outcome
    detail: str = Field("", description="for anything but ok: what happened, with the exception's text")
    failed_step: int | None = Field(None, description="0-based optimizer step in which it failed")
    failed_rank: int | None = None
    peak_device_bytes: int | None = Field(None, description="largest over ranks, where it is known; also where too few "
                                          "steps were measured for a measurement")
    measurement: Measurement | None = Field(None, description="present when ok, and where steps were measured before "
                                            "another outcome")


class ProbeReport(Value):
    kind: Literal["probe"] = "probe"
    profile: ModelProfile


class CalibrateReport(Value):
    kind: Literal["calibrate"] = "calibrate"
    profile: HardwareProfile


class FailureReport(Value):
    """A probe or calibration that failed."""

    kind: Literal["failure"] = "failure"
    detail: str
    log_tail: str = ""


class TrialProgress(Value):
    """Where a rank is while a trial runs."""

    kind: Literal["progress"] = "progress"
    phase: Literal["setup", "warmup", "measuring"]
    step: int
    step_seconds: float | None = None


WorkerReport = Annotated[TrialReport | ProbeReport | CalibrateReport | FailureReport | TrialProgress,
                         Field(discriminator="kind")]
