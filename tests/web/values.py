"""Trials and studies as plain values, without a store."""

from typing import Any

from autotune.domain.study import Progress, Study, StudyState, Trial, TrialRole, TrialState
from engine.config import TrainConfig
from engine.report import Outcome
from tests.support.samples import START
from tests.web.story import measurement, prediction, request

STUDY_ID = "a" * 32


def trial(number: int, step_seconds: float | None = 0.3, *, peak_mib: float = 400, outcome: Outcome | None = Outcome.OK,
          **changes: Any) -> Trial:
    """A finished trial; without step seconds, one that was not measured."""
    values: dict[str, Any] = {
        "study_id": STUDY_ID, "number": number, "role": TrialRole.BASELINE if number == 0 else TrialRole.SUGGESTED,
        "state": TrialState.RUNNING if outcome is None else TrialState.FINISHED, "config": TrainConfig(),
        "prediction": prediction(peak_mib), "outcome": outcome, "started_at": START,
        "measurement": None if step_seconds is None else measurement(step_seconds, peak_mib=peak_mib, seed=number)}
    return Trial.model_validate({**values, **changes})


def study(state: StudyState = StudyState.RUNNING, **changes: Any) -> Study:
    values: dict[str, Any] = {"id": STUDY_ID, "request": request(), "state": state, "progress": Progress(),
                              "created_at": START, "started_at": START}
    return Study.model_validate({**values, **changes})
