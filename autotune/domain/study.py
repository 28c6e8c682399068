"""Studies and trials: states, what they carry, and which change may follow which."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from autotune.domain.errors import FieldError, InvalidRequestError
from autotune.domain.prediction import Prediction
from autotune.domain.request import StudyRequest
from engine.config import TrainConfig
from engine.profile import HardwareProfile, ModelProfile
from engine.report import MAYBE_FROM_OUTSIDE, Measurement, Outcome
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
    """What the others' losses are held against, where the baseline is not in fp32; outside the space it cannot win."""
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
    def is_killed_unexplained(self) -> bool:
        """Whether it is said to have run out of host memory only because nothing better is known."""
        return self.outcome is Outcome.OOM_HOST and MAYBE_FROM_OUTSIDE in self.detail.partition("\n")[0]

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether something follows from it for what needs as much memory."""
        return self.outcome is not None and self.outcome.is_out_of_memory and not self.is_killed_unexplained

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
        speedup: tokens per second over the baseline's, from rounds that measured both where there are two, and not
            from the two rates; None where the baseline could not be measured.
        speedup_interval: 95 % interval of it.
        confirmed: measured again beside the other finalists.
        tie_with: numbers of trials that are not told apart from the fastest: finalists, and trials measured once.
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


class PlannedPoint(Value):
    """A configuration that should fit, and what is expected of it. Nothing here is measured.

    Attributes:
        tensor_parallel: above 1: not something the bundled engine runs. So is pipeline_parallel.
        data_parallel: ranks that hold copies, or parts of one by the stage.
        model_flops_utilization: operations of the model, without recomputation, over the data sheet's peak of all
            devices (MFU, arXiv 2204.02311, appendix B); None where no cluster is described.
    """

    config: TrainConfig
    prediction: Prediction
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    model_flops_utilization: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_a_pair(cls, given: Any) -> Any:
        """A plan's points were once kept as pairs, and may lie in a database."""
        return dict(zip(("config", "prediction"), given, strict=True)) if isinstance(given, tuple | list) else given

    @property
    def runs_here(self) -> bool:
        """Whether the bundled engine, and what is exported for, train like this."""
        return self.tensor_parallel == self.pipeline_parallel == 1


class PlannedConfig(Value):
    """A row of a plan, with what it was predicted from. No winner: it is never stored as a best configuration.

    Attributes:
        row: its place in the ranking, from 1.
    """

    study_id: str
    row: int
    request: StudyRequest
    point: PlannedPoint
    model_profile: ModelProfile
    hardware_profile: HardwareProfile

    @property
    def config(self) -> TrainConfig:
        return self.point.config


class PlanSummary(Value):
    """What the plan found before the first trial; kept with the study."""

    space: dict[str, list[Any]] = Field(description="the knobs that vary and their values")
    points: int = Field(description="distinct configurations in the space")
    feasible: int
    rejections: dict[str, int] = Field(description="how many were dropped, by reason")
    examples: dict[str, TrainConfig] = Field(default_factory=dict, description="one dropped configuration per reason")
    predictions: tuple[PlannedPoint, ...] = Field((), description="feasible configurations, at most 1,000, smallest "
                                                  "predicted memory first")
    fastest: tuple[PlannedPoint, ...] = Field((), description="those predicted to be fastest, at most 20, fastest "
                                              "first; of those that differ in nothing but buckets and overlap, one")
    layouts: tuple[PlannedPoint, ...] = Field((), description="mode plan over several degrees: the fastest of each "
                                              "pair, fastest first")
    device_limit_bytes: int | None = Field(None, description="that one device may use")
    host_limit_bytes: int | None = Field(None, description="of its host, that one device may use")
    model_profile: ModelProfile | None = Field(None, description="mode plan: what was predicted from")
    hardware_profile: HardwareProfile | None = Field(None, description="mode plan: the described devices")

    @property
    def rows(self) -> tuple[PlannedPoint, ...]:
        """`fastest`, and after these what only `layouts` has: rows are counted through them, from 1."""
        return (*self.fastest, *(point for point in self.layouts if point not in self.fastest))

    @property
    def first_exportable(self) -> int | None:
        """The first row that the bundled engine, and the formats that are exported, can train with."""
        return next((row for row, point in enumerate(self.rows, start=1) if point.runs_here), None)


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

    def planned(self, row: int) -> PlannedConfig:
        """A row of the plan for a described cluster, counted from 1.

        Raises:
            InvalidRequestError: no such row, or a study that measures: its winner has no row.
        """
        plan = self.plan
        if plan is None or plan.model_profile is None or plan.hardware_profile is None:
            raise InvalidRequestError(FieldError("row", "only plans of mode plan have rows to export: leave it out"))
        if not 1 <= row <= len(plan.rows):
            raise InvalidRequestError(FieldError("row", f"no row {row}: the plan has 1 to {len(plan.rows)}"))
        return PlannedConfig(study_id=self.id, row=row, request=self.request, point=plan.rows[row - 1],
                             model_profile=plan.model_profile, hardware_profile=plan.hardware_profile)


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
