"""Server-sent events of a study: `Last-Event-ID` resumes without loss or duplicates, the stream ends with the study."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from autotune.domain.errors import NotFoundError, StoreUnavailableError
from autotune.domain.study import Event
from autotune.service.api.parameters import LastEventId, StudyId
from autotune.service.problems import responses
from autotune.service.state import QueriesDep, Services, ServicesDep

router = APIRouter(prefix="/studies/{study_id}/events", tags=["events"])

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
STATE_CHECK_POLLS = 8
RECONNECT_MILLISECONDS = 1000


def _something_to_come(study_id: StudyId, last_id: LastEventId, queries: QueriesDep) -> int:
    """The id to go on after. 204 tells a browser to stop reconnecting: the study has ended and all of it was sent."""
    study = queries.study(study_id)
    if study.state.is_final and not queries.events_after(last_id, study_id=study_id, limit=1):
        raise HTTPException(204)
    return last_id


@router.get("", summary="Follow a study", response_class=EventSourceResponse,
            responses={**responses(404, 422), 204: {"description": "the study has ended and every event was sent"}})
async def follow(study_id: StudyId, last_id: Annotated[int, Depends(_something_to_come)], services: ServicesDep,
                 request: Request) -> AsyncIterator[ServerSentEvent]:
    """A stream of events: `state`, `phase`, `trial_started`, `trial_progress`, `trial_finished`, `best_changed`.

    `data` is JSON with `id`, `study_id`, `kind`, `data`, `created_at`. All events of the study come in order, from the
    first or from after `Last-Event-ID`. The stream ends after the event of the study's end. Comments come in between
    while nothing happens.
    """
    yield ServerSentEvent(comment=f"study {study_id}", retry=RECONNECT_MILLISECONDS)
    try:
        async for event in _events(services, study_id, last_id):
            yield ServerSentEvent(data=event, event=event.kind.value, id=str(event.id))
    except StoreUnavailableError as error:
        _log.warning("a stream ends, to be taken up again: %s", error)


async def _events(services: Services, study_id: str, last_id: int) -> AsyncIterator[Event]:
    """Events after `last_id` until the study's end or the server's. Each look is a transaction of its own."""
    quiet_polls = 0
    while not services.stopping.is_set():
        events = await run_in_threadpool(services.queries.events_after, last_id, study_id=study_id)
        for event in events:
            yield event
            last_id = event.id
            if event.ends_study:
                return
        quiet_polls = 0 if events else quiet_polls + 1
        if quiet_polls % STATE_CHECK_POLLS == 1 and await run_in_threadpool(_has_ended, services, study_id, last_id):
            return
        if not events:
            await asyncio.sleep(POLL_SECONDS)


def _has_ended(services: Services, study_id: str, last_id: int) -> bool:
    """Whether nothing can come any more: the client had the last event already, or the study was deleted."""
    try:
        final = services.queries.study(study_id).state.is_final
    except NotFoundError:
        return True
    return final and not services.queries.events_after(last_id, study_id=study_id, limit=1)
