"""How values look in a terminal."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autotune.domain.study import PlanSummary, Progress, Study, StudyPhase, StudyState, Trial
from autotune.domain.throughput import shown_throughput
from engine.config import TrainConfig
from engine.report import Outcome

console = Console()
STATE_STYLES = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "queued": "dim"}
_SHORT = {"zero_stage": "zero", "micro_batch_size": "micro", "gradient_accumulation_steps": "accum",
          "activation_checkpointing": "checkpointing", "offload_optimizer_ratio": "offload"}


class BestLike(Protocol):
    """What `BestConfig` and the API's short form of it have in common."""

    @property
    def trial_number(self) -> int: ...
    @property
    def config(self) -> TrainConfig: ...
    @property
    def tokens_per_second(self) -> float: ...
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


def rate_text(tokens_per_second: float) -> str:
    """``12,345 tok/s``."""
    return f"{tokens_per_second:,.0f} tok/s" if tokens_per_second >= 100 else f"{tokens_per_second:,.2f} tok/s"


def config_text(config: TrainConfig, base: TrainConfig | None = None) -> str:
    """What distinguishes a configuration: fields that differ from the base, the batch and the stage always."""
    always = {"zero_stage", "micro_batch_size", "gradient_accumulation_steps", "precision"}
    base = base or TrainConfig.model_validate({})
    shown = []
    for name, value in config.model_dump().items():
        if name in always or value != getattr(base, name):
            shown.append(f"{_SHORT.get(name, name)}={value}")
    return " ".join(shown)


def trial_line(trial: Trial, base: TrainConfig | None = None) -> str:
    """One finished trial on one line."""
    parts = [f"trial {trial.number:>3}", f"{outcome_text(trial):<12}"]
    speed, peak = measured_text(trial)
    if speed:
        parts += [f"{speed:>14}", f"peak {peak:>10}"]
    parts.append(config_text(trial.config, base))
    if trial.detail and trial.outcome is not Outcome.OK:
        parts.append(f"- {first_line(trial.detail)}")
    return "  ".join(parts)


def measured_text(trial: Trial) -> tuple[str, str]:
    """(speed, peak device memory) over all of a trial's measurements; empty where nothing was measured."""
    if trial.measurement is None or trial.peak_device_bytes is None:
        return "", ""
    rate = shown_throughput(trial) or trial.measurement  # the latter of a trial that did not end well
    return rate_text(rate.tokens_per_second), bytes_text(trial.peak_device_bytes)


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


def plan_table(study: Study, plan: PlanSummary) -> Table:
    """Configurations predicted to be fastest: throughput, step, memory."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("predicted", "step s", "peak"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("configuration")
    for config, prediction in plan.fastest:
        assert prediction.step_seconds is not None
        samples = study.request.training.global_batch_size / prediction.step_seconds
        table.add_row(f"{samples:,.2f} samples/s", f"{prediction.step_seconds:.4g}",
                      bytes_text(prediction.peak_device_bytes), config_text(config))
    return table


def progress_text(progress: Progress) -> str:
    total = "?" if progress.trials_total is None else str(progress.trials_total)
    return f"{progress.trials_finished}/{total}"


def winner_lines(best: BestLike) -> Sequence[str]:
    """The winner against the baseline."""
    low, high = best.tokens_per_second_interval
    lines = [f"winner: trial {best.trial_number}: {rate_text(best.tokens_per_second)} (95 % interval {low:,.0f} to "
             f"{high:,.0f}), peak {bytes_text(best.peak_device_bytes)}", f"  {config_text(best.config)}"]
    if best.baseline_tokens_per_second is not None:
        peak = best.baseline_peak_device_bytes
        lines.append(f"baseline: {rate_text(best.baseline_tokens_per_second)}"
                     + (f", peak {bytes_text(peak)}" if peak is not None else ""))
    if best.speedup is not None:
        interval = best.speedup_interval
        between = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        lines.append(f"speed-up: {best.speedup:.2f}x{between}")
    elif best.baseline_peak_device_bytes is not None:
        lines.append("speed-up unknown: other work slowed the machine whenever the baseline was measured")
    if not best.confirmed:
        lines.append("not confirmed: not measured again, or other work slowed the machine while it was")
    if best.tie_with:
        trials = "trials" if len(best.tie_with) > 1 else "trial"
        lines.append(f"as good as equal, within its interval: {trials} {', '.join(map(str, best.tie_with))}")
    return lines
