"""`suggest`: the next configuration to try, from a real Optuna sampler."""

import heapq
from collections.abc import Sequence

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, GridSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from autotune.domain.earlier import EarlierStudy
from autotune.domain.request import SearchRequest
from autotune.domain.study import Trial
from autotune.search.arrays import plan_arrays, tried_beside
from autotune.search.earlier import with_earlier
from autotune.search.encoding import Encoding, Params, make_encoding
from autotune.search.guided import POINT, GuidedSampler
from autotune.search.history import told_trials
from autotune.search.opening import opening
from autotune.search.plan import Candidate, Plan
from autotune.search.remaining import remaining, untried
from autotune.search.stopping import is_worth_going_on
from engine.config import TrainConfig

_ASKS = {"tpe": 16, "gp": 3, "random": 64}
"""How often a sampler is asked again when it proposes what was tried or cannot fit; then the nearest candidate is
taken. Optuna never removes duplicates (24 of 40 on a space of 16 points)."""

_STARTUP_TRIALS = 6
"""Random trials before a model is fitted; budgets are small."""

_LATEST, _FASTEST = 70, 50
"""Trials that `guided` learns from, so that a suggestion stays quick after many."""


def suggest(plan: Plan, trials: Sequence[Trial], search: SearchRequest,
            earlier: Sequence[EarlierStudy] = ()) -> TrainConfig | None:
    """The next configuration to try, None when none is left that is worth a trial (`stopping.why_nothing` says why).

    Deterministic in the plan, the trials and the seed. No configuration is suggested that was tried or runs, that does
    the same as one of these, or that needs at least the memory, by every term, of one that ran out of it.

    Args:
        plan: of the study; it, like the other arguments, is picklable: this may run in a helper process, and should
            for the sampler `gp`, which loads torch.
        trials: all of the study so far, running ones too.
        search: sampler and seed.
        earlier: what `guided` begins with.
    """
    if search.sampler == "guided":
        return _guided(plan, trials, search, earlier)
    left = remaining(plan, trials)
    if not left:
        return None
    if search.sampler in ("tpe", "gp"):
        first = opening(plan, trials, left)
        if first is not None:
            return first
    if search.sampler == "grid":
        return _next_of_grid(plan, trials, left, search)
    encoding = make_encoding(plan)
    if not encoding.axes:
        return next(iter(left))
    told = told_trials(plan, trials, encoding.distributions, encoding.encode)
    study = _rebuilt_study(_sampler(search.sampler, _seed(search, trials)), told)
    for _ in range(_ASKS[search.sampler]):
        params = _ask(study, encoding.distributions)
        config = encoding.decode(params)
        if config in left:
            return config
    return _nearest(encoding, params, left)


def _sampler(name: str, seed: int) -> BaseSampler:
    match name:
        case "tpe":
            return TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
        case "gp":
            return GPSampler(seed=seed, n_startup_trials=_STARTUP_TRIALS, warn_independent_sampling=False)
        case "random":
            return RandomSampler(seed=seed)
        case _:
            raise ValueError(f"no such sampler: {name}")


def _seed(search: SearchRequest, trials: Sequence[Trial]) -> int:
    """Another one for every suggestion, as the sampler is made anew each time."""
    return (search.seed * 1_000_003 + len(trials)) % 2**32


def _rebuilt_study(sampler: BaseSampler, told: list[FrozenTrial]) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.add_trials(told)
    return study


def _ask(study: optuna.Study, distributions: dict[str, BaseDistribution]) -> Params:
    """A proposal; it stays behind as a running trial of the in-memory study, so that the next one differs."""
    return study.ask(fixed_distributions=distributions).params


def _nearest(encoding: Encoding, params: Params, left: dict[TrainConfig, Candidate]) -> TrainConfig:
    return min(left, key=lambda config: encoding.distance(params, config))


def _guided(plan: Plan, trials: Sequence[Trial], search: SearchRequest,
            earlier: Sequence[EarlierStudy]) -> TrainConfig | None:
    is_open = untried(plan, trials)
    if not is_open.any():
        return None
    told = _telling(trials)
    beside = tried_beside(plan, [trial.config for trial in told])
    arrays = with_earlier(plan_arrays(plan, beside), plan, earlier)
    sampler = GuidedSampler(arrays, np.pad(is_open, (0, len(beside))), plan.tokens_per_step)
    study, distributions = _study_of_points(plan, told, sampler, beside)
    config = plan.candidates[_ask(study, distributions)[POINT]].config
    return config if is_worth_going_on(plan, trials, search, sampler.expected_gain) else None


def _telling(trials: Sequence[Trial]) -> Sequence[Trial]:
    """The fastest and the latest, where there are too many to learn from all at once."""
    if len(trials) <= _LATEST + _FASTEST:
        return trials
    older, latest = trials[:-_LATEST], trials[-_LATEST:]
    measured = [trial for trial in older if trial.measurement is not None]
    return [*heapq.nlargest(_FASTEST, measured, key=_measured_rate), *latest]


def _measured_rate(trial: Trial) -> float:
    assert trial.measurement is not None
    return trial.measurement.tokens_per_second


def _next_of_grid(plan: Plan, trials: Sequence[Trial], left: dict[TrainConfig, Candidate],
                  search: SearchRequest) -> TrainConfig:
    count = len(plan.candidates)
    study, distributions = _study_of_points(plan, trials, GridSampler({POINT: list(range(count))}, seed=search.seed))
    for _ in range(count):
        config = plan.candidates[_ask(study, distributions)[POINT]].config
        if config in left:
            return config
    return next(iter(left))


def _study_of_points(plan: Plan, trials: Sequence[Trial], sampler: BaseSampler, beside: Sequence[TrainConfig] = ()
                     ) -> tuple[optuna.Study, dict[str, BaseDistribution]]:
    """For samplers that choose among the candidates themselves: each is one point, so that inactive knobs do not
    multiply the space. After them come configurations that were tried beside them."""
    count = len(plan.candidates)
    distributions: dict[str, BaseDistribution] = {POINT: IntDistribution(0, count + len(beside) - 1)}
    others = {config: count + number for number, config in enumerate(beside)}

    def encode(config: TrainConfig) -> Params | None:
        position = plan.index.get(config, others.get(config))
        return None if position is None else {POINT: position}

    return _rebuilt_study(sampler, told_trials(plan, trials, distributions, encode)), distributions
