"""What trials teach about all candidates: a Gaussian process on the logarithm of measured over predicted.

A prediction is a sum of terms, such as seconds of compute and of communication, and what it is most often wrong about
is a term as a whole: the rate of one precision, the size of the activations. So each term has an unknown factor, and
for every category (a precision, a checkpointing mode) one more; trials at one corner of the space then tell something
of all configurations of which that term is a part. Beyond that, each value of each knob has an effect of its own, and
so have two knobs together.

The logarithm of a sum is not linear in the factors: it is linearised where they are thought to be, again after each
estimate of them (an iterated extended Kalman update, Bell and Cathey 1993). The rest is the usual regression
(Rasmussen and Williams 2006, algorithm 2.1), with how much is to be believed averaged over by marginal likelihood.

Earlier studies have factors and effects of their own, which resemble those of this study or do not: an intrinsic
coregionalization model (Bonilla, Chai and Williams 2007). Which of them do is weighed in the same way, each by itself,
so that one that does not agree with the first trials of this study soon counts for nothing, and takes none of the
others with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

Array = NDArray[np.float64]
Effects = tuple[Array | float, Array | float]
"""Sums over knobs of the covariances of their effects, and of their squares; 0 without knobs."""

_TINY = 1e-300
_ROUNDS = 4
"""Of linearising; the estimates hardly move after that."""
_LENGTH = 1.0
"""Over which values of a knob resemble each other, of the distance from its first to its last."""
_NEGLIGIBLE = 0.02
"""Weight below which a setting no longer takes part in the average."""
_FEW = 40
"""Trials up to which settings are averaged; more leave one far ahead of the others, and need no earlier studies."""


@dataclass(frozen=True, kw_only=True)
class Trust:
    """How far predictions are believed: standard deviations of logarithms, each times its weight in `Prior`.

    Attributes:
        terms: of a term's factor.
        knobs: of the effect of one knob's value.
        together: of what knobs do to each other's effects.
    """

    terms: float
    knobs: float
    together: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Earlier:
    """Trials of earlier studies, in terms, categories and knobs of this one.

    Attributes:
        terms: (m, t) as `Prior.terms`; so are the next two.
        values: (m,) logarithms of what was measured.
        studies: (m,) which study each belongs to, from 0, ascending.
        kinship: correlation of the factors and effects of studies that resemble each other; those of others have none.
            Beforehand, each resembles this study as likely as not.
    """

    terms: Array
    categories: Array
    knobs: tuple[Array, ...]
    values: Array
    studies: NDArray[np.intp]
    kinship: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Prior:
    """What is known of every candidate beforehand.

    Attributes:
        terms: (n, t) predicted parts, each at least 0.
        weights: (t,) how much each term's factor may be off, beside `Trust.terms`.
        categories: (n, c) terms have a factor for each: 0 where a candidate is not of it, else how far that may be off
            beside the term's own.
        knobs: of each knob, (n, k) coordinates whose products are the covariances of its values' effects.
        bias: standard deviation of the logarithm of a factor common to all.
        noise: standard deviation of the logarithm of a measured value.
        trusts: settings to be weighed against each other, and the logarithm of what is thought of each beforehand.
        earlier: None where no earlier study tells anything.
    """

    terms: Array
    weights: Array
    categories: Array
    knobs: tuple[Array, ...]
    bias: float
    noise: float
    trusts: tuple[tuple[Trust, float], ...]
    earlier: Earlier | None = None


@dataclass(frozen=True, eq=False)
class Posterior:
    """(n,) mean and standard deviation of the logarithm of every candidate's value."""

    mean: Array
    deviation: Array


def learn(prior: Prior, points: Sequence[int] | NDArray[np.intp], values: Array) -> Posterior:
    """What is known after trials.

    Args:
        points: positions of the candidates that were tried.
        values: (points,) logarithms of what was measured.
    """
    earlier = prior.earlier if len(points) <= _FEW else None
    tried = _Tried(prior, points, values, earlier)
    fits = [(_Fit(prior, trust, kinship, tried), belief)
            for (trust, belief), kinship in product(prior.trusts, tried.kinships)]
    scores = np.array([fit.log_likelihood + belief for fit, belief in fits])
    shares = np.exp(scores - scores.max())
    shares[shares < (_NEGLIGIBLE if len(points) <= _FEW else 1.0) * shares.max()] = 0.0
    shares /= shares.sum()
    parts = [(share, *fit.everywhere()) for share, (fit, _) in zip(shares, fits, strict=True) if share > 0]
    mean: Array = sum((share * mean for share, mean, _ in parts), np.zeros(len(prior.terms)))
    variance = sum((share * (variance + (each - mean) ** 2) for share, each, variance in parts),
                   np.zeros(len(prior.terms)))
    return Posterior(mean, np.sqrt(np.maximum(variance, 1e-12)))


class _Tried:
    """Trials, this study's first and then earlier studies', and what does not depend on the setting.

    Attributes:
        parts: rows of each study.
        studies: (trials,) which study each belongs to; 0 is this one.
        kinships: (studies, studies) correlations of their factors and effects, for each choice of those that resemble
            this one.
        effects: between trials, as `_effects` gives them.
    """

    def __init__(self, prior: Prior, points: Sequence[int] | NDArray[np.intp], values: Array,
                 earlier: Earlier | None) -> None:
        own = [int(point) for point in points]
        self.values, self.studies = values, np.zeros(len(own), dtype=np.intp)
        self.terms, self.categories = prior.terms[own], prior.categories[own]
        self.knobs = [knob[own] for knob in prior.knobs]
        if earlier is not None:
            self.values = np.concatenate([values, earlier.values])
            self.studies = np.concatenate([self.studies, 1 + earlier.studies])
            self.terms = np.vstack([self.terms, earlier.terms])
            self.categories = np.vstack([self.categories, earlier.categories])
            self.knobs = [np.vstack(pair) for pair in zip(self.knobs, earlier.knobs, strict=True)]
        self.parts = [self.studies == study for study in range(self.studies.max(initial=0) + 1)]
        self.kinships = [_correlations(np.array([1.0, *alike]), earlier.kinship if earlier is not None else 0.0)
                         for alike in product((0.0, 1.0), repeat=len(self.parts) - 1)]
        self.effects = _effects(knob @ knob.T for knob in self.knobs)
        self._all_knobs = prior.knobs

    @cached_property
    def effects_across(self) -> Effects:
        """Between all candidates and these."""
        return _effects(knob @ seen.T for knob, seen in zip(self._all_knobs, self.knobs, strict=True))

    @cached_property
    def own_effects(self) -> Effects:
        """Of every candidate."""
        return _effects((knob**2).sum(1) for knob in self._all_knobs)


def _correlations(alike: Array, kinship: float) -> Array:
    correlations = kinship * np.outer(alike, alike)
    np.fill_diagonal(correlations, 1.0)
    return correlations


def _effects(covariances: Iterable[Array]) -> Effects:
    single: Array | float = 0.0
    squares: Array | float = 0.0
    for one in covariances:
        single, squares = single + one, squares + one**2
    return single, squares


class _Fit:
    """The regression for one setting. Factors are kept in units of their prior deviations."""

    def __init__(self, prior: Prior, trust: Trust, kinship: Array, tried: _Tried) -> None:
        self._prior, self._trust, self._tried = prior, trust, tried
        factors = np.ones(1 + prior.categories.shape[1])
        self._spread = trust.terms * np.outer(prior.weights, factors)  # (t, 1 + c) of logarithms of factors
        self._factors = np.zeros((len(tried.parts), self._spread.size))  # of each study
        self._kinship = kinship[:, tried.studies]  # (studies, trials)
        self.log_likelihood = 0.0
        if len(tried.values):
            self._fit()

    def _fit(self) -> None:
        tried = self._tried
        kinship = self._kinship[tried.studies]
        rest = self._covariance(tried.effects) + self._prior.bias**2
        noise = self._prior.noise**2 * np.eye(len(tried.values))
        found = self._factors
        for _ in range(_ROUNDS):
            self._factors = found
            logs, self._slopes = self._linearised_trials()
            residuals = tried.values - logs + (self._slopes * self._factors[tried.studies]).sum(1)
            self._factor = cho_factor((rest + self._slopes @ self._slopes.T) * kinship + noise, lower=True)
            self._solved = cho_solve(self._factor, residuals)
            found = (self._kinship * self._solved) @ self._slopes
        self.log_likelihood = float(-residuals @ self._solved / 2 - np.log(np.diag(self._factor[0])).sum())

    def everywhere(self) -> tuple[Array, Array]:
        """(n,) mean and variance at every candidate."""
        prior, tried = self._prior, self._tried
        logs, slopes = self._linearised(prior.terms, prior.categories, self._factors[0])
        own = (slopes**2).sum(1) + self._covariance(tried.own_effects) + prior.bias**2
        start = logs - slopes @ self._factors[0]
        if not len(tried.values):
            return start, own
        across = slopes @ self._slopes.T + self._covariance(tried.effects_across) + prior.bias**2
        across *= self._kinship[0]
        explained = np.einsum("ij,ji->i", across, cho_solve(self._factor, across.T))
        return start + across @ self._solved, np.maximum(own - explained, 0.0)

    def _covariance(self, effects: Effects) -> Array | float:
        """Of the effects of single knobs and of two together."""
        single, squares = effects
        return self._trust.knobs**2 * single + self._trust.together**2 * (single**2 - squares) / 2

    def _linearised_trials(self) -> tuple[Array, Array]:
        """Of all trials, each with the factors of its study."""
        tried = self._tried
        logs, slopes = np.zeros(len(tried.values)), np.zeros((len(tried.values), self._spread.size))
        for rows, factors in zip(tried.parts, self._factors, strict=True):
            logs[rows], slopes[rows] = self._linearised(tried.terms[rows], tried.categories[rows], factors)
        return logs, slopes

    def _linearised(self, terms: Array, categories: Array, factors: Array) -> tuple[Array, Array]:
        """Where factors are thought to be: logarithms of the sum of terms, and their slopes, one for each factor."""
        switches = np.hstack([np.ones((len(terms), 1)), categories])
        parts = terms * np.exp(switches @ (factors.reshape(self._spread.shape) * self._spread).T)
        total = np.maximum(parts.sum(1), _TINY)
        slopes = (parts / total[:, None])[:, :, None] * switches[:, None, :] * self._spread
        return np.log(total), slopes.reshape(len(parts), self._spread.size)


def matern(one: Array, other: Array) -> Array:
    """(n, m) Matern 5/2 correlations of places."""
    squares = (one**2).sum(1)[:, None] + (other**2).sum(1)[None, :] - 2 * one @ other.T
    scaled = np.sqrt(5 * np.maximum(squares, 0.0)) / _LENGTH
    correlation: Array = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)
    return correlation
