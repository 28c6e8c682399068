"""A search problem with a known answer, and a study of it without any device."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import NamedTuple

from autotune.domain.earlier import EarlierStudy
from autotune.domain.request import Sampler, SearchRequest
from autotune.domain.study import Trial, TrialRole, TrialState
from autotune.search.choose import finalists
from autotune.search.plan import Plan
from autotune.search.suggest import suggest
from engine.config import TrainConfig
from engine.report import Measurement, Outcome, PhaseSeconds, StateBytes

WITHIN = 0.02
"""A configuration this close to the best one counts as found."""
_FINALISTS = 3
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class Truth(NamedTuple):
    """What a configuration really needs, and what a trial of it would measure.

    Attributes:
        fails: whether it computes something else, so that a trial that fits ends as numerics_drift, and it never wins.
    """

    step_seconds: float
    measured_seconds: float
    peak_device_bytes: int
    peak_host_bytes: int
    fails: bool = False


class Problem(NamedTuple):
    """
    Attributes:
        truth: of any configuration of the plan.
        best_seconds: of the fastest candidate that fits and does not fail.
    """

    name: str
    plan: Plan
    truth: Callable[[TrainConfig], Truth]
    best_seconds: float


class Score(NamedTuple):
    """How one study went.

    Attributes:
        regrets: by number of trials less 1: how much longer a step takes than at best, with the best of the
            finalists so far; infinite while none has been measured.
        out_of_memory: trials that ran out of it.
    """

    regrets: tuple[float, ...]
    out_of_memory: int

    def after(self, trials: int) -> float:
        return self.regrets[min(trials, len(self.regrets)) - 1]

    def trials_to_within(self, regret: float = WITHIN) -> float:
        """Trials until the regret is that small; infinite where it never is."""
        return next((number for number, found in enumerate(self.regrets, start=1) if found <= regret), float("inf"))


def make_problem(name: str, plan: Plan, truth: Callable[[TrainConfig], Truth]) -> Problem:
    """Raises: ValueError where nothing fits, or all that does fails."""
    truths = (truth(candidate.config) for candidate in plan.candidates)
    return Problem(name, plan, truth, min(true.step_seconds for true in truths if _outcome(plan, true) is Outcome.OK))


def run_study(problem: Problem, sampler: Sampler, *, trials: int, seed: int = 0) -> Score:
    """The baseline, then what `suggest` says, as a study would, and the regret after each trial.

    The regret is that of the best among the configurations measured fastest, because a study measures these again
    until it can tell them apart.
    """
    return score(problem, run_trials(problem, sampler, trials=trials, seed=seed))


def run_trials(problem: Problem, sampler: Sampler, *, trials: int, seed: int = 0,
               earlier: Sequence[EarlierStudy] = ()) -> list[Trial]:
    """The trials of one study; the baseline is the first."""
    search = SearchRequest(sampler=sampler, seed=seed, min_expected_gain=0)
    done: list[Trial] = []
    while len(done) < trials:
        config = suggest(problem.plan, done, search, earlier) if done else problem.plan.baseline
        if config is None:
            break
        done.append(make_trial(problem, len(done), config))
    return done


def score(problem: Problem, trials: Sequence[Trial]) -> Score:
    """How a study of these trials went."""
    regrets = tuple(min((problem.truth(trials[number].config).step_seconds / problem.best_seconds - 1
                         for number in finalists(trials[:count], _FINALISTS)), default=float("inf"))
                    for count in range(1, len(trials) + 1))
    return Score(regrets, sum(trial.outcome is not None and trial.outcome.is_out_of_memory for trial in trials))


def summary(scores: Sequence[Score]) -> dict[str, float]:
    """Percent and trials, over several studies."""
    row = {f"% after {trials}": 100 * median(score.after(trials) for score in scores) for trials in (5, 10, 20)}
    reached = sorted(score.trials_to_within() for score in scores)
    return {**row, "trials to 2 %, median": median(reached), "90th percentile": reached[-(-9 * len(reached) // 10) - 1],
            "out of memory": sum(score.out_of_memory for score in scores) / len(scores),
            "share without": sum(score.out_of_memory == 0 for score in scores) / len(scores)}


def make_trial(problem: Problem, number: int, config: TrainConfig) -> Trial:
    """A trial as it would be stored."""
    true, plan = problem.truth(config), problem.plan
    outcome = _outcome(plan, true)
    return Trial(
        study_id="benchmark", number=number, state=TrialState.FINISHED, config=config, outcome=outcome,
        role=TrialRole.SUGGESTED if number else TrialRole.BASELINE, prediction=plan.predict_or_none(config),
        measurement=None if outcome.is_out_of_memory else _measurement(plan, true),
        started_at=_EPOCH, finished_at=_EPOCH)


def _outcome(plan: Plan, true: Truth) -> Outcome:
    if true.peak_device_bytes > plan.limits.device_bytes:
        return Outcome.OOM_DEVICE
    if true.peak_host_bytes > plan.limits.host_bytes:
        return Outcome.OOM_HOST
    return Outcome.NUMERICS_DRIFT if true.fails else Outcome.OK


def _measurement(plan: Plan, true: Truth) -> Measurement:
    rate = plan.tokens_per_step / true.measured_seconds
    return Measurement(
        step_seconds=(true.measured_seconds,) * 2, warmup_seconds=(), tokens_per_second=rate,
        tokens_per_second_interval=(rate, rate), samples_per_second=rate / plan.model.tokens_per_sample,
        peak_device_bytes=true.peak_device_bytes, peak_host_bytes=true.peak_host_bytes,
        phases=PhaseSeconds(data=0.0, forward=0.0, backward=0.0, step=true.measured_seconds), losses=(),
        state_bytes=StateBytes(parameters=0, gradients=0, optimizer=0, host=0),
        world_size=plan.hardware.world_size, threads_per_rank=1, setup_seconds=0.0, compute_dtype="fp32")
