"""Trials of earlier studies, as the surrogate looks at them beside this study's candidates. Pure.

What such a trial tells is by how much its prediction was off, in terms of its own seconds and bytes: its model or its
hardware was another, and so were its limits. It never counts as a trial of this study.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autotune.domain.earlier import EarlierRecord, EarlierStudy
from autotune.domain.prediction import Prediction
from autotune.domain.throughput import is_valid
from autotune.predict import predict
from autotune.search.arrays import Arrays, categories_of, does_as_candidates, plan_levels
from autotune.search.plan import Plan
from autotune.search.surrogate import Array, Earlier, Prior
from engine.config import TrainConfig
from engine.report import Measurement
from engine.statistics import robust_mean

_KINSHIP = 0.75
"""Correlation between studies that resemble each other: such a one tells much."""


class Told(NamedTuple):
    """One trial of an earlier study that can be told in terms of this one."""

    study: int
    config: TrainConfig
    prediction: Prediction
    measurement: Measurement


def predicted_anew(record: EarlierRecord) -> EarlierStudy:
    """The study with what would be predicted of its trials today: predictions, and what they are off by, change from
    release to release. Trials of which nothing is predicted are left out."""
    trials = ((trial, _prediction(record, trial.config)) for trial in record.study.trials)
    return record.study.model_copy(update={"trials": tuple(
        trial.model_copy(update={"prediction": prediction}) for trial, prediction in trials if prediction is not None)})


def _prediction(record: EarlierRecord, config: TrainConfig) -> Prediction | None:
    try:
        return predict(record.model, record.hardware, record.optimizer, config)
    except KeyError:  # a precision or checkpointing choice that this profile does not have
        return None


def told(plan: Plan, studies: Sequence[EarlierStudy]) -> list[Told]:
    """Trials measured without contention that do nothing which no candidate of the plan does, such as to run in a
    precision that is not searched here."""
    return [Told(number, trial.config, trial.prediction, trial.measurement)
            for number, study in enumerate(studies) for trial in study.trials
            if trial.prediction is not None and trial.prediction.step_seconds
            and trial.measurement is not None and is_valid(trial.measurement)
            and does_as_candidates(plan, trial.config)]


def earlier_note(plan: Plan, studies: Sequence[EarlierStudy]) -> str | None:
    """For the study's note; None where nothing was told."""
    found = told(plan, studies)
    parts = []
    for number, study in enumerate(studies):
        if count := sum(each.study == number for each in found):
            where = f": {study.hardware}" if study.hardware else ""
            parts.append(f"{count} trial{'s' if count > 1 else ''} of study {study.study_id[:8]} "
                         f"({study.relation}{where})")
    return f"predictions began corrected by what was measured in {' and '.join(parts)}" if parts else None


def with_earlier(arrays: Arrays, plan: Plan, studies: Sequence[EarlierStudy]) -> Arrays:
    """The plan's arrays with what earlier studies tell; as they are where that is nothing."""
    found = told(plan, studies)
    if not found:
        return arrays
    predictions, runs = [each.prediction for each in found], [each.measurement for each in found]
    rows = _Rows(plan, found)
    time = rows.added(arrays.time, _table(arrays.names, [each.seconds for each in predictions]),
                      [robust_mean(run.step_seconds) for run in runs])
    bytes_and_peaks = (([each.device_bytes for each in predictions], [run.peak_device_bytes for run in runs]),
                       ([each.host_bytes for each in predictions], [run.peak_host_bytes for run in runs]))
    return replace(arrays, time=time, places=tuple(
        replace(place, memory=rows.added(place.memory, _table(place.names, terms), peaks))
        for place, (terms, peaks) in zip(arrays.places, bytes_and_peaks, strict=True)))


def _table(names: Sequence[str], rows: Sequence[Mapping[str, float]]) -> Array:
    """(m, t + 1) terms by name; what has another one, as communication does for a study of one device, is the last."""
    return np.array([[*(row.get(name, 0.0) for name in names),
                      sum(value for name, value in row.items() if name not in names)] for row in rows])


class _Rows:
    """Trials by the plan's knobs and categories."""

    def __init__(self, plan: Plan, found: Sequence[Told]) -> None:
        levels = plan_levels(plan, [each.config for each in found])
        self._studies = np.array([each.study for each in found], dtype=np.intp)
        self._categories = categories_of(levels, len(found))
        self._knobs = tuple(each.coordinates() for each in levels)

    def added(self, prior: Prior, terms: Array, measured: Sequence[float]) -> Prior:
        """The prior with these trials, less those of which nothing was predicted or measured.

        Args:
            terms: (m, t + 1) the prior's, and one that none of its candidates has.
        """
        values = np.array(measured, dtype=np.float64)
        kept = (values > 0) & (terms.sum(1) > 0)
        if not kept.any():
            return prior
        return replace(
            prior, terms=np.pad(prior.terms, ((0, 0), (0, 1))), weights=np.append(prior.weights, 1.0),
            earlier=Earlier(terms=terms[kept], categories=self._categories[kept], values=np.log(values[kept]),
                            knobs=tuple(knob[kept] for knob in self._knobs), studies=self._studies[kept],
                            kinship=_KINSHIP))
