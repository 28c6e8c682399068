"""How a study ends, decided from its trials. Pure."""

from collections.abc import Sequence
from datetime import datetime
from statistics import fmean

from autotune.domain.request import StudyRequest
from autotune.domain.study import BestConfig, Progress, Study, StudyState, Trial, TrialRole, TrialState
from autotune.domain.throughput import throughput
from autotune.scheduler.fingerprints import training_fingerprint
from autotune.search.choose import Choice, choose, finalists
from autotune.search.plan import Plan
from engine.config import TrainConfig
from engine.report import Outcome
from engine.values import Value

FIRST_FEW = 3
"""So many trials that fail alike, the first of a study, end it: the baseline and two more. Those that run out of memory
say nothing of the others."""

_HOPELESS = 1.1
"""Of the fastest step time so far: a trial that is surely slower will not win."""

_LEAST_ROUNDS = 2
"""Rounds below which nothing is known of how far they scatter."""

_RESERVED_SHARE = 0.25
"""At most this share of the seconds is kept back from the search for measuring the finalists again."""


class Verdict(Value):
    """How a study ended."""

    state: StudyState
    error: str | None = None
    note: str | None = None


class StudyFailedError(Exception):
    """The study cannot go on; the message says why, for the user."""


def risk_of(config: TrainConfig) -> str | None:
    """What a winner risks that its measurement cannot show; None for one that risks nothing."""
    if config.precision == "fp32" or config.optimizer_precision == "fp32":
        return None
    return (f"the winner keeps weights and optimizer states in {config.precision} alone (optimizer_precision compute): "
            "updates below its rounding are lost, so that long training may stall or end worse although the first "
            "steps agree; compare a longer run with optimizer_precision fp32")


def why_hopeless(trials: Sequence[Trial]) -> str | None:
    """Whether the first few trials all failed in the same way that is not a lack of memory, and which it was.

    Only the first line of a failure's detail counts: it names the exception, while the log's tail follows.
    """
    first = [trial for trial in trials if trial.state is TrialState.FINISHED
             and not (trial.outcome is not None and trial.outcome.is_out_of_memory)][:FIRST_FEW]
    if len(first) < FIRST_FEW:
        return None
    ways = {_way_of_failing(trial) for trial in first}
    if len(ways) > 1 or None in ways:
        return None
    return f"the first {FIRST_FEW} trials failed alike ({first[0].outcome}); trial {first[0].number}: {first[0].detail}"


def _way_of_failing(trial: Trial) -> tuple[Outcome, str] | None:
    if trial.outcome in (None, Outcome.OK, Outcome.PRUNED) or trial.outcome.is_out_of_memory:
        return None
    return trial.outcome, "" if trial.outcome is Outcome.TIMEOUT else trial.detail.partition("\n")[0]


def budget_spent(request: StudyRequest, trials: Sequence[Trial], elapsed_seconds: float) -> str | None:
    """Whether no further configuration may be tried, and why. The first one always may."""
    budget = request.budget
    if not trials:
        return None
    if len(trials) >= budget.max_trials:
        return f"budget of {budget.max_trials} trials spent"
    if elapsed_seconds < request.most_seconds - _reserved_seconds(request, trials):
        return None
    if budget.max_device_seconds is not None and request.most_seconds < budget.max_seconds:
        return f"budget of {budget.max_device_seconds:.15g} device-seconds spent"
    return f"budget of {budget.max_seconds:g} seconds spent"


def rivals_among(trials: Sequence[Trial], plan: Plan) -> list[Trial]:
    """Those that may win: all but a reference outside the space, which is there to be compared with."""
    return [trial for trial in trials
            if trial.role is not TrialRole.REFERENCE or plan.canonical(trial.config) in plan.index]


def contenders(request: StudyRequest, trials: Sequence[Trial]) -> list[int]:
    """Numbers of the trials that are measured again: the finalists, fastest first, and beside them the baseline.

    Decided from first measurements alone, so that the answer stays the same while repeats arrive. The baseline is
    measured again with them so that the gain over it does not mix different times of day.
    """
    first_only = [trial.model_copy(update={"repeats": ()}) for trial in trials]
    numbers = finalists(first_only, request.search.finalists)
    baseline = [trial.number for trial in trials
                if trial.number == 0 and trial.outcome is Outcome.OK and trial.measurement is not None]
    return [*numbers, *(number for number in baseline if number not in numbers)]


def next_repeat(request: StudyRequest, trials: Sequence[Trial]) -> Trial | None:
    """Which finalist is measured next: round after round, every other round backwards, so that drift hits all alike.

    None once the rounds asked for are over, or those so far tell the winner from all other finalists.
    """
    order = contenders(request, trials)
    waiting = [trial for trial in trials
               if trial.number in order and len(trial.repeats) < request.search.confirm_rounds]
    if not waiting or len(order) < 2:
        return None
    round_number = min(len(trial.repeats) for trial in waiting)
    if round_number >= _LEAST_ROUNDS and len(waiting) == len(order) and all(
            len(trial.repeats) == round_number for trial in waiting):
        choice = choose(trials, among=order)
        if choice is not None and set(order).isdisjoint(choice.tie_with):
            return None
    direction = 1 if round_number % 2 == 0 else -1
    return min((trial for trial in waiting if len(trial.repeats) == round_number),
               key=lambda trial: direction * order.index(trial.number))


def hopeless_step_seconds(request: StudyRequest, trial: Trial, trials: Sequence[Trial]) -> float | None:
    """The mean step time from which on measuring a suggestion of `guided` is a waste: it would be no finalist, and is
    well above the fastest so far.

    None for trials that others are compared with, for those measured again, and while there are too few finalists.
    The other samplers, which are there to compare with, measure all that they try.
    """
    if (request.search.sampler != "guided" or trial.role is not TrialRole.SUGGESTED
            or trial.state is TrialState.FINISHED):
        return None
    seconds = sorted(rate.step_seconds for other in trials if (rate := throughput(other)) is not None)
    finalists = request.search.finalists
    return max(_HOPELESS * seconds[0], seconds[finalists - 1]) if len(seconds) >= finalists else None


def progress_of(request: StudyRequest, trials: Sequence[Trial], *, trials_total: int, elapsed_seconds: float,
                measured_again: Sequence[int] | None) -> Progress:
    """How far the study is, and how long the rest should take.

    Args:
        measured_again: numbers of the contenders; None while the search goes on.
    """
    confirming = measured_again is not None
    finished = sum(trial.state is TrialState.FINISHED for trial in trials)
    repeats = sum(len(trial.repeats) for trial in trials)
    expected = min(request.search.finalists + 1, trials_total) if measured_again is None else len(measured_again)
    repeats_total = request.search.confirm_rounds * expected if expected > 1 else 0
    rest = None
    if (seconds := _trial_seconds(trials)) is not None:
        left = 0.0 if confirming else (trials_total - finished) * seconds
        left = min(left, max(request.most_seconds - elapsed_seconds, 0.0))
        rest = left + max(repeats_total - repeats, 0) * seconds
    return Progress(trials_finished=finished, trials_total=finished if confirming else trials_total,
                    repeats_finished=repeats, repeats_total=repeats_total if confirming else None,
                    elapsed_seconds=elapsed_seconds, predicted_rest_seconds=rest)


def _reserved_seconds(request: StudyRequest, trials: Sequence[Trial]) -> float:
    seconds = _trial_seconds(trials) or 0.0
    repeats = request.search.confirm_rounds * (request.search.finalists + 1)
    return min(repeats * seconds, _RESERVED_SHARE * request.most_seconds)


def _trial_seconds(trials: Sequence[Trial]) -> float | None:
    """Mean wall time of the latest trials."""
    durations = [(trial.finished_at - trial.started_at).total_seconds()
                 for trial in trials if trial.finished_at is not None]
    return fmean(durations[-5:]) if durations else None


def best_config(study: Study, plan: Plan, choice: Choice, *, created_at: datetime) -> BestConfig:
    """The winner with all that is needed to judge, export and reuse it."""
    rate = choice.throughput
    return BestConfig(
        study_id=study.id, trial_number=choice.trial_number, model_name=study.request.name,
        model_fingerprint=plan.model.fingerprint, training_fingerprint=training_fingerprint(study.request),
        hardware_fingerprint=plan.hardware.fingerprint, request=study.request, config=choice.config,
        model_profile=plan.model, hardware_profile=plan.hardware, tokens_per_second=rate.tokens_per_second,
        tokens_per_second_interval=rate.interval, samples_per_second=rate.samples_per_second,
        step_seconds=rate.step_seconds, peak_device_bytes=choice.peak_device_bytes,
        peak_host_bytes=choice.peak_host_bytes, baseline_trial_number=choice.baseline_trial_number,
        baseline_tokens_per_second=choice.baseline_tokens_per_second,
        baseline_peak_device_bytes=choice.baseline_peak_device_bytes, speedup=choice.speedup,
        speedup_interval=choice.speedup_interval, confirmed=choice.confirmed, tie_with=choice.tie_with,
        created_at=created_at)
