"""What an earlier study is worth: the same search with and without it."""

from collections.abc import Iterator

from autotune.domain.earlier import EarlierStudy, Relation
from benchmarks import report
from benchmarks.search.problems import Score, run_study, run_trials, score, summary
from benchmarks.search.surfaces import PAIRS, Pair, problems, surface

EARLIER_TRIALS = 20


def rows(seeds: range, *, trials: int) -> Iterator[report.Row]:
    """A row without an earlier study, and one for each kind of pair."""
    yield _row("nothing", [run_study(surface(seed), "guided", trials=trials) for seed in seeds])
    for pair in PAIRS:
        yield _row(pair.name, [after_another(pair, seed, trials=trials) for seed in seeds])


def after_another(pair: Pair, seed: int, *, trials: int, told: int = EARLIER_TRIALS) -> Score:
    """How a study goes that knows the trials of an earlier one."""
    before, later = problems(pair, seed)
    relation = Relation.ELSEWHERE if pair.same_model else Relation.FAMILY
    done = run_trials(before, "guided", trials=told)
    earlier = EarlierStudy(study_id="earlier", relation=relation,
                           trials=tuple(trial for trial in done if trial.measurement is not None))
    return score(later, run_trials(later, "guided", trials=trials, earlier=[earlier]))


def _row(name: str, scores: list[Score]) -> report.Row:
    return {"begins with": name, "studies": len(scores), **summary(scores)}
