"""Studies: submit, list, look at, cancel, delete; their plan, winner and export."""

import json
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Header, Query, Response

from autotune.domain.explanation import Explanation
from autotune.domain.request import StudyRequest
from autotune.domain.study import BestConfig, StudyState
from autotune.export import FORMATS
from autotune.service.api.parameters import Cursor, Limit, ModelFilter, StudyId, json_body
from autotune.service.problems import responses
from autotune.service.schemas import PlanView, StudyList, StudyView
from autotune.service.state import CommandsDep, QueriesDep

router = APIRouter(prefix="/studies", tags=["studies"])

EXAMPLE = {
    "name": "gpt-tiny",
    "model": {"kind": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 4096, "sequence_length": 128},
    "training": {"global_batch_size": 32, "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
                 "gradient_clipping": 1.0},
    "hardware": {"device": "auto", "devices": 2, "memory_limit_bytes": None},
    "search": {"sampler": "guided", "seed": 0, "space": {"zero_stage": [0, 1, 2, 3], "precision": ["bf16"]}},
    "budget": {"max_trials": 20, "max_seconds": 600},
}


@router.post("", status_code=201, summary="Submit a study", dependencies=[Depends(json_body)],
             responses={**responses(400, 409, 413, 415, 422), 201: {"headers": {"Location": {
                 "description": "the study's path", "schema": {"type": "string"}}}}})
def submit(
    body: Annotated[StudyRequest, Body(openapi_examples={"gpt": {"summary": "a small language model on two devices",
                                                                 "value": EXAMPLE}})],
    response: Response, commands: CommandsDep,
    idempotency_key: Annotated[str | None, Header(description="the same key with the same body gives the first study "
                                                  "again; with another body it is refused")] = None,
) -> StudyView:
    """Queue a tuning job. What can never run is refused now, with every field at fault.

    Studies wait while devices are busy, and start in the order they were submitted.
    """
    study = commands.submit(body, idempotency_key)
    response.headers["Location"] = f"/api/v1/studies/{study.id}"
    return StudyView.of(study)


@router.get("", summary="List studies", responses=responses(422))
def list_studies(
    queries: QueriesDep, cursor: Cursor = None, limit: Limit = 50,
    state: Annotated[StudyState | None, Query(description="only studies in this state")] = None,
    model: ModelFilter = None,
) -> StudyList:
    """Studies, newest first."""
    page = queries.studies(state=state, model=model, cursor=cursor, limit=limit)
    return StudyList(items=tuple(StudyView.of(study) for study in page.items), next_cursor=page.next_cursor)


@router.get("/{study_id}", summary="One study", responses=responses(404))
def get_study(study_id: StudyId, queries: QueriesDep) -> StudyView:
    """A study with its progress, the best configuration so far and the predicted rest."""
    return StudyView.of(queries.study(study_id))


@router.post("/{study_id}/cancel", summary="Cancel a study", responses=responses(404, 409))
def cancel(study_id: StudyId, commands: CommandsDep) -> StudyView:
    """Stop a study. A queued one ends at once; a running one within seconds, and its devices are free then."""
    return StudyView.of(commands.cancel(study_id))


@router.delete("/{study_id}", status_code=204, summary="Delete a finished study", responses=responses(404, 409))
def delete(study_id: StudyId, commands: CommandsDep) -> None:
    """Remove a study that has ended, with its trials, logs and events. Its best configuration stays stored."""
    commands.delete(study_id)


@router.get("/{study_id}/plan", summary="What the plan found", responses=responses(404, 409))
def get_plan(study_id: StudyId, queries: QueriesDep, limit: Annotated[
        int, Query(ge=0, le=1000, description="at most so many predictions")] = 100) -> PlanView:
    """How many configurations are feasible, why others were dropped, and predictions. 409 before the plan is made."""
    return PlanView.of(queries.plan(study_id), limit)


@router.get("/{study_id}/best", summary="The winner with its evidence", responses=responses(404, 409))
def get_best(study_id: StudyId, queries: QueriesDep) -> BestConfig:
    """The winner; while the study runs, the best so far (`confirmed` tells). 409 with counts by outcome without one."""
    return queries.best(study_id)


@router.get("/{study_id}/explanation", summary="Why the winner won", responses=responses(404, 409))
def get_explanation(study_id: StudyId, queries: QueriesDep) -> Explanation:
    """Memory and time of the winner by term, predicted and measured; what keeps it from being faster; and what one
    step of each knob would have cost, measured where it was tried and predicted where not."""
    return queries.explanation(study_id)


@router.get("/{study_id}/export", summary="The winner or a plan's row as a file", response_class=Response, responses={
    **responses(404, 409, 422),
    200: {"description": "the file; `X-Autotune-Notes` is a JSON list of what to know about it",
          "content": {"application/json": {}, "application/yaml": {}, "text/plain": {}}}})
def export(study_id: StudyId, queries: QueriesDep, format: Annotated[
        str, Query(max_length=100, description=", ".join(FORMATS))] = "engine",
           row: Annotated[int | None, Query(ge=1, le=1000, description="mode plan: of `fastest`, counted from 1 and on "
                                            "through what only `layouts` has")] = None) -> Response:
    """The winner for a training tool. What the format cannot express is refused or noted, never dropped in silence.

    A study in mode plan has no winner: `row` exports one of its predictions, which the file says it is.
    """
    file = queries.export(study_id, format, row)
    return Response(file.text.encode(), media_type=file.media_type, headers={
        "Content-Disposition": f'attachment; filename="{file.filename}"',
        "X-Autotune-Notes": json.dumps(list(file.notes), ensure_ascii=True)})
