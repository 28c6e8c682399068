"""Studies and trials: states, what they carry, and which change may follow which."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import Field

from autotune.domain.prediction import Prediction
from autotune.domain.request import StudyRequest
from engine.config import TrainConfig
from engine.profile import HardwareProfile, ModelProfile
from engine.report import Measurement, Outcome
from engine.values import Value


class StudyState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return not STUDY_TRANSITIONS[self]


STUDY_TRANSITIONS: dict[StudyState, frozenset[StudyState]] = {
    StudyState.QUEUED: frozenset({StudyState.RUNNING, StudyState.CANCELLED, StudyState.FAILED}),
    StudyState.RUNNING: frozenset({StudyState.SUCCEEDED, StudyState.FAILED, StudyState.CANCELLED}),
    StudyState.SUCCEEDED: frozenset(),
    StudyState.FAILED: frozenset(),
    StudyState.CANCELLED: frozenset(),
}


class StudyPhase(StrEnum):
    """What a running study is doing."""

    PROBING = "probing"
    CALIBRATING = "calibrating"
    SEARCHING = "searching"
    CONFIRMING = "confirming"


class TrialState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"


class TrialRole(StrEnum):
    """Why a configuration was tried."""

    BASELINE = "baseline"
    """Trial 0: the user's own configuration, else the default one."""
    DEFAULT = "default"
    """The default configuration, where the user gave a baseline of their own."""
    REFERENCE = "reference"
    """What the others' losses are held against, where the baseline has no fp32 masters."""
    SUGGESTED = "suggested"
    """Proposed by the sampler."""


class Trial(Value):
    """One configuration and all that was measured of it.

    Attributes:
        measurement: of the first run; None where no step was measured.
        repeats: further measurements of the same configuration, taken to confirm a finalist, in order.
    """

    study_id: str
    number: int
    role: TrialRole
    state: TrialState
    config: TrainConfig
    prediction: Prediction | None = None
    outcome: Outcome | None = None
    detail: str = ""
    measurement: Measurement | None = None
    repeats: tuple[Measurement, ...] = ()
    started_at: datetime
    finished_at: datetime | None = None

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return () if self.measurement is None else (self.measurement, *self.repeats)

    @property
    def step_samples(self) -> tuple[float, ...]:
        """Seconds of every measured step over all measurements."""
        return tuple(seconds for measurement in self.measurements for seconds in measurement.step_seconds)

    @property
    def peak_device_bytes(self) -> int | None:
        """Largest per rank over all measurements; None where there is none."""
        return max((measurement.peak_device_bytes for measurement in self.measurements), default=None)

    @property
    def peak_host_bytes(self) -> int | None:
        """As `peak_device_bytes`, of what was offloaded."""
        return max((measurement.peak_host_bytes for measurement in self.measurements), default=None)


class Progress(Value):
    """How far a study is.

    Attributes:
        trials_total: how many there will be at most (budget or size of the space); None before the plan is made.
    """

    trials_finished: int = 0
    trials_total: int | None = None
    repeats_finished: int = 0
    repeats_total: int | None = None
    elapsed_seconds: float = 0.0
    predicted_rest_seconds: float | None = None


class BestConfig(Value):
    """A study's winner with its evidence; stored per model, training set-up and hardware fingerprint.

    Attributes:
        speedup: tokens per second over the baseline's; None where the baseline could not be measured.
        speedup_interval: 95 % interval of it.
        confirmed: measured again beside the other finalists.
        tie_with: numbers of finalists that may be as fast as the fastest.
    """

    study_id: str
    trial_number: int
    model_name: str
    model_fingerprint: str
    training_fingerprint: str
    hardware_fingerprint: str
    request: StudyRequest
    config: TrainConfig
    model_profile: ModelProfile
    hardware_profile: HardwareProfile
    tokens_per_second: float
    tokens_per_second_interval: tuple[float, float]
    samples_per_second: float
    step_seconds: float
    peak_device_bytes: int
    peak_host_bytes: int
    baseline_trial_number: int | None = None
    baseline_tokens_per_second: float | None = None
    baseline_peak_device_bytes: int | None = None
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None
    confirmed: bool
    tie_with: tuple[int, ...] = ()
    created_at: datetime


class PlanSummary(Value):
    """What the plan found before the first trial; kept with the study."""

    space: dict[str, list[Any]] = Field(description="the knobs that vary and their values")
    points: int = Field(description="distinct configurations in the space")
    feasible: int
    rejections: dict[str, int] = Field(description="how many were dropped, by reason")
    examples: dict[str, TrainConfig] = Field(default_factory=dict, description="one dropped configuration per reason")
    predictions: tuple[tuple[TrainConfig, Prediction], ...] = Field((), description="feasible configurations, at most "
                                                                    "1,000, smallest predicted memory first")
    fastest: tuple[tuple[TrainConfig, Prediction], ...] = Field((), description="those predicted to be fastest, "
                                                                "at most 20, fastest first")


class Study(Value):
    """One tuning job and where it stands.

    Attributes:
        error: why it failed; None otherwise.
        note: how a succeeded study ended: budget spent, space exhausted ...
        lease_epoch: grows by one whenever a scheduler claims the study; later writes name it.
    """

    id: str
    request: StudyRequest
    state: StudyState
    phase: StudyPhase | None = None
    error: str | None = None
    note: str | None = None
    cancel_requested: bool = False
    progress: Progress = Progress()
    plan: PlanSummary | None = None
    best: BestConfig | None = None
    model_fingerprint: str | None = None
    hardware_fingerprint: str | None = None
    lease_epoch: int = 0
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class EventKind(StrEnum):
    STUDY_STATE = "state"
    STUDY_PHASE = "phase"
    TRIAL_STARTED = "trial_started"
    TRIAL_PROGRESS = "trial_progress"
    TRIAL_FINISHED = "trial_finished"
    BEST_CHANGED = "best_changed"


class Event(Value):
    """Something that happened to a study; `id` grows over all studies."""

    id: int
    study_id: str
    kind: EventKind
    data: dict[str, Any]
    created_at: datetime

    @property
    def ends_study(self) -> bool:
        """Whether nothing can follow in its study."""
        return self.kind is EventKind.STUDY_STATE and StudyState(self.data["state"]).is_final
