"""What is promised of `guided`, held against what was found."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import report


class Target(NamedTuple):
    """
    Attributes:
        part: of which it is promised.
        column: of the row of `guided`; a missing value is one that was not reached.
        limit: the most that it may be; the least with `at_least`.
        trials: of the row, where there is one for each number of trials.
        any_studies: whether it is promised of whatever surfaces were asked for, not only of the default ones.
    """

    part: str
    column: str
    limit: float
    at_least: bool = False
    trials: int | None = None
    any_studies: bool = True

    def is_for(self, row: report.Row) -> bool:
        return (row["part"] == self.part and row.get("sampler") == "guided"
                and (self.trials is None or row["trials"] == self.trials))

    def is_met(self, row: report.Row) -> bool:
        value = row[self.column]
        assert value is None or isinstance(value, int | float)
        if value is None:
            return False
        return value >= self.limit if self.at_least else value <= self.limit


TARGETS = (
    Target("a", "% after 10", 1.0, any_studies=False),
    Target("a", "90th percentile", 15.0, any_studies=False),
    Target("a", "share without", 0.9, at_least=True, any_studies=False),
    Target("b", "mean % after 3", 2.0),
    Target("b", "mean % after 5", 0.5),
    Target("c", "trials to 3 %", 8.0),
    Target("d", "ms", 100.0, trials=1000),
)


def missed(rows: Sequence[report.Row], *, default_studies: bool) -> list[str]:
    """The targets that rows miss, in words; of parts without a row of `guided` none is missed.

    Args:
        rows: each with its part.
        default_studies: whether the surfaces are those that targets of part (a) are for.
    """
    return [_told(target, row) for target in TARGETS if default_studies or target.any_studies
            for row in rows if target.is_for(row) and not target.is_met(row)]


def _told(target: Target, row: report.Row) -> str:
    after = "" if target.trials is None else f" after {target.trials} trials"
    bound = "at least" if target.at_least else "at most"
    value = row[target.column]
    found = f"{value:.4g}" if isinstance(value, int | float) else "not reached"
    return f"({target.part}) guided{after}: {target.column}: {found}, promised {bound} {target.limit:g}"
