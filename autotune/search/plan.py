"""`make_plan`: every point of a space with its prediction; what cannot run or cannot fit is dropped, with why."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from autotune.domain.prediction import Prediction
from autotune.domain.request import StudyRequest
from autotune.domain.study import PlannedPoint, PlanSummary
from autotune.predict import predict
from autotune.predict.parallel import ALONE, Parallel
from autotune.search.points import Space
from autotune.search.space import parse_space
from engine.config import TrainConfig
from engine.profile import HardwareProfile, ModelProfile
from engine.values import Precision

MAX_SUMMARY_PREDICTIONS = 1000
MAX_SUMMARY_FASTEST = 20
BUCKET_KNOBS = ("reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size")
MAX_PIPELINED_STAGE = 1
"""From stage 2 on gradients would be reduced for each micro-batch on its way through the pipeline."""

_DETAILS = frozenset({*BUCKET_KNOBS, "overlap_comm"})
"""Of configurations that differ in nothing else, a ranking shows the best only."""


_ESTIMATED_TERMS = ("activations", "workspace")
_ESTIMATE_ERROR = 1.0
"""How much larger than predicted these may be for all one knows before the first trial."""

RESERVED_SHARE = 0.02
"""What a peak may need beyond its prediction, as a share of it, for what no term knows: allocators keep a little of
what was freed. docs/prediction.md says how far beyond measured peaks were."""

FP16_SHARE = 0.7
"""Of fp16's rate: bf16 that reaches less is emulated, and does not stand for it."""

Terms = np.ndarray[tuple[int, int], np.dtype[np.int64]]


Place = Literal["device", "host", "device and host"]


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
        host_bytes: the host's memory divided by the devices that share it.
        device_is_host: device and host memory are one, as on a CPU: both together stay within `host_bytes`.
    """

    device_bytes: int
    host_bytes: int
    device_is_host: bool = False

    def allow(self, prediction: Prediction) -> bool:
        """Whether it stays within all of them, a reserve on the device included."""
        return self.exceeded(prediction) is None

    def exceeded(self, prediction: Prediction) -> Place | None:
        """Which memory does not allow it, the device's first."""
        return next((place for place, needed, limit in self._held(prediction) if needed > limit), None)

    def lack(self, prediction: Prediction) -> float:
        """How much of it is needed of the memory that falls shortest; at most 1 where it is allowed."""
        return max(needed / max(limit, 1) for _, needed, limit in self._held(prediction))

    def excess(self, prediction: Prediction) -> str:
        """In words, what a prediction that is not allowed needs and may use."""
        place, needed, limit = next(held for held in self._held(prediction) if held[1] > held[2])
        return f"needs {needed / 2**20:,.0f} MiB of {place} memory where {limit / 2**20:,.0f} may be used"

    def _held(self, prediction: Prediction) -> Iterator[tuple[Place, int, int]]:
        """Every place with the bytes needed and allowed there."""
        device, host = device_bytes_to_allow(prediction), prediction.peak_host_bytes
        yield "device", device, self.device_bytes
        yield "host", host, self.host_bytes
        if self.device_is_host:
            yield "device and host", device + host, self.host_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What a study may try. Made by `make_plan`; pickled as its inputs, and made again once per process: a plan equals
    only itself.

    Attributes:
        candidates: in the space's order, no two alike.
        parallel: devices that share one copy of the model, the same for all candidates; the space is that of the
            data-parallel ranks.
    """

    request: StudyRequest
    model: ModelProfile
    hardware: HardwareProfile
    space: Space
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    limits: Limits
    parallel: Parallel = ALONE

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
        kept = {name: _kept_bucket(self.space, self.model, name, folded) for name in BUCKET_KNOBS}
        changed = {name: size for name, size in kept.items() if size != getattr(folded, name)}
        return folded.model_copy(update=changed) if changed else folded

    def predict(self, config: TrainConfig) -> Prediction:
        """As `autotune.predict.predict`, with this plan's profiles; also for configurations outside the space.

        Raises:
            KeyError: the model was not probed for it.
        """
        return predict(self.model, self.hardware, self.request.training.optimizer, config, self.parallel)

    def predict_or_none(self, config: TrainConfig) -> Prediction | None:
        """The prediction, None where the model was not probed for this configuration."""
        if (position := self.index.get(config)) is not None:
            return self.candidates[position].prediction
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
        return summarize((self,))

    def why_empty(self) -> str:
        """For a plan without candidates: why nothing can be tried, and what to change."""
        return why_empty((self,))

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade_plan, (self.request.model_dump_json(), self.model.model_dump_json(),
                              self.hardware.model_dump_json(), self.parallel)


def device_bytes_to_allow(prediction: Prediction) -> int:
    """The lowest limit of a device under which a configuration is called feasible."""
    return math.ceil(prediction.peak_device_bytes * (1 + RESERVED_SHARE))


def limits_of(request: StudyRequest, hardware: HardwareProfile) -> Limits:
    """What the request allows, and the hardware has."""
    memory_limit = min(hardware.memory_bytes, request.hardware.memory_limit_bytes or hardware.memory_bytes)
    sharing = max(hardware.host_devices or 0, hardware.world_size)
    return Limits(device_bytes=memory_limit, host_bytes=hardware.host_memory_bytes // sharing,
                  device_is_host=hardware.device_type == "cpu")


def make_plan(request: StudyRequest, space: Space, model: ModelProfile, hardware: HardwareProfile,
              parallel: Parallel = ALONE) -> Plan:
    """Predict every point of the space and keep what should fit. Pure.

    Args:
        space: of this request, from `parse_space`.
        parallel: devices that share one copy of the model; those of the space are what is left for data parallelism.

    Raises:
        ValueError: the hardware's world size is not the number of devices asked for.
    """
    devices = space.world_size * parallel.tensor * parallel.pipeline
    if hardware.world_size != devices:
        raise ValueError(f"calibrated on {hardware.world_size} devices, but the study uses {devices}")
    limits = limits_of(request, hardware)
    candidates: list[Candidate] = []
    rejections: list[Rejection] = []
    for config in space.points:
        reason = _why_not(config, space, model, hardware) or _why_not_pipelined(config, parallel)
        if reason is not None:
            rejections.append(Rejection(config, reason))
            continue
        prediction = predict(model, hardware, request.training.optimizer, config, parallel)
        place = limits.exceeded(prediction)
        if place is None:
            candidates.append(Candidate(config, prediction))
        else:
            rejections.append(Rejection(config, f"does not fit into {place} memory", memory=True))
    return Plan(request=request, model=model, hardware=hardware, space=space, candidates=tuple(candidates),
                rejections=tuple(rejections), limits=limits, parallel=parallel)


def summarize(plans: Sequence[Plan], *, left_out: Mapping[str, int] | None = None,
              peaks: Mapping[Precision, float] | None = None) -> PlanSummary:
    """What is kept and shown of plans of the same model for the same devices, which differ in how these are shared.

    Args:
        plans: at least one.
        left_out: combinations beside the plans' that cannot run, by reason.
        peaks: the data sheet's operations per second of one device, where it is known.
    """
    counts, examples = Counter(left_out or {}), dict[str, TrainConfig]()
    points: list[tuple[Plan, Candidate]] = []
    for plan in plans:
        counts.update(rejection.reason for rejection in plan.rejections)
        counts.update(plan.space.impossible_combinations)
        for rejection in plan.rejections:
            examples.setdefault(rejection.reason, rejection.config)
        points.extend((plan, candidate) for candidate in plan.candidates)
    smallest = sorted(points, key=lambda point: point[1].prediction.peak_device_bytes)[:MAX_SUMMARY_PREDICTIONS]
    limits = plans[0].limits
    return PlanSummary(
        space=_searched(plans), points=sum(len(plan.space.points) for plan in plans), feasible=len(points),
        rejections=dict(counts), examples=examples, device_limit_bytes=limits.device_bytes,
        host_limit_bytes=limits.host_bytes,
        predictions=tuple(_point(plan, candidate, peaks or {}) for plan, candidate in smallest),
        fastest=tuple(_point(plan, candidate, peaks or {}) for plan, candidate in _ranked(points)),
        layouts=tuple(_point(*best, peaks or {}) for best in _ranked_layouts(plans)))


def _searched(plans: Sequence[Plan]) -> dict[str, list[Any]]:
    """Every knob and degree that varies in any of the plans, with its values."""
    values: dict[str, dict[Any, None]] = {}
    for plan in plans:
        for knob in plan.space.knobs:
            values.setdefault(knob.name, {}).update(dict.fromkeys(knob.values))
    if len(plans) > 1:
        values["tensor_parallel"] = dict.fromkeys(plan.parallel.tensor for plan in plans)
        values["pipeline_parallel"] = dict.fromkeys(plan.parallel.pipeline for plan in plans)
    return {name: sorted(known) if all(type(value) is int for value in known) else list(known)
            for name, known in values.items()}


def _ranked(points: Sequence[tuple[Plan, Candidate]]) -> list[tuple[Plan, Candidate]]:
    """The fastest, fastest first; of equally fast ones that which needs least memory first, and of those that differ
    in details only, the first."""
    timed = sorted((point for point in points if point[1].prediction.step_seconds is not None), key=_slowness)
    shown: dict[tuple[Any, ...], tuple[Plan, Candidate]] = {}
    for plan, candidate in timed:
        fields = tuple(value for name, value in candidate.config.__dict__.items() if name not in _DETAILS)
        shown.setdefault((plan.parallel, *fields), (plan, candidate))
        if len(shown) == MAX_SUMMARY_FASTEST:
            break
    return list(shown.values())


def _ranked_layouts(plans: Sequence[Plan]) -> list[tuple[Plan, Candidate]]:
    """The fastest of each plan, fastest first; none where there is but one."""
    timed = [[(plan, candidate) for candidate in plan.candidates if candidate.prediction.step_seconds is not None]
             for plan in (plans if len(plans) > 1 else ())]
    return sorted((min(points, key=_slowness) for points in timed if points), key=_slowness)


def _slowness(point: tuple[Plan, Candidate]) -> tuple[float, int]:
    prediction = point[1].prediction
    return prediction.step_seconds or 0.0, prediction.peak_device_bytes


def _point(plan: Plan, candidate: Candidate, peaks: Mapping[Precision, float]) -> PlannedPoint:
    seconds, samples = candidate.prediction.step_seconds, plan.request.training.global_batch_size
    known = PlannedPoint(
        config=candidate.config, prediction=candidate.prediction, tensor_parallel=plan.parallel.tensor,
        pipeline_parallel=plan.parallel.pipeline, data_parallel=plan.space.world_size)
    if seconds is None:
        return known
    peak = peaks.get(candidate.config.precision)
    rate = plan.model.flops_per_sample * samples / seconds / plan.hardware.world_size
    return known.model_copy(update={
        "samples_per_second": samples / seconds, "tokens_per_second": plan.tokens_per_step / seconds,
        "model_flops_utilization": rate / peak if peak else None})


def why_empty(plans: Sequence[Plan]) -> str:
    """For plans without candidates: why nothing can be tried, and what to change."""
    assert not any(plan.candidates for plan in plans)
    rejections = [rejection for plan in plans for rejection in plan.rejections]
    counts = Counter(rejection.reason for rejection in rejections)
    reasons = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common())
    too_large = [(plan, rejection.config) for plan in plans for rejection in plan.rejections if rejection.memory]
    advice = f"; {_what_would_fit(too_large)}" if too_large else ""
    if too_large and min(config.micro_batch_size for _, config in too_large) == 1:
        return f"no feasible micro-batch: micro_batch_size 1 would not fit either ({reasons}){advice}"
    return f"no feasible configuration among {sum(len(plan.space.points) for plan in plans)} ({reasons}){advice}"


def _what_would_fit(too_large: Sequence[tuple[Plan, TrainConfig]]) -> str:
    """What the configuration needs that lacks least memory, and what would make it, or another one, fit."""
    plan, config = min(too_large, key=lambda each: each[0].limits.lack(each[0].predict(each[1])))
    prediction = plan.predict(config)
    place = plan.limits.exceeded(prediction)
    smaller = [words for words, helps in (
        ("a smaller micro_batch_size", config.micro_batch_size > 1),
        ("a higher zero_stage", config.zero_stage < 3 and plan.space.world_size > 1),
        ("activation_checkpointing", config.activation_checkpointing == "none" and plan.model.block_count > 0),
        ("offload_optimizer_ratio", config.offload_optimizer_ratio < 1 and not plan.limits.device_is_host),
    ) if helps and place != "host"]
    if place == "host":
        smaller = ["a lower offload_optimizer_ratio"]
    limited = plan.limits.device_bytes < plan.hardware.memory_bytes
    raised = ["raise hardware.memory_limit_bytes"] if limited and place == "device" else []
    fixes = [*raised, *([f"allow {', '.join(smaller)} in search.space"] if smaller else [])]
    return f"the smallest {plan.limits.excess(prediction)}: {', or '.join(fixes) or 'take a smaller model'}"


def _why_not(config: TrainConfig, space: Space, model: ModelProfile, hardware: HardwareProfile) -> str | None:
    """Why a configuration cannot run or need not be tried; memory aside."""
    if config.precision not in hardware.precisions:
        return (f"precision {config.precision} does not run on {hardware.device_name or hardware.device_type}, which "
                f"runs {', '.join(hardware.precisions)}")
    precision = space.knob("precision")
    if config.precision == "fp16" and precision is not None and precision.auto and _bf16_is_native(hardware):
        return "precision fp16 is left to hardware without fast bf16, which needs no loss scaling: name it in " \
               "search.space.precision to try it"
    if config.activation_checkpointing != "none" and model.block_count == 0:
        return "activation_checkpointing needs repeated blocks, and this model has none"
    for name in BUCKET_KNOBS:
        if _kept_bucket(space, model, name, config) != getattr(config, name):
            return f"{name} beyond the model's size is the same as a smaller one"
    try:
        model.activation(config.activation_checkpointing, config.precision)
    except KeyError:
        return f"activation_checkpointing {config.activation_checkpointing} in {config.precision} could not be probed"
    return None


def _bf16_is_native(hardware: HardwareProfile) -> bool:
    rates = hardware.matmul_flops_per_second
    return "bf16" in hardware.precisions and rates.get("bf16", 0.0) >= FP16_SHARE * rates.get("fp16", 0.0)


def _why_not_pipelined(config: TrainConfig, parallel: Parallel) -> str | None:
    if parallel.pipeline > 1 and config.zero_stage > MAX_PIPELINED_STAGE:
        return (f"zero_stage {config.zero_stage} does not go with pipeline_parallel above 1, where several "
                "micro-batches are under way")
    return None


def _kept_bucket(space: Space, model: ModelProfile, name: str, config: TrainConfig) -> int:
    """Of the bucket sizes that hold all there is, and so do the same, the base's one or else the smallest.

    Only gradients are reduced, and below stage 3 only what they changed is gathered; stage 3 puts frozen parameters
    into buckets, too."""
    size: int = getattr(config, name)
    whole = model.parameters if config.zero_stage == 3 else model.trainable_parameters
    knob = space.knob(name)
    if knob is None or not knob.is_active(config) or size < whole:
        return size
    base: int = space.base_fields.get(name, TrainConfig.model_fields[name].default)
    oversized = [value for value in knob.values if value >= whole]
    return base if base in oversized else min(oversized, default=size)


def _terms(rows: list[dict[str, int]]) -> Terms:
    width = len(rows[0]) if rows else 0
    return np.array([[*row.values()] for row in rows], dtype=np.int64).reshape(len(rows), width)


@lru_cache(maxsize=8)
def _remade_plan(request: str, model: str, hardware: str, parallel: Parallel) -> Plan:
    parsed = StudyRequest.model_validate_json(request)
    return make_plan(parsed, parse_space(parsed), ModelProfile.model_validate_json(model),
                     HardwareProfile.model_validate_json(hardware), parallel)
