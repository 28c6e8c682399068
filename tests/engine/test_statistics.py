"""Intervals and steadiness of step times, against scipy and against simulation."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from engine.statistics import (
    STEADY_WINDOW,
    measured_interval,
    middle,
    robust_error,
    robust_interval,
    robust_mean,
    steady_steps,
    t_quantile,
)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 8, 15, 30, 100])
@pytest.mark.parametrize("probability", [0.75, 0.9, 0.975])
def test_the_t_quantile_is_within_one_percent_of_the_exact_one(probability, degrees):
    assert t_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=0.01)


def test_the_interval_covers_the_true_mean_as_often_as_it_says():
    rng = random.Random(0)
    rounds = 2000
    covered = 0
    for _ in range(rounds):
        low, high = robust_interval([rng.gauss(1.0, 0.1) for _ in range(6)])
        covered += low <= 1.0 <= high
    assert covered / rounds == pytest.approx(0.95, abs=0.015)


def test_one_sample_says_nothing():
    assert robust_interval([0.5]) == (0.0, math.inf)


@pytest.mark.parametrize(
    ("samples", "steady"),
    [
        ([1.0, 1.0], 0),
        ([1.0, 1.05, 1.02], 3),
        ([9.0, 1.0, 1.05, 1.02], 3),
        ([1.0, 1.0, 2.0], 0),
        ([1.08, 1.0, 1.04], 2),  # slower than both that follow, by more than 3 %
        ([1.06, 1.0, 1.04], 3),
        ([1.0, 1.08, 1.01], 3),  # slow, but not from the start
        ([1.12, 1.05, 1.0], 1),
    ],
)
def test_steps_count_from_where_the_last_three_agree(samples, steady):
    assert steady_steps(samples, tolerance=0.03) == steady


def test_where_steps_only_vary_few_are_taken_for_warm_up():
    """Times without a trend: one in three would be the largest, and their mean is hardly changed."""
    rng = random.Random(0)
    rounds = 2000
    counted = []
    for _ in range(rounds):
        samples = [rng.gauss(1.0, 0.02) for _ in range(3)]
        counted += samples[3 - steady_steps(samples, tolerance=0.03):]
    assert len(counted) > 2.85 * rounds
    assert sum(counted) / len(counted) == pytest.approx(1.0, abs=0.002)


def test_the_mean_spares_a_fifth_at_either_end() -> None:
    """As scipy's, and from five samples on."""
    rng = random.Random(0)
    for count in range(1, 31):
        samples = [rng.expovariate(1.0) for _ in range(count)]
        assert robust_mean(samples) == pytest.approx(stats.trim_mean(samples, 0.2))
        assert middle(samples, float) == sorted(middle(samples, float))
    assert robust_mean([1.0, 2.0, 3.0, 10.0]) == 4.0
    assert robust_mean([1.0, 2.0, 3.0, 4.0, 100.0]) == 3.0


def test_one_step_that_was_held_up_does_not_decide() -> None:
    steps = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01]
    low, high = robust_interval([*steps, 5.0])
    assert robust_mean([*steps, 5.0]) == pytest.approx(1.0, abs=0.01)
    assert low > 0.97
    assert high < 1.03


def test_of_few_samples_the_interval_is_students() -> None:
    samples = [1.0, 1.2, 0.9, 1.1]
    low, high = stats.t.interval(0.95, 3, loc=1.05, scale=stats.sem(samples))
    assert robust_interval(samples) == (pytest.approx(low, rel=0.01), pytest.approx(high, rel=0.01))


def test_the_error_is_the_deviation_of_many_means() -> None:
    rng = random.Random(0)
    draws = [[rng.gauss(1.0, 0.1) + (0.5 if rng.random() < 0.05 else 0.0) for _ in range(20)] for _ in range(2000)]
    deviation = float(np.std([robust_mean(draw) for draw in draws]))
    assert float(np.mean([robust_error(draw) for draw in draws])) == pytest.approx(deviation, rel=0.1)
    assert robust_error([1.0]) == math.inf


def _measured(rng: random.Random, spread: float) -> list[float]:
    """Heavy-tailed times around 1, from three on that agree, until their interval is narrow or 30 are there."""
    def step() -> float:
        return 1 + spread * rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3)  # Student's t, 3 degrees

    samples: list[float] = []
    while not steady_steps(samples, tolerance=math.inf):
        samples.append(step())
    samples = samples[-STEADY_WINDOW:]
    while len(samples) < 5 or (
            len(samples) < 30 and robust_interval(samples)[1] - robust_mean(samples) > 0.03 * robust_mean(samples)):
        samples.append(step())
    return samples


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.06])
def test_the_interval_of_times_that_were_measured_until_it_was_narrow_covers_their_mean(spread: float) -> None:
    rng = random.Random(0)
    intervals = [measured_interval(_measured(rng, spread)) for _ in range(1500)]
    assert 0.93 <= sum(low <= 1.0 <= high for low, high in intervals) / len(intervals) < 0.98
