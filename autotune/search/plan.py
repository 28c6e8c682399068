"""`make_plan`: every point of a space with its prediction; what cannot run or cannot fit is dropped, with why."""

import heapq
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from autotune.domain.prediction import Prediction
from autotune.domain.request import StudyRequest
from autotune.domain.study import PlanSummary
from autotune.predict import predict
from autotune.search.points import Space
from autotune.search.space import parse_space
from engine.config import TrainConfig
from engine.profile import HardwareProfile, ModelProfile

MAX_SUMMARY_PREDICTIONS = 1000
MAX_SUMMARY_FASTEST = 20
BUCKET_KNOBS = ("reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size")

_ESTIMATED_TERMS = ("activations", "workspace")
_ESTIMATE_ERROR = 1.0
"""How much larger than predicted these may be for all one knows before the first trial."""

Terms = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class Candidate(NamedTuple):
    """A configuration that should fit, and what is expected of it."""

    config: TrainConfig
    prediction: Prediction


class Rejection(NamedTuple):
    """A configuration that is not tried. `memory` marks the reason that it would not fit."""

    config: TrainConfig
    reason: str
    memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes that one rank may use.

    Attributes:
        device_bytes: the request's limit, else the device's memory.
        host_bytes: the host's memory divided by its ranks.
    """

    device_bytes: int
    host_bytes: int

    def allow(self, prediction: Prediction) -> bool:
        """Whether it stays within both."""
        return (prediction.peak_device_bytes <= self.device_bytes
                and prediction.peak_host_bytes <= self.host_bytes)

    def excess(self, prediction: Prediction) -> str:
        """In words, what a prediction that is not allowed needs and may use."""
        needed, limit, place = ((prediction.peak_device_bytes, self.device_bytes, "device")
                                if prediction.peak_device_bytes > self.device_bytes
                                else (prediction.peak_host_bytes, self.host_bytes, "host"))
        return f"needs {needed / 2**20:,.0f} MiB of {place} memory where {limit / 2**20:,.0f} may be used"


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What a study may try. Made by `make_plan`; pickled as its inputs, and made again once per process: a plan equals
    only itself.

    Attributes:
        candidates: in the space's order, no two alike.
    """

    request: StudyRequest
    model: ModelProfile
    hardware: HardwareProfile
    space: Space
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    limits: Limits

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, the same for every configuration."""
        return self.request.training.global_batch_size * self.model.tokens_per_sample

    @cached_property
    def index(self) -> dict[TrainConfig, int]:
        """Position of each candidate by its configuration."""
        return {candidate.config: position for position, candidate in enumerate(self.candidates)}

    @cached_property
    def device_terms(self) -> Terms:
        """(candidates, terms) device bytes, in the order of `Prediction.device_bytes`."""
        return _terms([candidate.prediction.device_bytes for candidate in self.candidates])

    @cached_property
    def host_terms(self) -> Terms:
        """(candidates, terms) host bytes, in the order of `Prediction.host_bytes`."""
        return _terms([candidate.prediction.host_bytes for candidate in self.candidates])

    def canonical(self, config: TrainConfig) -> TrainConfig:
        """The configuration that stands for all that do the same: inactive knobs and oversized buckets made equal."""
        if config in self.index:
            return config
        folded = self.space.canonical(config)
        kept = {name: _kept_bucket(self.space, self.model, name, getattr(folded, name)) for name in BUCKET_KNOBS}
        changed = {name: size for name, size in kept.items() if size != getattr(folded, name)}
        return folded.model_copy(update=changed) if changed else folded

    def predict(self, config: TrainConfig) -> Prediction:
        """As `autotune.predict.predict`, with this plan's profiles; also for configurations outside the space.

        Raises:
            KeyError: the model was not probed for it.
        """
        return predict(self.model, self.hardware, self.request.training.optimizer, config)

    def predict_or_none(self, config: TrainConfig) -> Prediction | None:
        """The prediction, None where the model was not probed for this configuration."""
        try:
            return self.predict(config)
        except KeyError:
            return None

    @property
    def default(self) -> TrainConfig:
        """The default configuration, with the largest micro-batch that should fit although nothing was measured yet."""
        return self._largest_fitting(self.space.default)

    @property
    def baseline(self) -> TrainConfig:
        """The user's own configuration exactly as given, whether or not it should fit; else the default one."""
        return self.space.baseline if self.space.has_own_baseline else self.default

    def _largest_fitting(self, config: TrainConfig) -> TrainConfig:
        knob = self.space.knob("micro_batch_size")
        sizes = [size for size in (knob.values if knob is not None else ()) if size <= config.micro_batch_size]
        smaller = [config.model_copy(update={
            "micro_batch_size": size, "gradient_accumulation_steps":
                config.micro_batch_size * config.gradient_accumulation_steps // size}) for size in reversed(sizes)]
        fitting = [each for each in smaller if self.canonical(each) in self.index]
        if not fitting:
            return config if self.canonical(config) in self.index or not self.candidates else self.candidates[0].config
        return next((each for each in fitting if self._surely_fits(self.canonical(each))), fitting[-1])

    def _surely_fits(self, config: TrainConfig) -> bool:
        """Whether a candidate fits also where what is estimated, not counted, turns out larger than predicted."""
        prediction = self.candidates[self.index[config]].prediction
        estimated = sum(prediction.device_bytes[term] for term in _ESTIMATED_TERMS)
        return prediction.peak_device_bytes + _ESTIMATE_ERROR * estimated <= self.limits.device_bytes

    def summary(self) -> PlanSummary:
        """What is kept with the study and shown."""
        counts = Counter(rejection.reason for rejection in self.rejections)
        counts.update(self.space.impossible_combinations)
        examples: dict[str, TrainConfig] = {}
        for rejection in self.rejections:
            examples.setdefault(rejection.reason, rejection.config)
        smallest = sorted(self.candidates, key=lambda candidate: candidate.prediction.peak_device_bytes)
        return PlanSummary(
            space={knob.name: list(knob.values) for knob in self.space.knobs},
            points=len(self.space.points), feasible=len(self.candidates), rejections=dict(counts), examples=examples,
            predictions=tuple((config, prediction) for config, prediction in smallest[:MAX_SUMMARY_PREDICTIONS]),
            fastest=tuple((config, prediction) for config, prediction in self.fastest(MAX_SUMMARY_FASTEST)))

    def fastest(self, count: int) -> list[Candidate]:
        """Those predicted to be fastest, fastest first; of equally fast ones that which needs least memory."""
        timed = [candidate for candidate in self.candidates if candidate.prediction.step_seconds is not None]
        return heapq.nsmallest(count, timed, key=lambda candidate: (
            candidate.prediction.step_seconds, candidate.prediction.peak_device_bytes))

    def why_empty(self) -> str:
        """For a plan without candidates: why nothing can be tried, and what to change."""
        assert not self.candidates
        counts = Counter(rejection.reason for rejection in self.rejections)
        reasons = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common())
        too_large = [rejection.config for rejection in self.rejections if rejection.memory]
        if too_large and min(config.micro_batch_size for config in too_large) == 1:
            return f"no feasible micro-batch: micro_batch_size 1 would not fit either ({reasons})"
        return f"no feasible configuration among {len(self.space.points)} ({reasons})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade_plan, (self.request.model_dump_json(), self.model.model_dump_json(),
                              self.hardware.model_dump_json())


def limits_of(request: StudyRequest, hardware: HardwareProfile) -> Limits:
    """What the request allows, and the hardware has."""
    memory_limit = min(hardware.memory_bytes, request.hardware.memory_limit_bytes or hardware.memory_bytes)
    return Limits(device_bytes=memory_limit, host_bytes=hardware.host_memory_bytes // hardware.world_size)


def make_plan(request: StudyRequest, space: Space, model: ModelProfile, hardware: HardwareProfile) -> Plan:
    """Predict every point of the space and keep what should fit. Pure.

    Args:
        space: of this request, from `parse_space`.

    Raises:
        ValueError: the hardware's world size is not the number of devices asked for.
    """
    if hardware.world_size != space.world_size:
        raise ValueError(f"calibrated on {hardware.world_size} devices, but the study uses {space.world_size}")
    limits = limits_of(request, hardware)
    candidates: list[Candidate] = []
    rejections: list[Rejection] = []
    for config in space.points:
        judged = _judge(config, request, space, (model, hardware), limits)
        if isinstance(judged, Candidate):
            candidates.append(judged)
        else:
            rejections.append(judged)
    return Plan(request=request, model=model, hardware=hardware, space=space, candidates=tuple(candidates),
                rejections=tuple(rejections), limits=limits)


def _judge(config: TrainConfig, request: StudyRequest, space: Space, profiles: tuple[ModelProfile, HardwareProfile],
           limits: Limits) -> Candidate | Rejection:
    model, hardware = profiles
    reason = _why_not(config, space, model, hardware)
    if reason is not None:
        return Rejection(config, reason)
    prediction = predict(model, hardware, request.training.optimizer, config)
    if limits.allow(prediction):
        return Candidate(config, prediction)
    place = "device" if prediction.peak_device_bytes > limits.device_bytes else "host"
    return Rejection(config, f"does not fit into {place} memory", memory=True)


def _why_not(config: TrainConfig, space: Space, model: ModelProfile, hardware: HardwareProfile) -> str | None:
    """Why a configuration cannot run or need not be tried; memory aside."""
    if config.precision not in hardware.precisions:
        return (f"precision {config.precision} does not run on {hardware.device_name or hardware.device_type}, which "
                f"runs {', '.join(hardware.precisions)}")
    precision = space.knob("precision")
    if config.precision == "fp16" and precision is not None and precision.auto and "bf16" in hardware.precisions:
        return "precision fp16 is left to hardware without bf16, which needs no loss scaling: name it in " \
               "search.space.precision to try it"
    if config.activation_checkpointing != "none" and model.block_count == 0:
        return "activation_checkpointing needs repeated blocks, and this model has none"
    for name in BUCKET_KNOBS:
        size = getattr(config, name)
        if _kept_bucket(space, model, name, size) != size:
            return f"{name} beyond the model's size is the same as a smaller one"
    try:
        model.activation(config.activation_checkpointing, config.precision)
    except KeyError:
        return f"activation_checkpointing {config.activation_checkpointing} in {config.precision} could not be probed"
    return None


def _kept_bucket(space: Space, model: ModelProfile, name: str, size: int) -> int:
    """Of the bucket sizes that hold the whole model, and so do the same, the base's one or else the smallest."""
    knob = space.knob(name)
    if knob is None or size < model.parameters or size not in knob.values:
        return size
    base: int = space.base_fields.get(name, TrainConfig.model_fields[name].default)
    oversized = [value for value in knob.values if value >= model.parameters]
    return base if base in oversized else min(oversized)


def _terms(rows: list[dict[str, int]]) -> Terms:
    width = len(rows[0]) if rows else 0
    return np.array([[*row.values()] for row in rows], dtype=np.int64).reshape(len(rows), width)


@lru_cache(maxsize=8)
def _remade_plan(request: str, model: str, hardware: str) -> Plan:
    parsed = StudyRequest.model_validate_json(request)
    return make_plan(parsed, parse_space(parsed), ModelProfile.model_validate_json(model),
                     HardwareProfile.model_validate_json(hardware))
