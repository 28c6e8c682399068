"""Trials of a study."""

from fastapi import APIRouter
from starlette.responses import PlainTextResponse

from autotune.domain.study import Trial
from autotune.service.api.parameters import Cursor, Limit, StudyId, TrialNumber
from autotune.service.problems import responses
from autotune.service.schemas import TrialList
from autotune.service.state import QueriesDep

router = APIRouter(prefix="/studies/{study_id}/trials", tags=["trials"])


@router.get("", summary="List trials", responses=responses(404, 422))
def list_trials(study_id: StudyId, queries: QueriesDep, cursor: Cursor = None, limit: Limit = 50) -> TrialList:
    """Trials by number, with configuration, prediction, measurement and outcome."""
    page = queries.trials_page(study_id, cursor=cursor, limit=limit)
    return TrialList(items=page.items, next_cursor=page.next_cursor)


@router.get("/{number}", summary="One trial", responses=responses(404, 422))
def get_trial(study_id: StudyId, number: TrialNumber, queries: QueriesDep) -> Trial:
    """One configuration and all that was measured of it."""
    return queries.trial(study_id, number)


@router.get("/{number}/log", summary="A trial's log", response_class=PlainTextResponse, responses=responses(404, 422))
def get_log(study_id: StudyId, number: TrialNumber, queries: QueriesDep) -> PlainTextResponse:
    """What the trial's processes wrote, the end of it where it was long; empty while the trial runs."""
    return PlainTextResponse(queries.trial_log(study_id, number))
