"""How values look in a terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autotune.domain.cluster import Cluster
from autotune.domain.study import PlannedPoint, PlanSummary, Progress, StudyPhase, StudyState, Trial
from autotune.domain.throughput import Rate, is_of_rounds, rate_unit, shown_throughput, throughput, valid_runs
from engine.config import TrainConfig
from engine.report import Outcome
from engine.values import Precision

console = Console()
_TABLE_WIDTH = 120
STATE_STYLES = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "queued": "dim"}
_SHORT = {"zero_stage": "zero", "micro_batch_size": "micro", "gradient_accumulation_steps": "accum",
          "activation_checkpointing": "checkpointing", "offload_optimizer_ratio": "offload"}


def print_wide(*parts: Table | str) -> None:
    """Print tables that must not be cut, though a pipe has no width of its own."""
    wide = Console(width=max(console.width, _TABLE_WIDTH), highlight=False)
    for part in parts:
        wide.print(part)


class BestLike(Protocol):
    """What `BestConfig` and the API's short form of it have in common."""

    @property
    def trial_number(self) -> int: ...
    @property
    def config(self) -> TrainConfig: ...
    @property
    def tokens_per_second(self) -> float: ...
    @property
    def samples_per_second(self) -> float: ...
    @property
    def tokens_per_second_interval(self) -> tuple[float, float]: ...
    @property
    def peak_device_bytes(self) -> int: ...
    @property
    def baseline_tokens_per_second(self) -> float | None: ...
    @property
    def baseline_peak_device_bytes(self) -> int | None: ...
    @property
    def speedup(self) -> float | None: ...
    @property
    def speedup_interval(self) -> tuple[float, float] | None: ...
    @property
    def confirmed(self) -> bool: ...
    @property
    def tie_with(self) -> tuple[int, ...]: ...


class StudyLike(Protocol):
    """What `Study` and the API's form of it have in common."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> StudyState: ...
    @property
    def phase(self) -> StudyPhase | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def note(self) -> str | None: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def best(self) -> BestLike | None: ...


def print_json(value: Any) -> None:
    """One JSON document on one line of standard output."""
    import json

    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    sys.stdout.write(json.dumps(plain, allow_nan=False) + "\n")
    sys.stdout.flush()


def bytes_text(count: float) -> str:
    """``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def rate_text(rate: Rate, per_second: float | None = None) -> str:
    """``12,345 tok/s``, or ``samples/s`` of a task without tokens.

    Args:
        per_second: another rate than this one's, in its unit.
    """
    number = rate.tokens_per_second if per_second is None else per_second
    return f"{number:,.0f} {rate_unit(rate)}" if number >= 100 else f"{number:,.2f} {rate_unit(rate)}"


def config_text(config: TrainConfig, base: TrainConfig | None = None) -> str:
    """What distinguishes a configuration: fields that differ from the base, the batch and the stage always."""
    always = {"zero_stage", "micro_batch_size", "gradient_accumulation_steps", "precision"}
    base = base or TrainConfig.model_validate({})
    shown = []
    for name, value in config.model_dump().items():
        if name in always or value != getattr(base, name):
            shown.append(f"{_SHORT.get(name, name)}={value}")
    return " ".join(shown)


def trial_line(trial: Trial, run: int = 0, base: TrainConfig | None = None) -> str:
    """One run of a finished trial on one line, with the speed of that run alone.

    Args:
        run: which of its measurements, counted from 0; of a trial that was not measured, 0.
    """
    parts = [f"trial {trial.number:>3}", f"{outcome_text(trial):<12}"]
    measured = trial.measurements[run] if trial.measurements else None
    if measured is not None:
        parts += [f"{rate_text(measured):>14}", f"peak {bytes_text(measured.peak_device_bytes):>10}"]
    parts.append(config_text(trial.config, base))
    if trial.detail and trial.outcome is not Outcome.OK:
        parts.append(f"- {first_line(trial.detail)}")
    if measured is not None and measured.contended:
        parts.append("(contended: does not count)")
    if run:
        parts.append(f"(measured again, {run})")
    return "  ".join(parts)


def measured_text(trial: Trial) -> tuple[str, str]:
    """(speed, peak device memory) over all of a trial's measurements; empty where nothing was measured."""
    if trial.measurement is None or trial.peak_device_bytes is None:
        return "", ""
    rate = shown_throughput(trial) or trial.measurement  # the latter of a trial that did not end well
    return rate_text(rate), bytes_text(trial.peak_device_bytes)


def outcome_text(trial: Trial) -> str:
    return trial.outcome.value if trial.outcome else trial.state.value


def first_line(text: str, width: int = 160) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= width else line[:width - 1] + "…"


def studies_table(rows: Iterable[tuple[str, str, str, str, str]]) -> Table:
    """Studies: id, name, state, progress, best."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("id", "name", "state", "trials", "best"):
        table.add_column(title, no_wrap=title in ("id", "state", "trials"))
    for row in rows:
        table.add_row(row[0], escape(row[1]), f"[{STATE_STYLES[row[2]]}]{row[2]}[/]", row[3], row[4])
    return table


def plan_parts(plan: PlanSummary) -> Iterator[Table | str]:
    """The ranking, and where there are several layouts, the best of each; what is the same in all rows is said once.

    Bytes are those of the device that holds most; tp, pp and dp are tensor, pipeline and data parallelism.
    """
    rows = list(enumerate(plan.rows, start=1))
    if plan.fastest:
        yield from _ranking("Predicted to be fastest", rows[:len(plan.fastest)], plan)
    if plan.layouts:
        layouts = [rows[plan.rows.index(point)] for point in plan.layouts]
        yield from _ranking("The fastest of each layout", layouts, plan)


def _ranking(title: str, rows: Sequence[tuple[int, PlannedPoint]], plan: PlanSummary) -> Iterator[Table | str]:
    points = [point for _, point in rows]
    texts = {title: [text(point) for point in points] for title, text in _PLAN_COLUMNS.items()}
    common = {title: values[0] for title, values in texts.items() if len(set(values)) == 1 and len(points) > 1}
    limit = f", {bytes_text(plan.device_limit_bytes)} a device" if plan.device_limit_bytes else ""
    yield f"\n{title}{limit}" + (f"; all {', '.join(f'{name} {value}' for name, value in common.items())}"
                                 if common else "")
    by_tokens = any(point.tokens_per_second != point.samples_per_second for point in points)
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    varying = [name for name in texts if name not in common]
    for heading in ("row", "tokens/s" if by_tokens else "samples/s", "step ms", "MFU %", "GiB", *varying):
        table.add_column(heading, justify="right", no_wrap=True)
    for (number, point), *chosen in zip(rows, *(texts[name] for name in varying), strict=True):
        rate = point.tokens_per_second if by_tokens else point.samples_per_second
        seconds, utilization = point.prediction.step_seconds, point.model_flops_utilization
        table.add_row(str(number), _short(rate or 0.0), _short(1000 * (seconds or 0.0)),
                      f"{100 * utilization:.1f}" if utilization else "",
                      f"{point.prediction.peak_device_bytes / 2**30:.1f}", *chosen)
    yield table


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _offload(point: PlannedPoint) -> str:
    config = point.config
    optimizer = f"optim {config.offload_optimizer_ratio:.0%}" if config.offload_optimizer_ratio else ""
    return ", ".join(filter(None, (optimizer, "params" if config.offload_param else ""))) or "none"


_PLAN_COLUMNS: dict[str, Callable[[PlannedPoint], str]] = {
    "tp": lambda point: str(point.tensor_parallel),
    "pp": lambda point: str(point.pipeline_parallel),
    "dp": lambda point: str(point.data_parallel),
    "zero": lambda point: str(point.config.zero_stage),
    "micro": lambda point: str(point.config.micro_batch_size),
    "accum": lambda point: str(point.config.gradient_accumulation_steps),
    "precision": lambda point: point.config.precision,
    "checkpoint": lambda point: point.config.activation_checkpointing,
    "offload": _offload,
}
"""Knobs that matter, by title."""


def clusters_table(clusters: Iterable[Cluster]) -> Table:
    """What tells clusters apart."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("name", "device"):
        table.add_column(title, no_wrap=True)
    for title in ("memory", "bf16 peak", "reached", "a node", "inside", "between nodes"):
        table.add_column(title, justify="right", no_wrap=True)
    for cluster in clusters:
        precision: Precision = "bf16" if "bf16" in cluster.matmul_flops_per_second else "fp16"
        table.add_row(
            cluster.name, cluster.device_name, bytes_text(cluster.memory_bytes),
            f"{cluster.matmul_peak_flops_per_second[precision] / 1e12:,.0f} TFLOP/s",
            f"{cluster.matmul_flops_per_second[precision] / 1e12:,.0f} TFLOP/s",
            f"{cluster.links.devices_per_node} devices", f"{cluster.links.intra_bytes_per_second / 1e9:,.0f} GB/s",
            f"{cluster.links.inter_bytes_per_second / 1e9:,.0f} GB/s")
    return table


def progress_text(progress: Progress) -> str:
    total = "?" if progress.trials_total is None else str(progress.trials_total)
    return f"{progress.trials_finished}/{total}"


def winner_lines(best: BestLike, trials: Mapping[int, Trial]) -> Sequence[str]:
    """The winner against the baseline, and what is not told apart from it.

    Args:
        trials: by number.
    """
    low, high = best.tokens_per_second_interval
    lines = [f"winner: trial {best.trial_number}: {rate_text(best)} (95 % interval {low:,.0f} to "
             f"{high:,.0f}), peak {bytes_text(best.peak_device_bytes)}", f"  {config_text(best.config)}"]
    if best.baseline_tokens_per_second is not None:
        peak = best.baseline_peak_device_bytes
        lines.append(f"baseline: {rate_text(best, best.baseline_tokens_per_second)}"
                     + (f", peak {bytes_text(peak)}" if peak is not None else ""))
    if best.speedup is not None:
        interval = best.speedup_interval
        between = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        rounds = ", in the same rounds" if is_of_rounds(best) else ""
        lines.append(f"speed-up: {best.speedup:.2f}x{between}{rounds}")
    elif best.baseline_peak_device_bytes is not None:
        lines.append("speed-up unknown: other work slowed the machine whenever the baseline was measured")
    if not best.confirmed:
        lines.append("not confirmed: not measured again, or other work slowed the machine while it was")
    if best.tie_with:
        told = ", ".join(_tie_text(number, trials.get(number)) for number in best.tie_with)
        lines.append(f"not told apart from the fastest: {told}")
    return lines


def _tie_text(number: int, trial: Trial | None) -> str:
    rate = throughput(trial) if trial is not None else None
    if trial is None or rate is None:
        return f"trial {number}"
    runs = valid_runs(trial)
    return f"trial {number} ({rate_text(rate)}, measured {'once' if runs == 1 else f'{runs} times'})"
