"""What earlier studies of the same model suggest. Pure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from autotune.domain.study import BestConfig
from autotune.search.plan import Plan
from autotune.search.points import Knob
from engine.config import TrainConfig

_MOST = 2


class Reused(NamedTuple):
    """A configuration to try first, and where it comes from."""

    config: TrainConfig
    best: BestConfig


def reusable(plan: Plan, known: Sequence[BestConfig]) -> list[Reused]:
    """Winners of earlier studies as this study can run them: those of the same hardware first, then the latest.

    A knob that cannot have the winner's value here takes the nearest that it can, a choice the base's.

    Args:
        known: of this model.
    """
    order = sorted(known, key=lambda best: best.created_at, reverse=True)
    order.sort(key=lambda best: best.hardware_fingerprint != plan.hardware.fingerprint)
    found: dict[TrainConfig, Reused] = {}
    for best in order:
        values = {knob.name: _nearest(knob, best.config, plan.baseline) for knob in plan.space.knobs}
        try:
            config = plan.canonical(plan.space.config(values))
        except ValueError:
            continue
        if config in plan.index and config not in found:
            found[config] = Reused(config, best)
    return list(found.values())[:_MOST]


def reused_note(reused: Sequence[Reused], plan: Plan) -> str | None:
    """For the study's note; None where nothing was reused."""
    if not reused:
        return None
    sources = [f"study {best.study_id[:8]}" + ("" if best.hardware_fingerprint == plan.hardware.fingerprint else
                                               f" on {best.hardware_profile.device_name}") for _, best in reused]
    return f"tried first what won in {' and '.join(sources)}"


def _nearest(knob: Knob, config: TrainConfig, base: TrainConfig) -> Any:
    value = getattr(config, knob.name)
    if value in knob.values:
        return value
    if knob.kind.ordinal:
        return min(knob.values, key=lambda other: abs(other - value))
    fallback = getattr(base, knob.name)
    return fallback if fallback in knob.values else knob.values[0]
