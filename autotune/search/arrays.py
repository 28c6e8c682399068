"""Candidates as arrays, for a sampler that looks at all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

from autotune.search.encoding import make_encoding
from autotune.search.knobs import KNOBS
from autotune.search.plan import Plan
from autotune.search.surrogate import Array, Prior, Trust, matern
from engine.config import TrainConfig

NOISE = 0.015
"""Standard deviation of the logarithm of a measured step time."""
_BIAS = 0.7
"""Prior standard deviation of the logarithm of what all predictions are off by."""
_TRUSTS = tuple((Trust(terms=terms, knobs=knobs, together=knobs / 4), belief)
                for terms in (0.1, 0.4) for knobs, belief in ((0.02, 0.0), (0.06, 0.0), (0.15, -1.0)))
_SMOOTH = 0.5
"""Of an ordinal knob's effect, the part that neighbouring values have in common."""
_IMPORTANCE = {"reduce_bucket_size": 0.2, "allgather_bucket_size": 0.2, "prefetch_bucket_size": 0.2,
               "overlap_comm": 0.6}
"""How large a knob's own effect may be beside that of others."""
_RATES = {"precision": 1.0}
"""How much a term's factor for one value of a category may be off, beside the term's own: each precision has a rate of
its own, measured by itself."""
_RATES_ELSE = 0.5
MECHANISMS = frozenset({"zero_stage"})
"""Knobs with an order whose values still do different things, as categories do."""

_MEMORY_TRUST = Trust(terms=0.35, knobs=0.001, together=0.0)
_MEMORY_BIAS = 0.02
_MEMORY_NOISE = 0.015
_COUNTED = frozenset({"parameters", "gradients", "optimizer", "model_buffers"})
_COUNTED_WEIGHT = 0.05
"""How far terms of memory that are counted may be off, beside those that are estimated."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels:
    """One knob as it is among the candidates.

    Attributes:
        at: position of each value, ascending from 0; None where values have no order.
        count: how many values.
        level: (n,) which value each candidate has; `count` where the knob does nothing.
    """

    name: str
    at: tuple[int, ...] | None
    count: int
    level: NDArray[np.intp]

    @property
    def is_category(self) -> bool:
        return self.at is None or self.name in MECHANISMS

    def one_hot(self) -> Array:
        """(n, values)"""
        found: Array = np.eye(self.count + 1)[self.level][:, :self.count]
        return found

    def coordinates(self) -> Array:
        """(n, values) whose products are covariances of the values' effects; a knob that does nothing has none."""
        covariance = np.eye(self.count)
        if self.at is not None and not self.is_category:
            places = np.array(self.at, dtype=np.float64)[:, None] / self.at[-1]
            covariance = _SMOOTH * matern(places, places) + (1 - _SMOOTH) * covariance
        return _IMPORTANCE.get(self.name, 1.0) * self.one_hot() @ np.linalg.cholesky(covariance)

    def rates(self) -> Array:
        """(n, values) of a category: how far each term's factor for its value may be off."""
        return _RATES.get(self.name, _RATES_ELSE) * self.one_hot()


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """Where memory may run out.

    Attributes:
        memory: what is known of its bytes.
        names: of its terms.
        limit: its bytes' logarithm.
    """

    memory: Prior
    names: tuple[str, ...]
    limit: float

    @cached_property
    def fullest(self) -> float:
        """The most that is predicted to be needed, as a share of the limit."""
        return float(self.memory.terms.sum(1).max() / np.exp(self.limit))


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrays:
    """
    Attributes:
        time: what is known of step seconds.
        names: of its terms.
        places: on the device and on the host; none where everything fits.
        knobs: that vary.
    """

    time: Prior
    names: tuple[str, ...]
    places: tuple[Place, ...]
    knobs: tuple[Levels, ...]

    def __len__(self) -> int:
        return len(self.time.terms)


def make_arrays(knobs: Sequence[Levels], seconds: Sequence[Mapping[str, float]]) -> Arrays:
    """Candidates that all fit.

    Args:
        seconds: each candidate's predicted terms; none where its time is not known.
    """
    names, terms = _second_terms(seconds)
    return Arrays(places=(), names=names, knobs=tuple(knobs), time=Prior(
        terms=terms, weights=np.ones(len(names)), categories=categories_of(knobs, len(seconds)),
        knobs=tuple(knob.coordinates() for knob in knobs), bias=_BIAS, noise=NOISE, trusts=_TRUSTS))


def categories_of(knobs: Sequence[Levels], count: int) -> Array:
    """(count, c) as `Prior.categories`."""
    return np.hstack([np.zeros((count, 0)), *(knob.rates() for knob in knobs if knob.is_category)])


@lru_cache(maxsize=8)
def plan_arrays(plan: Plan, beside: tuple[TrainConfig, ...] = ()) -> Arrays:
    """The candidates of a plan, in its order, and after them what else was tried; made once.

    Args:
        beside: configurations that the plan can predict.
    """
    expected = [plan.predict(config) for config in beside]
    arrays = make_arrays(
        plan_levels(plan, [*(candidate.config for candidate in plan.candidates), *beside]),
        [*(candidate.prediction.seconds for candidate in plan.candidates), *(other.seconds for other in expected)])
    first = plan.candidates[0].prediction
    device, host = ([[*terms.values()] for terms in rows] for rows in (
        (other.device_bytes for other in expected), (other.host_bytes for other in expected)))
    return replace(arrays, places=tuple(
        Place(memory=_memory(np.array([*terms, *others], dtype=np.float64), names, arrays.time), names=names,
              limit=float(np.log(limit)))
        for terms, others, names, limit in (
            (plan.device_terms, device, (*first.device_bytes,), plan.limits.device_bytes),
            (plan.host_terms, host, (*first.host_bytes,), plan.limits.host_bytes))))


def tried_beside(plan: Plan, configs: Sequence[TrainConfig]) -> tuple[TrainConfig, ...]:
    """Of configurations that were tried, those that are no candidates, as the user's own may be, and that tell
    something of candidates: they can be predicted and do nothing that none of these does."""
    found = dict.fromkeys(plan.canonical(config) for config in configs)
    return tuple(config for config in found if config not in plan.index and does_as_candidates(plan, config)
                 and plan.predict_or_none(config) is not None)


def does_as_candidates(plan: Plan, config: TrainConfig) -> bool:
    """Whether its choices, of knobs without an order and of the stage, are some candidate's."""
    return all(getattr(config, name) in values for name, values in _categories_used(plan).items())


@lru_cache(maxsize=8)
def _categories_used(plan: Plan) -> dict[str, frozenset[object]]:
    names = [kind.name for kind in KNOBS.values() if not kind.ordinal or kind.name in MECHANISMS]
    return {name: frozenset(getattr(candidate.config, name) for candidate in plan.candidates) for name in names}


def plan_levels(plan: Plan, configs: Sequence[TrainConfig]) -> list[Levels]:
    """Of configurations, by the knobs that vary among the plan's candidates. Values beyond theirs have no effect."""
    made = []
    for axis in make_encoding(plan).axes:
        knob = plan.space.knob(axis.name)
        assert knob is not None
        place = {value: number for number, value in enumerate(axis.values)}
        level = [place.get(getattr(config, axis.name), len(place)) if knob.is_active(config) else len(place)
                 for config in configs]
        made.append(Levels(name=axis.name, at=axis.at, count=len(place), level=np.array(level, dtype=np.intp)))
    return made


def _memory(terms: Array, names: Sequence[str], time: Prior) -> Prior:
    weights = np.array([_COUNTED_WEIGHT if name in _COUNTED else 1.0 for name in names])
    return Prior(terms=terms, weights=weights, categories=time.categories, knobs=time.knobs,
                 bias=_MEMORY_BIAS, noise=_MEMORY_NOISE, trusts=((_MEMORY_TRUST, 0.0),))


def _second_terms(seconds: Sequence[Mapping[str, float]]) -> tuple[tuple[str, ...], Array]:
    """Names, and (n, terms); where a candidate's are not known, the middle of the others' as a term of its own."""
    names = list(dict.fromkeys(name for terms in seconds for name in terms))
    known = [sum(terms.values()) for terms in seconds if terms]
    unknown = median(known) if known else 1.0
    found: Array = np.array([[*(terms.get(name, 0.0) for name in names), 0.0 if terms else unknown]
                             for terms in seconds])
    used = np.flatnonzero(found.any(axis=0))
    return tuple([*names, "unknown"][place] for place in used), found[:, used]
