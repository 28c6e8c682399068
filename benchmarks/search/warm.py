"""What earlier studies are worth: the same search with and without them."""

from collections.abc import Iterator, Sequence

from autotune.domain.earlier import EarlierStudy, Relation
from benchmarks import report
from benchmarks.search.problems import Score, run_study, run_trials, score, summary
from benchmarks.search.surfaces import PAIRS, Pair, problem_before, surface

EARLIER_TRIALS = 20


def rows(seeds: range, *, trials: int) -> Iterator[report.Row]:
    """A row without an earlier study, one for each kind of pair, and one after two, of which one misleads."""
    yield _row("nothing", [run_study(surface(seed), "guided", trials=trials) for seed in seeds])
    for pair in PAIRS:
        yield _row(pair.name, [after_others([pair], seed, trials=trials) for seed in seeds])
    alike, opposite = PAIRS[0], PAIRS[-1]
    yield _row(f"{alike.name}, and {opposite.name}",
               [after_others([alike, opposite], seed, trials=trials) for seed in seeds])


def after_others(pairs: Sequence[Pair], seed: int, *, trials: int, told: int = EARLIER_TRIALS) -> Score:
    """How a study goes that knows the trials of earlier ones."""
    later = surface(seed)
    return score(later, run_trials(later, "guided", trials=trials,
                                   earlier=[_earlier(pair, seed, trials=told) for pair in pairs]))


def _earlier(pair: Pair, seed: int, *, trials: int) -> EarlierStudy:
    done = run_trials(problem_before(pair, seed), "guided", trials=trials)
    return EarlierStudy(study_id=pair.name, relation=Relation.ELSEWHERE if pair.same_model else Relation.FAMILY,
                        trials=tuple(trial for trial in done if trial.measurement is not None))


def _row(name: str, scores: list[Score]) -> report.Row:
    return {"begins with": name, "studies": len(scores), **summary(scores)}
