"""Results as text: one scenario in detail, all scenarios as a table of `time / peak` ratios."""

from collections.abc import Mapping, Sequence

from benchmarks.peers.plan import BASE, ENGINES, Scenario
from benchmarks.peers.results import EngineResult

Outcome = EngineResult | str
"""A string says why an engine failed."""

_MIB = 2**20


def detail(outcomes: Mapping[str, Outcome]) -> str:
    """Everything measured in one scenario, an engine a line."""
    rows: list[tuple[str, ...]] = [
        ("", "time [quartiles]", "quiet (rounds)", "cpu", "step s", "peak", "peak MiB", "heap", "shared", "foreign",
         "last loss", "off by", "")]
    rows += [_detail_row(ENGINES[name], outcome) for name, outcome in outcomes.items()]
    return _aligned(rows)


def summary(scenarios: Sequence[Scenario], outcomes: Mapping[str, Mapping[str, Outcome]], *, markdown: bool) -> str:
    """Engines by scenarios.

    Args:
        outcomes: scenario -> engine -> outcome.
    """
    names = [name for name in ENGINES
             if name != BASE and any(name in outcomes[scenario.name] for scenario in scenarios)]
    rows = [(f"time [quartiles] / peak, {ENGINES[BASE]} = 1", *(scenario.title for scenario in scenarios))]
    rows += [(ENGINES[name], *(_cell(outcomes[scenario.name].get(name)) for scenario in scenarios)) for name in names]
    table = _markdown(rows) if markdown else _aligned(rows)
    notes = [f"{scenario.title}, {ENGINES[name]}: {_disagreement(outcome)}" for scenario in scenarios
             for name, outcome in outcomes[scenario.name].items()
             if isinstance(outcome, EngineResult) and not outcome.agrees]
    return "\n".join([table, *(f"\n\\* {note}" for note in notes)])


def _detail_row(label: str, outcome: Outcome) -> tuple[str, ...]:
    if isinstance(outcome, str):
        return (label, f"failed: {outcome}")
    quiet = "-" if outcome.quiet_time_ratio is None else f"{outcome.quiet_time_ratio:.3f}"
    return (label, _time(outcome, digits=3), f"{quiet} ({outcome.quiet_rounds})", f"{outcome.cpu_ratio:.3f}",
            f"{outcome.step_seconds:.3f}", f"{outcome.peak_ratio:.3f}", f"{outcome.peak_bytes / _MIB:.1f}",
            f"{outcome.heap_peak_bytes / _MIB:.1f}", f"{outcome.shared_peak_bytes / _MIB:.1f}",
            f"{outcome.foreign_cores:.2f}", f"{outcome.losses[-1]:.6f}", f"{outcome.loss_difference:.1e}",
            "" if outcome.agrees else _disagreement(outcome))


def _disagreement(result: EngineResult) -> str:
    return f"losses disagree by {result.loss_difference:.1e} ({result.why_different or 'for no known reason'})"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if isinstance(outcome, str):
        return "failed"
    return f"{_time(outcome, digits=2)} / {outcome.peak_ratio:.2f}" + ("" if outcome.agrees else " *")


def _time(result: EngineResult, *, digits: int) -> str:
    ratio = result.time_ratio
    return f"{ratio.median:.{digits}f} [{ratio.low:.{digits}f}, {ratio.high:.{digits}f}]"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell; a row may end early, with a cell of any length."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[column]) for row in full) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
                     for row in rows)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "| " + " | ".join("---" for _ in rows[0]) + " |", *body])
