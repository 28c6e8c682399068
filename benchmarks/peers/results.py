"""Figures of a comparison, made of what the engines' ranks measured. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.plan import Scenario
from benchmarks.peers.values import Ready, Turn

QUIET_FOREIGN_CORES = 0.35
"""A round is quiet where others kept fewer cores busy than this, in the turns of both engines that are compared."""

TOLERANCES = {"fp32": 1e-5, "bf16": 0.01}
"""Largest difference of a loss, in equal steps: in fp32 to one process with the whole batch; in bf16 to DDP, where
autocast rounds other values than bf16 parameters do, which moves a loss of 9 by 0.002 to 0.003."""

KNOWN_TO_DIFFER = {
    ("deepspeed0", "bf16"): "its set-up takes an optimizer step of zero gradients: Adam's counter is one ahead",
}
"""(engine, precision) -> why it does not train as the others do; told, and no failure of the comparison."""


@dataclass(frozen=True, kw_only=True)
class Quartiles:
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Of one value, all three are that value."""
        if len(values) == 1:
            return cls(low=values[0], median=values[0], high=values[0])
        return cls(**dict(zip(("low", "median", "high"), statistics.quantiles(values, n=4, method="inclusive"),
                              strict=True)))


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """One engine in one scenario; ratios are to the base, times paired round by round.

    Attributes:
        time_ratios: of the median step time, of each round.
        quiet_time_ratio: median over the quiet rounds; None without any.
        cpu_ratio: of processor seconds, median over rounds.
        step_seconds: median over all steps.
        foreign_cores: that others kept busy in this engine's turns, median.
        peak_bytes: most that a rank holds at one time, heap and its even share of what ranks share together.
        heap_peak_bytes, shared_peak_bytes: most of either, which need not be at that time.
        loss_difference: the largest from the losses that it is held against.
        agrees: whether that is within the tolerance.
        why_different: the reason of a disagreement that is known.
    """

    name: str
    time_ratio: Quartiles
    time_ratios: tuple[float, ...]
    quiet_time_ratio: float | None
    quiet_rounds: int
    cpu_ratio: float
    step_seconds: float
    foreign_cores: float
    peak_ratio: float
    peak_bytes: int
    heap_peak_bytes: int
    shared_peak_bytes: int
    losses: tuple[float, ...]
    loss_difference: float
    agrees: bool
    why_different: str | None

    @property
    def trains_wrongly(self) -> bool:
        """Whether the losses disagree for no known reason."""
        return not self.agrees and self.why_different is None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an engine yields: its equal steps, and a turn in every round."""

    ready: Ready
    turns: Sequence[Turn]


def compare(name: str, measured: Measured, base: Measured, *, scenario: Scenario,
            expected: Sequence[float]) -> EngineResult:
    """Hold an engine against the base, whose turns were taken in the same rounds.

    Args:
        expected: losses of the equal steps.
    """
    rounds = list(zip(measured.turns, base.turns, strict=True))
    ratios = [_median_step(turn) / _median_step(other) for turn, other in rounds]
    quiet = [ratio for ratio, turns in zip(ratios, rounds, strict=True)
             if max(turn.foreign_cores for turn in turns) < QUIET_FOREIGN_CORES]
    peaks = measured.ready.peaks
    differences = [abs(loss - other) for loss, other in zip(measured.ready.losses, expected, strict=True)]
    return EngineResult(
        name=name,
        time_ratio=Quartiles.of(ratios),
        time_ratios=tuple(ratios),
        quiet_time_ratio=statistics.median(quiet) if quiet else None,
        quiet_rounds=len(quiet),
        cpu_ratio=statistics.median(turn.cpu_seconds / other.cpu_seconds for turn, other in rounds),
        step_seconds=statistics.median(seconds for turn in measured.turns for seconds in turn.step_seconds),
        foreign_cores=statistics.median(turn.foreign_cores for turn in measured.turns),
        peak_ratio=peaks.together_bytes / base.ready.peaks.together_bytes,
        peak_bytes=peaks.together_bytes,
        heap_peak_bytes=peaks.heap_bytes,
        shared_peak_bytes=peaks.shared_bytes,
        losses=measured.ready.losses,
        loss_difference=max(differences),
        agrees=all(difference <= TOLERANCES[scenario.precision] for difference in differences),
        why_different=KNOWN_TO_DIFFER.get((name, scenario.precision)))


def turn_order(names: Sequence[str], round_index: int) -> list[str]:
    """Who trains when in a round: everybody starts equally often, in alternating directions."""
    shift = round_index % len(names)
    order = [*names[shift:], *names[:shift]]
    return order if round_index % 2 else order[::-1]


def _median_step(turn: Turn) -> float:
    return statistics.median(turn.step_seconds)
