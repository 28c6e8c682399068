"""Plans for a cluster that is not here: over every way to share its devices between tensor, pipeline and data
parallelism that the request asks for. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from autotune.domain.cluster import Cluster
from autotune.domain.errors import FieldError, InvalidRequestError
from autotune.domain.request import HardwareRequest, StudyRequest
from autotune.domain.study import PlanSummary
from autotune.predict.cluster import bundled_cluster, bundled_clusters
from autotune.predict.parallel import ALONE, Parallel, hidden_size
from autotune.search.knobs import KNOBS
from autotune.search.plan import BUCKET_KNOBS, Plan, make_plan, summarize, why_empty
from autotune.search.space import count_points, divisors, named_cluster, parse_space
from engine.profile import ModelProfile
from engine.spec import GptSpec, HuggingFaceSpec, ModelSpec, VitSpec

_BUCKET = KNOBS["reduce_bucket_size"].auto[-1]
"""Elements. Bucket sizes move a step by little; beside many layouts only the largest is planned with."""

MAX_POINTS = 100_000
"""Configurations of all layouts together. Each is predicted and held: these take some 10 s and a few hundred MB."""

_HEADS = ("num_attention_heads", "n_head", "num_heads")
"""Names in a transformers configuration."""


class Shape(NamedTuple):
    """What decides which degrees a model allows.

    Attributes:
        heads: 0 where not known: "auto" then leaves tensor parallelism out.
        blocks: None before the model was probed.
    """

    heads: int
    blocks: int | None


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """What `plan_cluster` found.

    Attributes:
        plans: one for each layout that can be, at least one.
        left_out: layouts that cannot be, by reason.
    """

    cluster: Cluster
    plans: tuple[Plan, ...]
    left_out: dict[str, int]

    @cached_property
    def summary(self) -> PlanSummary:
        """What is kept with the study and shown."""
        found = summarize(self.plans, left_out=self.left_out, peaks=self.cluster.matmul_peak_flops_per_second)
        return found.model_copy(update={"model_profile": self.plans[0].model,
                                        "hardware_profile": self.plans[0].hardware})

    @property
    def note(self) -> str:
        """How a study ends that only plans."""
        hardware, found = self.plans[0].hardware, self.summary
        degrees = ("; rows with tensor or pipeline degrees above 1 are for other engines than the bundled one"
                   if any(plan.parallel != ALONE for plan in self.plans) else "")
        return (f"predicted for {hardware.world_size} x {hardware.device_name}: {found.feasible} of {found.points} "
                f"configurations should fit; nothing was measured{degrees}{self._unseen}")

    @property
    def _unseen(self) -> str:
        """Which dimensions the step times had to do without."""
        model = self.plans[0].model
        if model.heads and model.hidden:
            return ""
        return ("; the probe saw no attention between blocks of tokens, so step times take all operations for those of "
                f"matrix products {hidden_size(model):,} wide")

    @property
    def why_empty(self) -> str | None:
        """Why nothing should fit, and what to change; None where something does."""
        if any(plan.candidates for plan in self.plans):
            return None
        more = ("" if any(plan.parallel != ALONE for plan in self.plans)
                else "; hardware.tensor_parallel and pipeline_parallel \"auto\" share one copy between devices")
        return why_empty(self.plans) + more


def plan_cluster(request: StudyRequest, model: ModelProfile) -> ClusterPlan:
    """Plan a request of mode plan: every layout asked for, every configuration of each.

    Raises:
        InvalidRequestError: no layout can be, or there are too many points; says why.
    """
    cluster = named_cluster(request.hardware)
    hardware = cluster.hardware(request.hardware.devices)
    layouts = [*_layouts(request.hardware, cluster, Shape(model.heads, model.block_count))]
    _require_few_points(request, (parallel for parallel, reason in layouts if reason is None))
    plans, left_out = [], Counter[str]()
    for parallel, reason in layouts:
        if reason is not None:
            left_out[reason] += 1
            continue
        try:
            shared = _shared(request, parallel)
            space = parse_space(shared)
        except InvalidRequestError as error:
            left_out[f"{_text(parallel)}: {error.errors[0].message}"] += 1
            continue
        plans.append(make_plan(shared, space, model, hardware, parallel))
    if not plans:
        raise InvalidRequestError(*(FieldError(_field(request.hardware), reason) for reason in left_out))
    return ClusterPlan(cluster=cluster, plans=tuple(plans), left_out=dict(left_out))


def check_layouts(request: StudyRequest) -> None:
    """Refuse a request of mode plan with which no layout could be, or with too many points, as far as that is known
    before the model is probed.

    Raises:
        InvalidRequestError: names every field at fault.
    """
    blocks = request.model.layers if isinstance(request.model, GptSpec | VitSpec) else None
    shape = Shape(_named_heads(request.model), blocks)
    layouts = [*_layouts(request.hardware, named_cluster(request.hardware), shape)]
    _require_few_points(request, (parallel for parallel, reason in layouts if reason is None))
    problems: tuple[FieldError, ...] = ()
    for parallel, reason in layouts:
        if reason is not None:
            problems = problems or (FieldError(_field(request.hardware), reason),)
            continue
        try:
            parse_space(_shared(request, parallel))
            return
        except InvalidRequestError as error:
            problems = error.errors
    raise InvalidRequestError(*problems)


def described_clusters() -> tuple[Cluster, ...]:
    """All clusters that can be named, by name."""
    return tuple(bundled_cluster(name) for name in bundled_clusters())


def _named_heads(spec: ModelSpec) -> int:
    """Attention heads, as far as a specification says; 0 where it does not."""
    if isinstance(spec, GptSpec | VitSpec):
        return spec.heads
    names = spec.config if isinstance(spec, HuggingFaceSpec) else {}
    return next((names[name] for name in _HEADS if isinstance(names.get(name), int)), 0)


def _layouts(hardware: HardwareRequest, cluster: Cluster, shape: Shape) -> Iterator[tuple[Parallel, str | None]]:
    """Those asked for, without tensor and pipeline parallelism first, and why each cannot be, the batch aside. Where
    "auto" was asked for, only those that can."""
    node = min(hardware.devices, cluster.links.devices_per_node)
    blocks = hardware.devices if shape.blocks is None else max(shape.blocks, 1)
    pieces = _degrees(hardware.tensor_parallel, node if shape.heads else 1)
    for pipeline in _degrees(hardware.pipeline_parallel, blocks):
        for tensor in pieces:
            parallel = Parallel(tensor=tensor, pipeline=pipeline)
            reason = _why_not(parallel, hardware.devices, node, shape)
            named = ((tensor != 1 and hardware.tensor_parallel != "auto")
                     or (pipeline != 1 and hardware.pipeline_parallel != "auto"))
            if reason is None or named:
                yield parallel, reason


def _degrees(asked: list[int] | str, number: int) -> Sequence[int]:
    """Those asked for; for "auto" all that divide a number."""
    return divisors(number) if isinstance(asked, str) else sorted(set(asked))


def _why_not(parallel: Parallel, devices: int, node: int, shape: Shape) -> str | None:
    tensor, pipeline = parallel.tensor, parallel.pipeline
    if node % tensor:
        return f"tensor_parallel {tensor} does not stay inside a node of {node} devices"
    if shape.heads % tensor:
        return f"tensor_parallel {tensor} does not divide the model's {shape.heads} attention heads"
    if shape.blocks is not None and max(shape.blocks, 1) % pipeline:
        return f"pipeline_parallel {pipeline} does not divide the model's {shape.blocks} blocks"
    if devices % (tensor * pipeline):
        return f"{_text(parallel)} does not divide {devices} devices"
    return None


def _require_few_points(request: StudyRequest, layouts: Iterable[Parallel]) -> None:
    """Refuse more points than can be planned with. One layout's space alone is bounded by `parse_space`."""
    total = 0
    for number, parallel in enumerate(layouts, 1):
        with suppress(InvalidRequestError):  # a layout that cannot be has no points; others tell why
            total += count_points(_shared(request, parallel), MAX_POINTS + 1 - total)
        if number > 1 and total > MAX_POINTS:
            fields = [name for name in ("tensor_parallel", "pipeline_parallel")
                      if getattr(request.hardware, name) != [1]]
            raise InvalidRequestError(
                FieldError("search.space", f"more than {MAX_POINTS:,} configurations over all layouts of tensor and "
                           "pipeline parallelism, the most a plan can have: give fewer values"),
                *(FieldError(f"hardware.{name}", "every degree multiplies the configurations, of which there are more "
                             f"than {MAX_POINTS:,}: give fewer degrees, in a list") for name in fields))


def _shared(request: StudyRequest, parallel: Parallel) -> StudyRequest:
    """The request as its data-parallel ranks see it."""
    update: dict[str, Any] = {"hardware": request.hardware.model_copy(update={
        "devices": parallel.data(request.hardware.devices)})}
    if request.hardware.plans_degrees:
        update["search"] = request.search.model_copy(update=_fewer_buckets(request))
    return request.model_copy(update=update)


def _fewer_buckets(request: StudyRequest) -> dict[str, Any]:
    """Of a search over layouts: the default space with one bucket size; a baseline's accumulation follows the layout.
    """
    search = request.search
    changes: dict[str, Any] = {}
    if search.space is None:
        changes["space"] = {kind.name: [_BUCKET] if kind.name in BUCKET_KNOBS else "auto"
                            for kind in KNOBS.values() if kind.by_default}
    if search.baseline is not None:
        changes["baseline"] = {name: value for name, value in search.baseline.items()
                               if name != "gradient_accumulation_steps"}
    return changes


def _field(hardware: HardwareRequest) -> str:
    return "hardware.tensor_parallel" if hardware.tensor_parallel != [1] else "hardware.pipeline_parallel"


def _text(parallel: Parallel) -> str:
    return f"tensor_parallel {parallel.tensor} x pipeline_parallel {parallel.pipeline}"
