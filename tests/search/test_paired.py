"""Comparing trials round by round."""

import math
from random import Random

import pytest

from autotune.domain.study import Trial
from autotune.domain.throughput import throughput
from autotune.search.choose import choose
from autotune.search.paired import Rounds, scatter
from engine.config import TrainConfig
from engine.report import Outcome
from tests.search.support import MIB, finished, measurement


def trial(number: int, *rounds: float, outcome: Outcome = Outcome.OK, peak: int = MIB, first: float = 1.0) -> Trial:
    """Measured once beforehand, and again in rounds: mean seconds of each, two nearly equal steps; 0: contended."""
    repeats = [measurement(seconds * 0.999, seconds * 1.001, peak_device_bytes=peak) if seconds
               else measurement(1.0, 1.0, contended=True) for seconds in rounds]
    config = TrainConfig.model_validate({"micro_batch_size": number + 1})
    return finished(number, config, measurement(first, first, peak_device_bytes=peak), *repeats, outcome=outcome)


class TestRounds:
    def test_what_slows_a_whole_round_cancels(self) -> None:
        """Rounds of 1 and 1.5 s: unpaired, a gain of 5 % would be lost in that."""
        gain = Rounds([trial(0, 1.0, 1.5), trial(1, 1.05, 1.5751), trial(2, 1.1, 1.6499)]).gain(0, 1)
        assert gain is not None
        assert gain.ratio == pytest.approx(1.05, rel=1e-3)
        assert gain.is_shown
        assert 1.04 < gain.interval[0] < gain.ratio < gain.interval[1] < 1.06

    def test_a_gain_the_other_way_round_is_its_inverse(self) -> None:
        rounds = Rounds([trial(0, 1.0, 1.1, 1.0), trial(1, 1.02, 1.1, 1.03)])
        one, other = rounds.gain(0, 1), rounds.gain(1, 0)
        assert one is not None
        assert other is not None
        assert one.ratio * other.ratio == pytest.approx(1)
        assert one.interval[0] * other.interval[1] == pytest.approx(1)

    def test_the_first_measurements_do_not_count(self) -> None:
        gain = Rounds([trial(0, 1.0, 1.0, first=9.0), trial(1, 2.0, 2.0, first=1.0)]).gain(0, 1)
        assert gain is not None
        assert gain.ratio == pytest.approx(2)

    def test_less_than_two_common_rounds_say_nothing(self) -> None:
        rounds = Rounds([trial(0, 1.0, 1.0), trial(1, 1.1), trial(2, 0, 1.1), trial(3)])
        assert [rounds.gain(0, other) for other in (1, 2, 3, 9)] == [None] * 4
        assert Rounds([]).gain(0, 1) is None

    def test_trials_that_cannot_win_are_left_out(self) -> None:
        assert Rounds([trial(0, 1.0, 1.0), trial(1, 1.0, 1.0, outcome=Outcome.CRASHED)]).gain(0, 1) is None

    def test_intervals_hold_what_they_say(self) -> None:
        """Four trials in two rounds that drift by 5 %: the true gain of 3 % lies within, 95 times in 100."""
        random, covered = Random(1), 0
        for _ in range(300):
            drift = [math.exp(random.gauss(0, 0.05)) for _ in range(2)]
            trials = [trial(number, *(1.03**number * each * math.exp(random.gauss(0, 0.01)) for each in drift))
                      for number in range(4)]
            gain = Rounds(trials).gain(0, 1)
            assert gain is not None
            covered += gain.interval[0] <= 1.03 <= gain.interval[1]
        assert 0.92 * 300 <= covered <= 0.99 * 300


class TestScatter:
    def test_it_is_of_measurements_around_their_trial_s_mean(self) -> None:
        """Two trials 1.02 times apart from one measurement to the next: deviations of log 1.02 / sqrt 2 each."""
        found = scatter([trial(0, 1.02), trial(1, 2.04, first=2.0), trial(2, first=9.0)])
        assert found.freedom == 2
        assert found.deviation == pytest.approx(math.log(1.02) / math.sqrt(2))
        assert found.error(1, 4) == pytest.approx(4.303 * found.deviation * math.sqrt(1.25), rel=1e-3)

    def test_without_repeats_nothing_is_known(self) -> None:
        assert scatter([trial(0), trial(1)]).error(1, 1) == 0.0
        assert scatter([trial(0, 0), trial(1, 1.0, outcome=Outcome.CRASHED)]).freedom == 0

    def test_intervals_hold_what_they_say(self) -> None:
        """Of one trial measured three times and one measured once, beside another that was measured three times."""
        random, covered = Random(2), 0
        for _ in range(300):
            once, *runs = (math.exp(random.gauss(0, 0.02)) for _ in range(7))
            trials = [trial(0, *runs[1:3], first=runs[0]), trial(1, *runs[4:6], first=runs[3]), trial(2, first=once)]
            means = [sum(math.log(run) for run in runs[:3]) / 3, math.log(once)]
            covered += abs(means[0] - means[1]) <= scatter(trials).error(3, 1)
        assert 0.92 * 300 <= covered <= 0.99 * 300


class TestChoice:
    def test_one_measured_only_once_ties_where_others_scatter_as_far(self) -> None:
        """3 % slower in its one measurement, which is as far as the others' lie apart; 20 % is not. It cannot win."""
        trials = [trial(0, 1.03, 1.0, 1.03), trial(1, 1.06, 1.03, 1.06, first=1.03), trial(2, first=1.03, peak=1),
                  trial(3, first=1.2)]
        choice = choose(trials, among=[0, 1])
        assert choice is not None
        assert (choice.trial_number, choice.tie_with) == (0, (2,))

    def test_of_finalists_that_rounds_cannot_tell_apart_the_smaller_wins(self) -> None:
        trials = [trial(0, 2.0, 2.1, peak=4 * MIB), trial(1, 1.0, 1.1, peak=3 * MIB),
                  trial(2, 1.008, 1.099, peak=2 * MIB)]
        choice = choose(trials, among=[0, 1, 2])
        assert choice is not None
        assert (choice.trial_number, choice.tie_with) == (2, (1,))

    def test_less_memory_is_no_reason_to_be_slower(self) -> None:
        """Not told apart, but 5 % slower as far as one can see."""
        trials = [trial(0, 1.0, 1.2, peak=3 * MIB), trial(1, 1.15, 1.15, peak=2 * MIB)]
        choice = choose(trials, among=[0, 1])
        assert choice is not None
        assert (choice.trial_number, choice.tie_with) == (0, (1,))

    def test_rounds_and_not_the_first_measurement_say_who_is_fastest(self) -> None:
        trials = [trial(0, 1.0, 1.0, 1.0, first=1.3), trial(1, 1.05, 1.05, 1.05, first=0.9)]
        choice = choose(trials, among=[0, 1])
        assert choice is not None
        assert (choice.trial_number, choice.tie_with) == (0, ())

    def test_the_gain_over_the_baseline_is_paired_too(self) -> None:
        trials = [trial(0, 2.0, 3.0, 2.5), trial(1, 1.0, 1.5, 1.25), trial(2, 1.1, 1.65, 1.375)]
        choice = choose(trials, among=[1, 2])
        assert choice is not None
        assert choice.trial_number == 1
        assert choice.speedup == pytest.approx(2, rel=1e-6)
        baseline = throughput(trials[0])
        assert baseline is not None
        assert choice.baseline_tokens_per_second == baseline.tokens_per_second
        assert choice.speedup_interval is not None
        assert 1.98 < choice.speedup_interval[0] < 2 < choice.speedup_interval[1] < 2.02
