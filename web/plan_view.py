"""What the pages show of a plan: pure functions from a `PlanSummary` to frozen view values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.domain.study import PlannedPoint, PlanSummary

SHOWN_BEFORE_A_SEARCH = 10
"""Rows of a plan that is only the beginning of a study."""

_TIMES = {"forward": "forward", "backward": "backward", "recompute": "recompute", "tensor_exchange": "tensor exchange",
          "pipeline_bubble": "pipeline", "pipeline_transfer": "pipeline", "data_exchange": "data exchange",
          "optimizer": "optimizer", "host_transfer": "host transfer"}
"""Labels of a prediction's terms of time. Bubble and transfers are one: there are as many colours as labels."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of a stacked bar: where it starts and how long it is, in percent of the bar."""

    label: str
    value: float
    start: float
    length: float


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """A configuration predicted to be fast.

    Attributes:
        number: by which it is exported.
        memory: device bytes by term, of what a device may use.
        time: seconds by term, of the slowest row beside it.
        cells: of the ranking's columns.
        text: the knobs that vary, in words.
    """

    number: int
    point: PlannedPoint
    memory: tuple[Segment, ...]
    time: tuple[Segment, ...]
    cells: tuple[str, ...]
    text: str

    @property
    def step_seconds(self) -> float | None:
        return self.point.prediction.step_seconds

    @property
    def peak_device_bytes(self) -> int:
        return self.point.prediction.peak_device_bytes


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Rows, fastest first.

    Attributes:
        columns: what tells the rows apart.
        common: (title, value) of what is the same in all.
    """

    rows: tuple[PlannedRow, ...]
    columns: tuple[str, ...]
    common: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """What the plan found.

    Attributes:
        space: knobs with their values.
        rejections: most frequent first.
        layouts: the fastest of each pair of degrees; empty where there is but one.
        memory_terms: (colour, label) of those that any row has; `time_terms` are the same of time.
        counts_tokens: throughput is told in tokens, as samples hold several.
        parameters: of the model; None where a search follows.
    """

    points: int
    feasible: int
    space: tuple[tuple[str, tuple[Any, ...]], ...]
    rejections: tuple[tuple[str, int], ...]
    fastest: Ranking
    layouts: Ranking
    memory_terms: tuple[tuple[int, str], ...]
    time_terms: tuple[tuple[int, str], ...]
    device_limit_bytes: int | None
    device_name: str | None
    parameters: int | None
    counts_tokens: bool

    @property
    def exportable(self) -> tuple[PlannedRow, ...]:
        """Rows that the bundled engine and the exported formats can train with."""
        rows = {row.number: row for row in (*self.fastest.rows, *self.layouts.rows)}
        return tuple(row for _, row in sorted(rows.items()) if row.point.runs_here)


def plan_view(plan: PlanSummary) -> PlanView:
    """The view of a study's plan."""
    numbered = list(enumerate(plan.rows, start=1))
    fastest = _ranking(numbered[:len(plan.fastest)], plan)
    layouts = _ranking([numbered[plan.rows.index(point)] for point in plan.layouts], plan)
    shown = (*fastest.rows, *layouts.rows)
    model, hardware = plan.model_profile, plan.hardware_profile
    return PlanView(
        points=plan.points, feasible=plan.feasible,
        space=tuple((name, tuple(values)) for name, values in plan.space.items()),
        rejections=tuple(sorted(plan.rejections.items(), key=lambda entry: -entry[1])), fastest=fastest,
        layouts=layouts, memory_terms=_present([row.memory for row in shown]),
        time_terms=_present([row.time for row in shown]), device_limit_bytes=plan.device_limit_bytes,
        device_name=hardware.device_name if hardware else None, parameters=model.parameters if model else None,
        counts_tokens=any(point.tokens_per_second != point.samples_per_second for point in plan.fastest))


def segments(values: Mapping[str, float], *, scale: float) -> tuple[Segment, ...]:
    """Pieces one after the other, on a bar that is `scale` long."""
    found, start = [], 0.0
    for label, value in values.items():
        length = 100 * value / scale if scale else 0.0
        found.append(Segment(label=label, value=value, start=start, length=length))
        start += length
    return tuple(found)


def _ranking(numbered: Sequence[tuple[int, PlannedPoint]], plan: PlanSummary) -> Ranking:
    texts = {title: [text(point) for _, point in numbered] for title, text in _COLUMNS.items()}
    common = {title: values[0] for title, values in texts.items() if len(set(values)) == 1 and len(numbered) > 1}
    columns = tuple(title for title in texts if title not in common)
    slowest = max((point.prediction.step_seconds or 0.0 for _, point in numbered), default=0.0)
    largest = max((point.prediction.peak_device_bytes for _, point in numbered), default=0)
    return Ranking(columns=columns, common=tuple(common.items()), rows=tuple(PlannedRow(
        number=number, point=point, cells=tuple(texts[title][place] for title in columns),
        text=" ".join(f"{name}={getattr(point.config, name)}" for name in plan.space if hasattr(point.config, name)),
        memory=segments(_spaced(point.prediction.device_bytes), scale=max(plan.device_limit_bytes or 0, largest)),
        time=segments(_times(point.prediction.seconds), scale=slowest))
        for place, (number, point) in enumerate(numbered)))


def _times(seconds: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for term, value in seconds.items():
        label = _TIMES.get(term, term)
        found[label] = found.get(label, 0.0) + value
    return found


def _spaced(terms: Mapping[str, int]) -> dict[str, float]:
    return {term.replace("_", " "): value for term, value in terms.items()}


def _present(bars: Sequence[Sequence[Segment]]) -> tuple[tuple[int, str], ...]:
    """(place, label) of the pieces that any of the bars has."""
    labels: dict[str, int] = {}
    for bar in bars:
        labels.update({piece.label: place for place, piece in enumerate(bar) if piece.value})
    return tuple(sorted((place, label) for label, place in labels.items()))


def _offload(point: PlannedPoint) -> str:
    ratio = point.config.offload_optimizer_ratio
    optimizer = f"optimizer {ratio:.0%}" if ratio else ""
    return ", ".join(filter(None, (optimizer, "parameters" if point.config.offload_param else ""))) or "none"


_COLUMNS: dict[str, Callable[[PlannedPoint], str]] = {
    "Tensor × pipeline × data": lambda point: " × ".join(
        str(degree) for degree in (point.tensor_parallel, point.pipeline_parallel, point.data_parallel)),
    "ZeRO": lambda point: str(point.config.zero_stage),
    "Micro-batch × steps": lambda point:
        f"{point.config.micro_batch_size} × {point.config.gradient_accumulation_steps}",
    "Precision": lambda point: point.config.precision,
    "Checkpointing": lambda point: point.config.activation_checkpointing,
    "Offload": _offload,
}
"""Of a ranking: what matters, by title."""
