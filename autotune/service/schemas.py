"""What the API answers where that is not a domain value as it stands."""

from datetime import datetime
from typing import Any

from pydantic import Field

from autotune.domain.catalog import ModelSummary
from autotune.domain.cluster import Cluster
from autotune.domain.request import StudyRequest
from autotune.domain.study import BestConfig, PlannedPoint, PlanSummary, Progress, Study, StudyPhase, StudyState, Trial
from engine.config import TrainConfig
from engine.values import Value

_BEST_IN_STUDY = ("trial_number", "config", "tokens_per_second", "tokens_per_second_interval", "samples_per_second",
                  "step_seconds", "peak_device_bytes", "peak_host_bytes", "baseline_trial_number",
                  "baseline_tokens_per_second", "baseline_peak_device_bytes", "speedup", "speedup_interval",
                  "confirmed", "tie_with")


class BestView(Value):
    """The best configuration so far; `GET /studies/{id}/best` has the evidence too."""

    trial_number: int
    config: TrainConfig
    tokens_per_second: float
    tokens_per_second_interval: tuple[float, float] = Field(description="95 % confidence interval")
    samples_per_second: float
    step_seconds: float
    peak_device_bytes: int
    peak_host_bytes: int
    baseline_trial_number: int | None
    baseline_tokens_per_second: float | None = Field(description="over all the baseline's measurements")
    baseline_peak_device_bytes: int | None
    speedup: float | None = Field(description="tokens per second over the baseline's: in the rounds that measured "
                                  "both where there are two, which need not be the ratio of the two rates")
    speedup_interval: tuple[float, float] | None
    confirmed: bool = Field(description="measured again beside the other finalists")
    tie_with: tuple[int, ...] = Field(description="trials that are not told apart from the fastest: finalists, and "
                                      "trials measured once")

    @classmethod
    def of(cls, best: BestConfig) -> "BestView":
        return cls.model_validate({name: getattr(best, name) for name in _BEST_IN_STUDY})


class StudyView(Value):
    """One tuning job and where it stands."""

    id: str
    name: str
    state: StudyState
    phase: StudyPhase | None = Field(description="what a running study is doing")
    error: str | None = Field(description="why it failed")
    note: str | None = Field(description="how a succeeded study ended")
    cancel_requested: bool
    progress: Progress
    best: BestView | None
    request: StudyRequest
    model_fingerprint: str | None
    hardware_fingerprint: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None

    @classmethod
    def of(cls, study: Study) -> "StudyView":
        return cls(
            id=study.id, name=study.request.name, state=study.state, phase=study.phase, error=study.error,
            note=study.note, cancel_requested=study.cancel_requested, progress=study.progress,
            best=None if study.best is None else BestView.of(study.best), request=study.request,
            model_fingerprint=study.model_fingerprint, hardware_fingerprint=study.hardware_fingerprint,
            created_at=study.created_at, started_at=study.started_at, finished_at=study.finished_at)


class StudyList(Value):
    items: tuple[StudyView, ...]
    next_cursor: str | None = Field(description="give it back as `cursor` for the next page; null at the end")


class TrialList(Value):
    items: tuple[Trial, ...]
    next_cursor: str | None = Field(description="give it back as `cursor` for the next page; null at the end")


class ModelList(Value):
    items: tuple[ModelSummary, ...]
    next_cursor: str | None = Field(description="give it back as `cursor` for the next page; null at the end")


class BestList(Value):
    items: tuple[BestConfig, ...] = Field(description="one per training set-up and hardware, the latest first")
    next_cursor: str | None = Field(None, description="always null: the list is short")


class ClusterList(Value):
    items: tuple[Cluster, ...]
    next_cursor: str | None = Field(None, description="always null: the list is short")


class PlanView(Value):
    """What the plan found before the first trial."""

    space: dict[str, list[Any]] = Field(description="the knobs that vary and their values")
    points: int = Field(description="distinct configurations in the space")
    feasible: int
    rejections: dict[str, int] = Field(description="how many were dropped, by reason")
    examples: dict[str, TrainConfig] = Field(description="one dropped configuration per reason")
    predictions: tuple[PlannedPoint, ...] = Field(description="feasible configurations, smallest memory first")
    fastest: tuple[PlannedPoint, ...] = Field(description="those predicted to be fastest, fastest first; of those that "
                                              "differ in nothing but buckets and overlap, one")
    layouts: tuple[PlannedPoint, ...] = Field(description="mode plan over several degrees of tensor and pipeline "
                                              "parallelism: the fastest of each pair, fastest first")
    device_limit_bytes: int | None = Field(description="that one device may use")
    host_limit_bytes: int | None = Field(description="of its host, that one device may use")

    @classmethod
    def of(cls, plan: PlanSummary, limit: int) -> "PlanView":
        return cls(space=plan.space, points=plan.points, feasible=plan.feasible, rejections=plan.rejections,
                   examples=plan.examples, predictions=plan.predictions[:limit], fastest=plan.fastest[:limit],
                   layouts=plan.layouts[:limit], device_limit_bytes=plan.device_limit_bytes,
                   host_limit_bytes=plan.host_limit_bytes)


class Health(Value):
    status: str
