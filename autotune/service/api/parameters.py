"""Parameters that several handlers share, checked before they reach the store."""

import re
from typing import Annotated

from fastapi import Depends, Path, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request

from autotune.domain.errors import FieldError, InvalidRequestError, NotFoundError
from autotune.service.checks import check_plain

_STUDY_ID = re.compile(r"[0-9a-f]{32}")
_NO_CONTROLS = r"^[^\x00-\x1f\x7f]*$"


def _study_id(study_id: Annotated[str, Path(description="the study's id")]) -> str:
    if not _STUDY_ID.fullmatch(study_id):
        raise NotFoundError(f"no study {study_id[:64]!r}: an id is 32 hexadecimal digits")
    return study_id


StudyId = Annotated[str, Depends(_study_id)]
TrialNumber = Annotated[int, Path(ge=0, le=2**31 - 1, description="the trial's number, from 0")]
Cursor = Annotated[str | None, Query(max_length=200, description="`next_cursor` of the page before")]
Limit = Annotated[int, Query(ge=1, le=500, description="at most so many items")]
ModelFilter = Annotated[str | None, Query(max_length=120, pattern=_NO_CONTROLS,
                                          description="only studies submitted under this name")]


def _last_event_id(request: Request, last_event_id: Annotated[
        int | None, Query(ge=0, le=2**62, description="as the Last-Event-ID header, which wins")] = None) -> int:
    header = request.headers.get("last-event-id", "").strip()
    if not header:
        return last_event_id or 0
    if not header.isascii() or not header.isdigit() or len(header) > 18:
        raise InvalidRequestError(FieldError("Last-Event-ID", "give the id of an event, a whole number"))
    return int(header)


LastEventId = Annotated[int, Depends(_last_event_id)]


async def json_body(request: Request) -> None:
    """Make sure that a body is plain JSON before its schema is looked at.

    Raises:
        HTTPException: 415, another content type or none.
        InvalidRequestError: values that are no JSON, though Python reads them.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPException(415, f"send the body as application/json, not as {kind or 'bytes without a content type'}")
    if await request.body():
        check_plain(await request.json())
