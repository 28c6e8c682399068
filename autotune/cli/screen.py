"""A study while it runs: a live screen in a terminal, one line per event elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotune.cli.output import (
    STATE_STYLES,
    StudyLike,
    config_text,
    measured_text,
    outcome_text,
    progress_text,
    rate_text,
    trial_line,
)
from autotune.domain.study import Trial, TrialState

SHOWN_TRIALS = 12


class StudyScreen:
    """Shows a study. Call `show` whenever something changed; each run of a finished trial is told once.

    How the study ended is left to who shows it: there is more to say of that than of a change.

    Args:
        quiet: show nothing at all.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._live = None if quiet or not console.is_terminal else Live(console=console, refresh_per_second=8)
        self._told: dict[int, int] = {}
        self._last_status = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, study: StudyLike, trials: dict[int, Trial]) -> None:
        """Bring the screen up to date.

        Args:
            trials: by number.
        """
        if self._quiet:
            return
        if self._live is not None:
            self._live.update(_picture(study, trials))
            return
        self._tell(study, trials)

    def _tell(self, study: StudyLike, trials: dict[int, Trial]) -> None:
        if self._last_status:  # the trials that came meanwhile belong to what the study did until now
            self._tell_trials(trials)
        status = f"{study.state.value}{f': {study.phase.value}' if study.phase else ''}"
        if status != self._last_status and not study.state.is_final:
            self._last_status = status
            self._console.print(f"study {study.id} {status}", highlight=False, markup=False, soft_wrap=True)
        self._tell_trials(trials)

    def _tell_trials(self, trials: dict[int, Trial]) -> None:
        base = trials[0].config if 0 in trials else None
        for number in sorted(trials):
            trial = trials[number]
            if trial.state is not TrialState.FINISHED:
                continue
            runs = max(len(trial.measurements), 1)
            for run in range(self._told.get(number, 0), runs):
                self._console.print(trial_line(trial, run, base), highlight=False, markup=False, soft_wrap=True)
            self._told[number] = runs


def _picture(study: StudyLike, trials: dict[int, Trial]) -> RenderableType:
    style = STATE_STYLES[study.state.value]
    head = Text.assemble(("study ", "dim"), study.id, "  ", (study.state.value, style),
                         f"  {study.phase.value}" if study.phase else "", f"  trials {progress_text(study.progress)}")
    rest = study.progress.predicted_rest_seconds
    if rest is not None and not study.state.is_final:
        head.append(f"  about {rest:.0f} s left", "dim")
    total = study.progress.trials_total
    parts: list[RenderableType] = [head, ProgressBar(
        total=total or 100, completed=study.progress.trials_finished, pulse=total is None and not study.state.is_final,
        width=60)]
    if trials:
        parts.append(_table(trials, study.best.trial_number if study.best else None))
    if study.best is not None and not study.state.is_final:
        gain = f"  {study.best.speedup:.2f}x the baseline" if study.best.speedup is not None else ""
        speed = rate_text(study.best)
        parts.append(Text(f"best so far: trial {study.best.trial_number}, {speed}{gain}", "bold"))
    return Group(*parts)


def _table(trials: dict[int, Trial], best: int | None) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("trial", "outcome", "speed", "peak", "configuration"):
        table.add_column(title, justify="right" if title in ("trial", "speed", "peak") else "left",
                         no_wrap=title != "configuration")
    base = trials[0].config if 0 in trials else None
    for number in sorted(trials)[-SHOWN_TRIALS:]:
        trial = trials[number]
        outcome = outcome_text(trial)
        color = {"ok": "green", "running": "cyan"}.get(outcome, "yellow")
        table.add_row(
            f"{'* ' if number == best else ''}{number}", f"[{color}]{outcome}[/]",
            *measured_text(trial), escape(config_text(trial.config, base)))
    return table
