"""Statistics of step times, shared by the worker that measures and the search that compares. Standard library only."""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import NormalDist, fmean, median, stdev
from typing import TypeVar

_Sample = TypeVar("_Sample")

STEADY_WINDOW = 3
"""So many step times in a row agree once the pace is steady."""

_STEADY_RANGE = 0.15
"""Times agree whose range is within this share of their median."""


_TRIMMED_SHARE = 0.2
"""Of the samples, at either end: a step that something else held up must not decide. Fewer than five spare none."""


def middle(samples: Iterable[_Sample], key: Callable[[_Sample], float]) -> list[_Sample]:
    """All but the fifth with the smallest keys and the fifth with the largest, in order of the keys."""
    ordered = sorted(samples, key=key)
    spared = math.floor(_TRIMMED_SHARE * len(ordered))
    return ordered[spared:len(ordered) - spared]


def robust_mean(samples: Sequence[float]) -> float:
    """Mean of the middle three fifths (a trimmed mean)."""
    return fmean(middle(samples, float))


def robust_error(samples: Sequence[float]) -> float:
    """Standard error of `robust_mean`, from the winsorized deviation (Yuen 1974); infinite for one sample."""
    if len(samples) < 2:
        return math.inf
    kept = middle(samples, float)
    within = stdev(min(max(sample, kept[0]), kept[-1]) for sample in samples)
    return within * math.sqrt((len(samples) - 1) / (len(kept) * (len(kept) - 1)))


def robust_interval(samples: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of `robust_mean`, Student's t with as many degrees of freedom as samples it is of, less one.

    Args:
        samples: at least one value; with one value nothing is known, and the interval is (0, inf).

    Returns:
        (low, high), low >= 0 for positive samples.
    """
    if len(samples) < 2:
        return 0.0, math.inf
    mean, degrees = robust_mean(samples), len(middle(samples, float)) - 1
    half = t_quantile(0.5 + confidence / 2, degrees) * robust_error(samples)
    return max(mean - half, 0.0), mean + half


_CHOSEN_WIDENS = 1.4
"""Steps count from where three agree, and are measured until their interval is narrow: both choose moments at which
they seem to vary less than they do. In simulations of that, with normal and heavy-tailed times, Student's interval
covers 86 to 95 %, and one so much wider at least 93 %. Leaving out the three that agree costs three steps and mends
little: it is the end that is chosen most."""


def measured_interval(samples: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of `robust_mean`, of times that were measured until `robust_interval` was narrow."""
    low, high = robust_interval(samples)
    wider = (_CHOSEN_WIDENS - 1) * (high - robust_mean(samples))
    return max(low - wider, 0.0), high + wider


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t by the Cornish-Fisher expansion (Abramowitz & Stegun 26.7.5); exact for 1 and 2 degrees.

    The error is below 1 % from 3 degrees on for probabilities up to 0.975.
    """
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        alpha = 4 * probability * (1 - probability)
        return 2 * (probability - 0.5) * math.sqrt(2 / alpha)
    z = NormalDist().inv_cdf(probability)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    g4 = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + g1 / degrees + g2 / degrees**2 + g3 / degrees**3 + g4 / degrees**4


def steady_steps(samples: Sequence[float], *, tolerance: float) -> int:
    """How many of the last step times were measured at a steady pace; 0 as long as the last three do not agree.

    Where they do, a leading one that took longer than every later one still belonged to the warm-up.

    Args:
        tolerance: by which it may have taken longer, relative.
    """
    last = list(samples[-STEADY_WINDOW:])
    if len(last) < STEADY_WINDOW or max(last) - min(last) > _STEADY_RANGE * median(last):
        return 0
    while len(last) > 1 and last[0] > (1 + tolerance) * max(last[1:]):
        del last[0]
    return len(last)
