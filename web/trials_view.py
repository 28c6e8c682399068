"""The trials table: how it is asked for (sort, filter, columns) and what it shows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import urlencode

from autotune.domain.study import BestConfig, Trial, TrialState
from autotune.domain.throughput import Throughput, shown_gain, told_throughput
from engine.config import TrainConfig
from engine.report import Outcome
from web.measured import fastest
from web.words import OUTCOMES, ROLES, Cue, trial_cue

KNOBS: tuple[str, ...] = tuple(TrainConfig.model_fields)
"""Every field of a configuration, in the contract's order."""

MEASURES: dict[str, str] = {
    "number": "trial",
    "outcome": "outcome",
    "tokens_per_second": "throughput",
    "gain": "against baseline",
    "step_seconds": "step time",
    "peak_device_bytes": "device peak",
    "peak_host_bytes": "host peak",
}
"""The columns that are always there, with their headings."""

_LARGEST_FIRST = ("tokens_per_second", "gain")


@dataclass(frozen=True, kw_only=True)
class TableView:
    """How the table is shown. Unknown values in a query fall back to the defaults: a stale link still works."""

    sort: str = "number"
    descending: bool = False
    outcome: str | None = None
    all_knobs: bool = False

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Self:
        sort = query.get("sort", "number")
        outcome = query.get("outcome") or None
        return cls(sort=sort if sort in MEASURES or sort in KNOBS else "number",
                   descending=query.get("order") == "desc",
                   outcome=outcome if outcome in (*Outcome, "running") else None,
                   all_knobs=query.get("knobs") == "all")

    def query(self) -> str:
        """The query string that gives this view back; empty for the view at first."""
        parts = {"sort": self.sort if self.sort != "number" else "", "order": "desc" if self.descending else "",
                 "outcome": self.outcome or "", "knobs": "all" if self.all_knobs else ""}
        return urlencode({name: value for name, value in parts.items() if value})

    def sorted_by(self, column: str) -> "TableView":
        """The view after a click on a column's heading: sort by it, or turn the order round."""
        if column == self.sort:
            return replace(self, descending=not self.descending)
        return replace(self, sort=column, descending=column in _LARGEST_FIRST)

    def aria_sort(self, column: str) -> str:
        """The column's ``aria-sort``."""
        if column != self.sort:
            return "none"
        return "descending" if self.descending else "ascending"


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One line. `gain` is the factor over the baseline's tokens per second; `running` has no numbers yet."""

    number: int
    role: str
    cue: Cue
    running: bool
    rate: Throughput | None
    gain: float | None
    peak_device_bytes: int | None
    peak_host_bytes: int | None
    runs: int
    contended: bool
    is_best: bool
    detail: str
    config: TrainConfig

    @property
    def values(self) -> dict[str, Any]:
        """What the table sorts by, column by column; None sorts last whatever the order."""
        return {
            "number": self.number, "outcome": self.cue.label,
            "tokens_per_second": self.rate.tokens_per_second if self.rate else None, "gain": self.gain,
            "step_seconds": self.rate.step_seconds if self.rate else None,
            "peak_device_bytes": self.peak_device_bytes, "peak_host_bytes": self.peak_host_bytes,
            **{name: getattr(self.config, name) for name in KNOBS}}


@dataclass(frozen=True, kw_only=True)
class TrialsTable:
    """The table as it is shown.

    Attributes:
        knobs: the configuration's columns; without `view.all_knobs` those that differ between any two trials.
        filters: (value, label, count) of each outcome that occurs.
        total: trials before the filter.
    """

    view: TableView
    rows: tuple[TrialRow, ...]
    knobs: tuple[str, ...]
    hidden_knobs: int
    filters: tuple[tuple[str, str, int], ...]
    total: int

    @property
    def any_host_bytes(self) -> bool:
        """Whether any trial kept anything on the host: else that column says nothing."""
        return any(row.peak_host_bytes for row in self.rows)


def trials_table(trials: Sequence[Trial], view: TableView, *, best_number: int | None = None,
                 winner: BestConfig | None = None) -> TrialsTable:
    """Filter, sort and choose the columns.

    Args:
        best_number: the trial to mark as best; the fastest one where not given.
        winner: as the study keeps it, with its gain over the baseline.
    """
    if best_number is None:
        best = fastest(tuple(trials))
        best_number = best.number if best else None
    baseline = next((trial for trial in trials if trial.number == 0), None)
    rows = [_row(trial, gain_over(baseline, trial, winner), is_best=trial.number == best_number) for trial in trials
            if view.outcome in (None, _outcome(trial))]
    knobs = KNOBS if view.all_knobs else differing_knobs([trial.config for trial in trials])
    counts = Counter(_outcome(trial) for trial in trials)
    labels = {**{outcome.value: cue.label for outcome, cue in OUTCOMES.items()}, "running": "running"}
    return TrialsTable(view=view, rows=_sorted(rows, view), knobs=knobs, hidden_knobs=len(KNOBS) - len(knobs),
                       filters=tuple((value, label, counts[value]) for value, label in labels.items()
                                     if counts[value] or value == view.outcome),
                       total=len(trials))


def differing_knobs(configs: Sequence[TrainConfig]) -> tuple[str, ...]:
    """Names of the fields that are not the same in all configurations."""
    return tuple(name for name in KNOBS if len({getattr(config, name) for config in configs}) > 1)


def gain_over(baseline: Trial | None, trial: Trial, winner: BestConfig | None) -> float | None:
    """Throughput over the baseline's; the winner has one, which the study compared round by round."""
    if winner is not None and trial.number == winner.trial_number:
        return winner.speedup
    return shown_gain(trial, baseline)


def _outcome(trial: Trial) -> str:
    return "running" if trial.outcome is None else trial.outcome.value


def _row(trial: Trial, gain: float | None, *, is_best: bool) -> TrialRow:
    return TrialRow(
        number=trial.number, role=ROLES[trial.role], cue=trial_cue(trial), running=trial.state is TrialState.RUNNING,
        rate=told_throughput(trial), gain=gain,
        peak_device_bytes=trial.peak_device_bytes, peak_host_bytes=trial.peak_host_bytes,
        runs=len(trial.measurements), contended=any(run.contended for run in trial.measurements), is_best=is_best,
        detail=trial.detail, config=trial.config)


def _sorted(rows: Sequence[TrialRow], view: TableView) -> tuple[TrialRow, ...]:
    keyed = [(row.values[view.sort], row) for row in rows]
    known = sorted(((key, row) for key, row in keyed if key is not None),
                   key=lambda entry: (entry[0], -entry[1].number if view.descending else entry[1].number),
                   reverse=view.descending)
    return tuple(row for _, row in known) + tuple(row for key, row in keyed if key is None)
