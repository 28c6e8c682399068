"""What trials teach about configurations that were not tried."""

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from autotune.search.surrogate import Earlier, Posterior, Prior, Trust, learn

EXACT = 0.001


def prior(terms: list[list[float]], *, trust: Trust, categories: list[list[float]] | None = None,
          knobs: list[NDArray[np.float64]] | None = None) -> Prior:
    rows = np.array(terms, dtype=np.float64)
    return Prior(terms=rows, weights=np.ones(rows.shape[1]), categories=np.array(categories or [[]] * len(rows)),
                 knobs=tuple(knobs or ()), bias=0.001, noise=EXACT, trusts=((trust, 0.0),))


def after(known: Prior, told: dict[int, float]) -> Posterior:
    return learn(known, [*told], np.log([*told.values()]))


TERMS_ONLY = Trust(terms=0.7, knobs=0.0, together=0.0)
KNOBS_ONLY = Trust(terms=EXACT, knobs=0.3, together=0.0)


def test_without_trials_the_prediction_stands() -> None:
    found = after(prior([[1, 2], [3, 0]], trust=TERMS_ONLY), {})
    assert np.exp(found.mean) == pytest.approx([3, 3])
    assert found.deviation[1] > found.deviation[0] > 0, "two terms rarely err alike"


class TestTerms:
    def test_a_term_s_factor_counts_wherever_the_term_is(self) -> None:
        """Three times as long where there is nothing else; so a sum of one and one is four."""
        found = after(prior([[0, 1], [1, 1], [1, 0]], trust=TERMS_ONLY), {0: 3.0, 2: 1.0})
        assert np.exp(found.mean) == pytest.approx([3, 4, 1], rel=0.02)
        assert found.deviation[1] < 0.05

    def test_factors_are_told_apart_from_sums(self) -> None:
        """2 a + b = 5, a + 3 b = 5: a is 2, b is 1; measured exactly, although the logarithm of a sum is no sum."""
        found = after(prior([[2, 1], [1, 3], [10, 0], [0, 10]], trust=TERMS_ONLY), {0: 5.0, 1: 5.0})
        assert np.exp(found.mean[2:]) == pytest.approx([20, 10], rel=0.05)

    def test_what_a_term_says_of_one_category_counts_less_for_another(self) -> None:
        found = after(prior([[1], [1], [1]], trust=TERMS_ONLY, categories=[[1, 0], [1, 0], [0, 1]]), {0: 2.0})
        assert np.exp(found.mean[1]) == pytest.approx(2, rel=0.01)
        assert 1.2 < np.exp(found.mean[2]) < 1.9
        assert found.deviation[2] > 10 * found.deviation[1]


class TestKnobs:
    def test_effects_of_two_knobs_multiply(self) -> None:
        """Two values of two knobs: three corners tell the fourth."""
        one, other = np.eye(2)[[0, 0, 1, 1]], np.eye(2)[[0, 1, 0, 1]]
        found = after(prior([[1]] * 4, trust=KNOBS_ONLY, knobs=[one, other]), {0: 1.0, 1: 1.2, 2: 1.1})
        assert math.exp(found.mean[3]) == pytest.approx(1.32, rel=0.03)

    def test_what_knobs_do_together_is_not_known_from_each(self) -> None:
        one, other = np.eye(2)[[0, 0, 1, 1]], np.eye(2)[[0, 1, 0, 1]]
        together = Trust(terms=EXACT, knobs=0.3, together=0.3)
        found = [after(prior([[1]] * 4, trust=trust, knobs=[one, other]), {0: 1.0, 1: 1.2, 2: 1.1}).deviation[3]
                 for trust in (KNOBS_ONLY, together)]
        assert found[1] > 0.1 > 3 * found[0]

    def test_a_knob_that_does_nothing_has_no_effect(self) -> None:
        knob = np.array([[1.0], [1.0], [0.0]])
        found = after(prior([[1]] * 3, trust=KNOBS_ONLY, knobs=[knob]), {0: 2.0})
        assert np.exp(found.mean) == pytest.approx([2, 2, 1], rel=0.01)


def test_how_far_predictions_are_believed_is_learnt() -> None:
    """Where six measurements agree with the predictions, the seventh is believed more than where they scatter."""
    knob = np.eye(7)
    known = prior([[1]] * 7, trust=KNOBS_ONLY, knobs=[knob])
    known = Prior(terms=known.terms, weights=known.weights, categories=known.categories, knobs=known.knobs, bias=1.0,
                  noise=EXACT, trusts=tuple((Trust(terms=EXACT, knobs=size, together=0), 0.0) for size in (0.02, 0.3)))
    agreeing = after(known, dict.fromkeys(range(6), 1.0))
    scattered = after(known, dict(enumerate((0.7, 1.4, 1.0, 0.6, 1.2, 1.5))))
    assert agreeing.deviation[6] < 0.05
    assert scattered.deviation[6] > 0.2


def test_every_trial_makes_all_candidates_better_known() -> None:
    random = np.random.default_rng(0)
    known = prior(random.uniform(0.1, 2, (20, 3)).tolist(), trust=TERMS_ONLY)
    deviations = [after(known, dict.fromkeys(range(count), 3.0)).deviation.max() for count in (0, 1, 3, 6)]
    assert deviations == sorted(deviations, reverse=True)


def with_earlier(known: Prior, terms: list[list[float]], measured: list[float], *, kinship: float = 0.9,
                 studies: list[int] | None = None) -> Prior:
    """Earlier studies, by default one, that measured these."""
    rows = np.array(terms, dtype=np.float64)
    return replace(known, earlier=Earlier(
        terms=rows, categories=np.zeros((len(rows), known.categories.shape[1])),
        knobs=tuple(np.zeros((len(rows), knob.shape[1])) for knob in known.knobs), values=np.log(measured),
        studies=np.array(studies or [0] * len(rows), dtype=np.intp),
        kinship=kinship))


class TestEarlierStudies:
    KNOWN = prior([[1, 0], [0, 1], [1, 1]], trust=TERMS_ONLY)

    def test_factors_that_were_found_elsewhere_are_expected_here_too(self) -> None:
        """The first term took twice as long elsewhere. Half believed, with a correlation of 0.9, it should here; the
        other stands."""
        found = after(with_earlier(self.KNOWN, [[3, 0]], [6.0]), {})
        assert np.exp(found.mean[:2]) == pytest.approx([2 ** (0.9 / 2), 1], rel=0.01)
        alike = (0.7 * math.sqrt(1 - 0.9**2), 0.9 * math.log(2))
        mixture = (alike[0]**2 + 0.7**2) / 2 + (alike[1] / 2) ** 2
        assert found.deviation[0] == pytest.approx(math.sqrt(mixture), rel=0.01)
        assert found.deviation[1] == pytest.approx(after(self.KNOWN, {}).deviation[1])

    def test_a_trial_of_this_study_counts_for_more(self) -> None:
        found = after(with_earlier(self.KNOWN, [[3, 0]] * 5, [6.0] * 5), {0: 0.5})
        assert np.exp(found.mean[0]) == pytest.approx(0.5, rel=0.01)

    def test_without_kinship_it_is_as_if_there_were_none(self) -> None:
        known = with_earlier(self.KNOWN, [[3, 0], [0, 1]], [9.0, 5.0], kinship=0.0)
        for told in ({}, {0: 2.0}, {0: 2.0, 2: 3.5}):
            found, alone = after(known, told), after(self.KNOWN, told)
            assert found.mean == pytest.approx(alone.mean)
            assert found.deviation == pytest.approx(alone.deviation)

    def test_a_study_that_does_not_agree_with_this_one_is_soon_not_believed(self) -> None:
        """Elsewhere the terms took 4 and 1/4 times as long. Here the first trial says the opposite of the one, and the
        other is expected as predicted again."""
        known = with_earlier(self.KNOWN, [[1, 0], [0, 1]], [4.0, 0.25])
        before, later = after(known, {}), after(known, {0: 0.3})
        assert np.exp(before.mean[1]) < 0.6
        assert np.exp(later.mean[1]) == pytest.approx(1, abs=0.1)

    def test_one_that_does_not_agree_takes_none_of_the_others_with_it(self) -> None:
        """Of two that say the opposite of each other about both terms, the first trial agrees with one alone: the other
        term is expected as that one says."""
        rows, measured = [[1, 0], [0, 1]] * 2, [4.0, 0.25, 0.25, 4.0]
        known = with_earlier(self.KNOWN, rows, measured, studies=[0, 0, 1, 1])
        assert after(known, {}).mean[1] == pytest.approx(0, abs=0.01)
        assert np.exp(after(known, {0: 4.0}).mean[1]) < 0.5
        assert np.exp(after(known, {0: 0.25}).mean[1]) > 2

    def test_several_studies_have_factors_of_their_own(self) -> None:
        """Two that disagree cancel, and say less than two that agree."""
        agreeing = after(with_earlier(self.KNOWN, [[1, 0]] * 2, [2.0, 2.0], studies=[0, 1]), {})
        apart = after(with_earlier(self.KNOWN, [[1, 0]] * 2, [2.0, 0.5], studies=[0, 1]), {})
        one = after(with_earlier(self.KNOWN, [[1, 0]], [2.0]), {})
        assert agreeing.mean[0] > 1.2 * one.mean[0]
        assert apart.mean[0] == pytest.approx(0, abs=0.01)

    def test_once_this_study_has_many_trials_of_its_own_no_other_is_needed(self) -> None:
        told = dict.fromkeys(range(41), 1.0)
        known = prior([[1.0, 0.1 * number] for number in range(41)], trust=TERMS_ONLY)
        earlier = with_earlier(known, [[1, 0]], [9.0])
        assert after(earlier, told).mean == pytest.approx(after(known, told).mean, abs=0)
