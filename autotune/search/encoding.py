"""Configurations as Optuna parameters and back.

The space is flat: every trial has every parameter, whatever is active, because samplers model a fixed set of parameters
best and "dynamic value spaces" are refused. What a proposal sets for an inactive knob is dropped when it is decoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.search.knobs import positions
from autotune.search.plan import Plan
from engine.config import TrainConfig

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One knob that varies among the candidates: ordinal values lie at whole-number positions (log2 where positive)."""

    name: str
    values: tuple[Any, ...]
    at: tuple[int, ...] | None

    @property
    def distribution(self) -> BaseDistribution:
        return CategoricalDistribution(self.values) if self.at is None else IntDistribution(0, self.at[-1])

    def encode(self, value: Any) -> Any:
        """Raises: KeyError for a value that is not on the axis."""
        if value not in self.values:
            raise KeyError(value)
        return value if self.at is None else self.at[self.values.index(value)]

    def decode(self, param: Any) -> Any:
        if self.at is None:
            return param
        return min(zip(self.at, self.values, strict=True), key=lambda pair: abs(pair[0] - param))[1]

    def distance(self, one: Any, other: Any) -> float:
        """Between two values, 0 to 1."""
        if self.at is None:
            return float(one != other)
        return abs(self.at[self.values.index(one)] - self.at[self.values.index(other)]) / self.at[-1]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The axes of a plan's candidates."""

    plan: Plan
    axes: tuple[Axis, ...]
    fixed: Mapping[str, Any]

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {axis.name: axis.distribution for axis in self.axes}

    def encode(self, config: TrainConfig) -> Params | None:
        """Parameters of a configuration; None where it lies outside the space (a baseline may)."""
        params: Params = {}
        for axis in self.axes:
            value = getattr(config, axis.name)
            if value not in axis.values:
                knob = self.plan.space.knob(axis.name)
                if knob is None or knob.is_active(config):
                    return None
                value = axis.values[0]
            params[axis.name] = axis.encode(value)
        return params

    def decode(self, params: Params) -> TrainConfig | None:
        """The canonical configuration of a proposal; None where the combination cannot run."""
        values = {**self.fixed, **{axis.name: axis.decode(params[axis.name]) for axis in self.axes}}
        try:
            return self.plan.canonical(self.plan.space.config(values))
        except ValueError:
            return None

    def distance(self, params: Params, config: TrainConfig) -> float:
        """How far a candidate is from a proposal, over its active knobs."""
        total = 0.0
        for axis in self.axes:
            value = getattr(config, axis.name)
            if value in axis.values:
                total += axis.distance(axis.decode(params[axis.name]), value)
        return total


@lru_cache(maxsize=8)
def make_encoding(plan: Plan) -> Encoding:
    """Axes for the knobs that take several values while they do something; the rest is fixed. Made once for each
    plan."""
    axes, fixed = [], {}
    for knob in plan.space.knobs:
        used = {getattr(candidate.config, knob.name) for candidate in plan.candidates
                if knob.is_active(candidate.config)}
        values = tuple(value for value in knob.values if value in used)
        if len(values) > 1:
            axes.append(Axis(name=knob.name, values=values, at=positions(values) if knob.kind.ordinal else None))
        else:
            fixed[knob.name] = values[0] if values else knob.values[0]
    return Encoding(plan=plan, axes=tuple(axes), fixed=fixed)
