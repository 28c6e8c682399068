"""Repeats of one study, and which of them name another winner."""

import asyncio

from benchmarks.report import Row
from benchmarks.stability import repeat, strays
from tests.support.launcher import FakeLauncher
from tests.support.samples import sample_request


def row(winner: str, *tied: str) -> Row:
    return {"winner": winner, "tied with": ", ".join(tied)}


def test_a_repeat_tells_its_winner_with_what_it_took() -> None:
    found = asyncio.run(repeat(3, FakeLauncher(), sample_request()))
    assert (found["repeat"], found["winner"]) == (3, "stage 0 micro 4 fp32 recompute none")
    assert (found["trials"], found["measurements"]) == (6, 12)
    assert float(found["from"] or 0) <= float(found["tokens/s"] or 0) <= float(found["to"] or 0)


def test_other_winners_are_strays_unless_they_declare_the_tie_themselves() -> None:
    assert strays([row("a"), row("a"), row("b", "c", "a")]) == []
    assert strays([row("a"), row("a", "b"), row("b")]) == [row("b")], "the tie of another repeat"
    assert strays([row("a"), row("a"), row("b", "c")]) == [row("b", "c")], "a tie with another one"


def test_of_equally_frequent_winners_the_one_that_others_tie_with_counts() -> None:
    assert strays([row("a"), row("b", "a")]) == strays([row("b", "a"), row("a")]) == []
