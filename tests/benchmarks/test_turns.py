"""What is made of times by round."""

import pytest

from benchmarks.turns import Seconds, mean_over_ranks, middle, ratio


def test_ratios_are_taken_within_a_round() -> None:
    base = [Seconds(wall=2.0, cpu=2.0), Seconds(wall=1.0, cpu=1.0), Seconds(wall=9.0, cpu=3.0)]
    mine = [Seconds(wall=3.0, cpu=2.0), Seconds(wall=1.5, cpu=1.1), Seconds(wall=9.9, cpu=3.6)]
    assert ratio(mine, base) == pytest.approx(Seconds(wall=1.5, cpu=1.1))
    assert middle(base) == Seconds(wall=2.0, cpu=2.0)


def test_a_round_is_the_mean_of_the_ranks() -> None:
    ranks = [{"ddp": [Seconds(1.0, 3.0), Seconds(5.0, 1.0)]}, {"ddp": [Seconds(3.0, 5.0), Seconds(7.0, 2.0)]}]
    assert mean_over_ranks(ranks) == {"ddp": [Seconds(2.0, 4.0), Seconds(6.0, 1.5)]}
