"""What trials teach about all candidates: a Gaussian process on the logarithm of measured over predicted.

A prediction is a sum of terms, such as seconds of compute and of communication, and what it is most often wrong about
is a term as a whole: the rate of one precision, the size of the activations. So each term has an unknown factor, and
for every category (a precision, a checkpointing mode) one more; trials at one corner of the space then tell something
of all configurations of which that term is a part. Beyond that, each value of each knob has an effect of its own, and
so have two knobs together.

The logarithm of a sum is not linear in the factors: it is linearised where they are thought to be, again after each
estimate of them (an iterated extended Kalman update, Bell and Cathey 1993). The rest is the usual regression
(Rasmussen and Williams 2006, algorithm 2.1), with how much is to be believed averaged over by marginal likelihood.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

Array = NDArray[np.float64]

_TINY = 1e-300
_ROUNDS = 4
"""Of linearising; the estimates hardly move after that."""
_LENGTH = 1.0
"""Over which values of a knob resemble each other, of the distance from its first to its last."""
_NEGLIGIBLE = 0.02
"""Weight below which a setting no longer takes part in the average."""
_FEW = 40
"""Trials up to which settings are averaged; more leave one far ahead of the others."""


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
    """

    terms: Array
    weights: Array
    categories: Array
    knobs: tuple[Array, ...]
    bias: float
    noise: float
    trusts: tuple[tuple[Trust, float], ...]


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
    fits = [(_Fit(prior, trust, points, values), belief) for trust, belief in prior.trusts]
    scores = np.array([fit.log_likelihood + belief for fit, belief in fits])
    shares = np.exp(scores - scores.max())
    shares[shares < (_NEGLIGIBLE if len(points) <= _FEW else 1.0) * shares.max()] = 0.0
    shares /= shares.sum()
    parts = [(share, *fit.everywhere()) for share, (fit, _) in zip(shares, fits, strict=True) if share > 0]
    mean: Array = sum((share * mean for share, mean, _ in parts), np.zeros(len(prior.terms)))
    variance = sum((share * (variance + (each - mean) ** 2) for share, each, variance in parts),
                   np.zeros(len(prior.terms)))
    return Posterior(mean, np.sqrt(np.maximum(variance, 1e-12)))


class _Fit:
    """The regression for one setting. Factors are kept in units of their prior deviations."""

    def __init__(self, prior: Prior, trust: Trust, points: Sequence[int] | NDArray[np.intp],
                 values: Array) -> None:
        self._prior, self._trust, self._points = prior, trust, [int(point) for point in points]
        factors = np.ones(1 + prior.categories.shape[1])
        self._spread = trust.terms * np.outer(prior.weights, factors)  # (t, 1 + c) of logarithms of factors
        self._switches = np.hstack([np.ones((len(prior.terms), 1)), prior.categories])
        self._factors = np.zeros(self._spread.size)
        self.log_likelihood = 0.0
        self._seen = [knob[self._points] for knob in prior.knobs]
        if self._points:
            self._fit(values)

    def _effects(self, rows: Sequence[int] | slice) -> Array:
        """(rows, points) covariances of the effects of single knobs and of two together."""
        single, squares = np.zeros((2, len(self._prior.terms[rows]), len(self._points)))
        for knob, seen in zip(self._prior.knobs, self._seen, strict=True):
            one = knob[rows] @ seen.T
            single += one
            squares += one**2
        return self._trust.knobs**2 * single + self._trust.together**2 * (single**2 - squares) / 2

    def _own_effects(self) -> Array:
        """(n,) variances of the same."""
        own = [(knob**2).sum(1) for knob in self._prior.knobs]
        single = sum(own, np.zeros(len(self._prior.terms)))
        squares = sum((one**2 for one in own), np.zeros(len(self._prior.terms)))
        return self._trust.knobs**2 * single + self._trust.together**2 * (single**2 - squares) / 2

    def _fit(self, values: Array) -> None:
        rest = self._effects(self._points) + self._prior.bias**2 + self._prior.noise**2 * np.eye(len(values))
        found = self._factors
        for _ in range(_ROUNDS):
            self._factors = found
            logs, slopes = self._linearised(self._points)
            residuals = values - logs + slopes @ self._factors
            self._factor = cho_factor(rest + slopes @ slopes.T, lower=True)
            self._solved = cho_solve(self._factor, residuals)
            found = slopes.T @ self._solved
        self.log_likelihood = float(-residuals @ self._solved / 2 - np.log(np.diag(self._factor[0])).sum())

    def everywhere(self) -> tuple[Array, Array]:
        """(n,) mean and variance at every candidate."""
        logs, slopes = self._linearised(slice(None))
        own = (slopes**2).sum(1) + self._own_effects() + self._prior.bias**2
        start = logs - slopes @ self._factors
        if not self._points:
            return start, own
        across = slopes @ slopes[self._points].T + self._effects(slice(None)) + self._prior.bias**2
        explained = np.einsum("ij,ji->i", across, cho_solve(self._factor, across.T))
        return start + across @ self._solved, np.maximum(own - explained, 0.0)

    def _linearised(self, rows: Sequence[int] | slice) -> tuple[Array, Array]:
        """Of some candidates, where the factors were thought to be: logarithms of the sum of terms, and their slopes,
        one for each factor."""
        switches = self._switches[rows]
        factors = self._factors.reshape(self._spread.shape) * self._spread
        parts = self._prior.terms[rows] * np.exp(switches @ factors.T)
        total = np.maximum(parts.sum(1), _TINY)
        slopes = (parts / total[:, None])[:, :, None] * switches[:, None, :] * self._spread
        return np.log(total), slopes.reshape(len(parts), -1)


def matern(one: Array, other: Array) -> Array:
    """(n, m) Matern 5/2 correlations of places."""
    squares = (one**2).sum(1)[:, None] + (other**2).sum(1)[None, :] - 2 * one @ other.T
    scaled = np.sqrt(5 * np.maximum(squares, 0.0)) / _LENGTH
    correlation: Array = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)
    return correlation
