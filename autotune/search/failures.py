"""What makes trials fail other than by memory: a precision whose losses drift, a mode that crashes. Pure.

That a trial failed is known, and not why. Every value of a knob may be the cause, or two of them, each by itself or
only together; how likely that is follows from the trials so far by Bayes' rule. So after a trial or two the values that
all failures have in common, and no other trial, are left alone, and all others are not.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.search.arrays import Levels
from autotune.search.surrogate import Array

Mask = NDArray[np.bool_]
Places = NDArray[np.intp]

_NO_CAUSE, _ONE_CAUSE, _EITHER_OF_TWO, _TWO_TOGETHER = 0.3, 0.5, 0.1, 0.1
"""What is thought beforehand of why a trial failed."""
_FAILS_BY_CAUSE, _FAILS_BY_CHANCE = 0.95, 0.02
_NEGLIGIBLE = 1e-3


class _Reasons(NamedTuple):
    """Of failing, (r,) each: a candidate is doomed that has one of two causes, or both where they go `together`."""

    one: Places
    other: Places
    together: Mask
    belief: Array

    def dooms(self, has: Mask) -> Mask:
        """(n, r) from (n, causes) which causes each of n candidates has."""
        one, other = has[:, self.one], has[:, self.other]
        return np.where(self.together, one & other, one | other)

    def of(self, kept: Mask) -> "_Reasons":
        return _Reasons(self.one[kept], self.other[kept], self.together[kept], self.belief[kept])


def log_chance_to_end_well(knobs: Sequence[Levels], points: Places, failed: Mask, *, count: int) -> Array:
    """(count,) logarithm of every candidate's chance, memory aside; 0 while nothing has failed.

    Args:
        knobs: of the candidates.
        points: positions of those that were tried and did not run out of memory.
        failed: (points,) whether they did.
    """
    if not failed.any():
        return np.zeros(count)
    has, shares = _causes(knobs, count)
    reasons = _reasons(shares)
    doomed = reasons.dooms(has[points])
    chance_to_fail = np.where(doomed, _FAILS_BY_CAUSE, _FAILS_BY_CHANCE)
    evidence = np.log(np.where(failed[:, None], chance_to_fail, 1 - chance_to_fail)).sum(0)
    beliefs = reasons.belief * np.exp(evidence - evidence.max())
    kept = beliefs > _NEGLIGIBLE * beliefs.max()
    beliefs = beliefs[kept] / beliefs[kept].sum()
    chance: Array = np.log(1 - np.where(reasons.of(kept).dooms(has), _FAILS_BY_CAUSE, _FAILS_BY_CHANCE) @ beliefs)
    return chance


def _causes(knobs: Sequence[Levels], count: int) -> tuple[Mask, Array]:
    """(count, c) whether a candidate has what may be a cause, the first of which none has; and (c - 1,) which share of
    what is thought beforehand the others have, every knob the same.

    These are, of a category, every value and all values but it; of what has an order, all up to a value or beyond it.
    """
    columns, shares = [np.zeros(count, dtype=np.bool_)], list[float]()
    for knob in knobs:
        active = knob.level < knob.count
        found = ([knob.level == value for value in range(knob.count)] if knob.is_category
                 else [knob.level < value for value in range(1, knob.count)])
        if not knob.is_category or knob.count > 2:  # of two, all but the one are the other
            found += [active & ~each for each in found]
        columns += found
        shares += [1 / len(found)] * len(found)
    return np.stack(columns, axis=1), np.array(shares) / max(sum(shares), 1)


def _reasons(shares: Array) -> _Reasons:
    single = np.arange(1, len(shares) + 1)
    one, other = (1 + place for place in np.triu_indices(len(shares), k=1))
    pairs = shares[one - 1] * shares[other - 1]
    pairs /= max(pairs.sum(), 1e-9)
    nothing = np.zeros(1, dtype=np.intp)
    return _Reasons(
        one=np.concatenate([nothing, single, one, one]), other=np.concatenate([nothing, single, other, other]),
        together=np.repeat([False, True], [1 + len(single) + len(pairs), len(pairs)]),
        belief=np.concatenate([[_NO_CAUSE], _ONE_CAUSE * shares, _EITHER_OF_TWO * pairs, _TWO_TOGETHER * pairs]))
