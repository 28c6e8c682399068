"""Which configurations come first, which are measured again, and which one wins. Pure.

The objective is throughput, tokens per second at the fixed global batch, never the time of one forward pass: a smaller
micro-batch is always quicker per pass. Only trials that ended `ok` can win; a measurement taken under contention counts
only for the record. Trials measured again in the same rounds are compared round by round (`paired`), others by their
intervals, which are no narrower than measurements of one trial lie apart.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from autotune.domain.study import Trial, TrialRole
from autotune.domain.throughput import Throughput, may_win, throughput, valid_runs
from autotune.search.paired import Gain, Rounds, scatter
from autotune.search.plan import Plan
from engine.config import TrainConfig
from engine.values import Value

_EQUAL = 0.01
"""Finalists that are not told apart and this close count as equally fast: that which needs less memory wins."""


class Choice(Value):
    """The winner among the trials so far, with its evidence.

    Attributes:
        confirmed: measured again.
        baseline_tokens_per_second: over all the baseline's measurements, as `throughput` is over the winner's.
        speedup: tokens per second over the baseline's, from rounds that measured both where there are two; None where
            the baseline has no valid measurement.
        tie_with: numbers of trials that are not told apart from the fastest, the winner itself left out; also of such
            that were measured only once.
    """

    trial_number: int
    config: TrainConfig
    throughput: Throughput
    peak_device_bytes: int
    peak_host_bytes: int
    confirmed: bool
    baseline_trial_number: int | None
    baseline_tokens_per_second: float | None
    baseline_peak_device_bytes: int | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    tie_with: tuple[int, ...]


def first_configs(plan: Plan) -> list[tuple[TrialRole, TrainConfig]]:
    """What is tried before the sampler is asked: the baseline, and beside a baseline of the user's own the default."""
    first = [(TrialRole.BASELINE, plan.baseline)]
    if plan.space.has_own_baseline and plan.canonical(plan.default) != plan.canonical(plan.baseline):
        first.append((TrialRole.DEFAULT, plan.default))
    return first


def finalists(trials: Sequence[Trial], count: int) -> list[int]:
    """Numbers of the fastest trials, fastest first: those worth measuring again.

    Trials measured only under contention come after all others: measuring again may clear them.
    """
    clean = [(rate.tokens_per_second, trial) for trial in trials if (rate := throughput(trial)) is not None]
    clean.sort(key=lambda pair: (-pair[0], pair[1].number))
    contended = [trial for trial in trials if may_win(trial) and throughput(trial) is None]
    contended.sort(key=lambda trial: (-_fastest(trial), trial.number))
    return [trial.number for trial in [*(trial for _, trial in clean), *contended][:count]]


def choose(trials: Sequence[Trial], *, among: Sequence[int] | None = None) -> Choice | None:
    """The winner: the fastest; among equally fast finalists that which needs least memory.

    Args:
        trials: of one study, in any order.
        among: numbers of the finalists, once these have been measured again; None: every trial may win.

    Returns:
        None where no trial has a valid measurement: `why_no_winner` says why.
    """
    rates = {trial.number: rate for trial in trials if (rate := throughput(trial)) is not None}
    by_number = {trial.number: trial for trial in trials}
    eligible = [number for number in rates if among is None or number in among] or list(rates)
    if not eligible:
        return None
    compare = _Comparison(trials, rates)
    fastest = compare.fastest(eligible)
    tied = [number for number in rates if not compare.gain(fastest, number).is_shown]
    close = [number for number in tied if number in eligible
             and compare.gain(fastest, number).ratio <= 1 + (_EQUAL if among else 0)]
    winner = min(close, key=lambda number: (_peak(by_number[number]), number))
    trial, rate = by_number[winner], rates[winner]
    baseline = next((other for other in trials if other.role is TrialRole.BASELINE), None)
    baseline_rate = rates.get(baseline.number) if baseline is not None else None
    gain = compare.gain(winner, baseline.number) if baseline is not None and baseline_rate is not None else None
    return Choice(
        trial_number=winner, config=trial.config, throughput=rate, peak_device_bytes=_peak(trial)[0],
        peak_host_bytes=_peak(trial)[1], confirmed=valid_runs(trial) > 1,
        baseline_trial_number=baseline.number if baseline is not None else None,
        baseline_tokens_per_second=baseline_rate.tokens_per_second if baseline_rate is not None else None,
        baseline_peak_device_bytes=baseline.peak_device_bytes if baseline is not None else None,
        speedup=gain and gain.ratio, speedup_interval=gain and gain.interval,
        tie_with=tuple(sorted(number for number in tied if number != winner)))


def why_no_winner(trials: Sequence[Trial]) -> str:
    """In words, for a study whose trials all failed: counts by outcome, and the first cause."""
    finished = [trial for trial in trials if trial.outcome is not None]
    if not finished:
        return "no trial has finished yet"
    counts = ", ".join(f"{count} x {outcome}" for outcome, count in
                       Counter(trial.outcome.value for trial in finished if trial.outcome).most_common())
    if all(trial.outcome is not None and trial.outcome.is_out_of_memory for trial in finished):
        smallest = min(trial.config.micro_batch_size for trial in finished)
        if smallest == 1:
            return f"no feasible micro-batch: even micro_batch_size 1 ran out of memory ({counts})"
        return f"no feasible configuration: all trials ran out of memory ({counts}); smallest micro-batch {smallest}"
    first = next((trial for trial in finished
                  if trial.outcome and not trial.outcome.is_out_of_memory and trial.detail), None)
    cause = f"; trial {first.number}: {first.detail}" if first is not None else ""
    return f"no trial gave a valid measurement ({counts}){cause}"


def _fastest(trial: Trial) -> float:
    return max(measurement.tokens_per_second for measurement in trial.measurements)


def _peak(trial: Trial) -> tuple[int, int]:
    """(device, host) bytes of a trial that was measured."""
    device, host = trial.peak_device_bytes, trial.peak_host_bytes
    assert device is not None
    assert host is not None
    return device, host


class _Comparison:
    """Of trials with each other: paired where they share rounds, else as independent rates."""

    def __init__(self, trials: Sequence[Trial], rates: Mapping[int, Throughput]) -> None:
        self._rates, self._rounds, self._scatter = rates, Rounds(trials), scatter(trials)
        self._runs = {trial.number: valid_runs(trial) for trial in trials}

    def gain(self, number: int, other: int) -> Gain:
        """Throughput of the first over the second's."""
        if number == other:
            return Gain(1.0, (1.0, 1.0))
        paired = self._rounds.gain(number, other)
        if paired is not None:
            return paired
        rate, reference = self._rates[number], self._rates[other]
        ratio = rate.tokens_per_second / reference.tokens_per_second
        # relative errors add in squares: first-order error propagation
        error = max(math.hypot(rate.relative_error, reference.relative_error),
                    math.expm1(self._scatter.error(self._runs[number], self._runs[other])))
        return Gain(ratio, (ratio / (1 + error), ratio * (1 + error)))

    def fastest(self, numbers: Sequence[int]) -> int:
        first = max(numbers, key=lambda number: self._rates[number].tokens_per_second)
        return max(numbers, key=lambda number: self.gain(number, first).ratio)
