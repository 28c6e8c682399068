"""What is left to try."""

from collections.abc import Sequence

import numpy as np

from autotune.domain.prediction import Prediction
from autotune.domain.study import Trial
from autotune.search.plan import Candidate, Plan, Terms
from engine.config import TrainConfig
from engine.report import Outcome

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


def untried(plan: Plan, trials: Sequence[Trial]) -> Mask:
    """Of the plan's candidates, those that were not tried and are not bound to run out of memory.

    A candidate that needs at least the memory, by every term, of a configuration that ran out of it would do so too.
    One whose process was killed without a known cause says nothing of others, and is itself tried once more.
    """
    left = ~_doomed(plan, trials)
    killed = set[int]()
    for trial in trials:
        position = plan.index.get(plan.canonical(trial.config))
        if position is None:
            continue
        if trial.is_killed_unexplained and position not in killed:
            killed.add(position)
        else:
            left[position] = False
    return left


def remaining(plan: Plan, trials: Sequence[Trial]) -> dict[TrainConfig, Candidate]:
    """The `untried` candidates by configuration, in the plan's order."""
    return {candidate.config: candidate
            for candidate, is_left in zip(plan.candidates, untried(plan, trials), strict=True) if is_left}


def _doomed(plan: Plan, trials: Sequence[Trial]) -> Mask:
    found = np.zeros(len(plan.candidates), dtype=np.bool_)
    for trial in trials:
        if trial.outcome is None or not trial.ran_out_of_memory:
            continue
        prediction = plan.predict_or_none(trial.config)
        terms, needed = _binding_terms(plan, trial.outcome, prediction) if prediction is not None else ({}, None)
        if needed is not None and any(terms.values()):
            found |= (needed >= np.array([*terms.values()], dtype=np.int64)).all(axis=1)
    return found


def _binding_terms(plan: Plan, outcome: Outcome, prediction: Prediction) -> tuple[dict[str, int], Terms]:
    """The terms, of the trial and of every candidate, of the memory that ran out."""
    if outcome is Outcome.OOM_DEVICE:
        return prediction.device_bytes, plan.device_terms
    if plan.hardware.device_type == "cpu":
        # a CPU's device memory is the host's
        both = {**prediction.device_bytes, **{f"host {name}": size for name, size in prediction.host_bytes.items()}}
        return both, np.hstack([plan.device_terms, plan.host_terms])
    return prediction.host_bytes, plan.host_terms
