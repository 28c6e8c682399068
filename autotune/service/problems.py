"""Errors as RFC 9457 problem details: one shape for everything that goes wrong, from a bad field to a bug.

The handler of unexpected errors is one of the product's three places that catch everything; it answers without
internals, and the server logs the traceback.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from autotune.domain.errors import (
    ConflictError,
    ExportError,
    FieldError,
    InvalidRequestError,
    NotFoundError,
    NoWinnerError,
    StoreUnavailableError,
    UnreadableError,
)
from autotune.service.fields import field_errors
from engine.values import Value

MEDIA_TYPE = "application/problem+json"

_log = logging.getLogger(__name__)

HtmlError = Callable[[Request, "Problem"], Response]
"""How the dashboard shows an error to a browser."""


class FieldProblem(Value):
    """One thing wrong with a request."""

    field: str = Field(description="dotted path, such as training.global_batch_size")
    message: str = Field(description="what is wrong and what to do about it")


class Problem(Value):
    """What went wrong (RFC 9457)."""

    type: str = Field(description="names the kind of problem; stable")
    title: str
    status: int
    detail: str
    errors: tuple[FieldProblem, ...] = Field((), description="the fields at fault, where fields are")
    outcomes: dict[str, int] | None = Field(None, description="how many trials ended in which way; given where a study "
                                            "has no winner")


_TITLES = {
    400: ("malformed-request", "The request cannot be read"),
    401: ("unauthorized", "A token is needed"),
    403: ("forbidden", "Refused"),
    404: ("not-found", "No such thing"),
    405: ("method-not-allowed", "This path does not have that method"),
    409: ("conflict", "The present state forbids it"),
    413: ("too-large", "The request is too large"),
    415: ("unsupported-media-type", "The body must be JSON"),
    421: ("wrong-host", "Not a name of this service"),
    422: ("invalid-request", "The request can never run as it is"),
    500: ("internal-error", "Something broke inside"),
    503: ("unavailable", "The database is not available"),
}


def make_problem(status: int, detail: str, *, errors: Sequence[FieldError] = (), kind: str | None = None,
                 outcomes: Mapping[str, int] | None = None) -> Problem:
    """A problem with the type and title that its status stands for, unless `kind` names a more exact type."""
    slug, title = _TITLES.get(status, (f"http-{status}", HTTPStatus(status).phrase))
    return Problem(type=f"urn:autotune:problem:{kind or slug}", title=title, status=status, detail=detail,
                   errors=tuple(FieldProblem(field=error.field, message=error.message) for error in errors),
                   outcomes=None if outcomes is None else dict(outcomes))


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """The problem as an HTTP response that no cache keeps."""
    content = problem.model_dump(mode="json", exclude={"outcomes"} if problem.outcomes is None else None)
    return JSONResponse(_encodable(content), status_code=problem.status, media_type=MEDIA_TYPE,
                        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **(headers or {})})


def answer(request: Request, problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """The problem as JSON; as a page where a browser asked for one and the dashboard can make it."""
    page: HtmlError | None = getattr(request.app.state, "html_error", None)
    if page is not None and wants_html(request):
        response = page(request, problem)
        response.headers.update(headers or {})
        return response
    return problem_response(problem, headers)


def wants_html(request: Request) -> bool:
    """Whether a browser asks for a page rather than for the API."""
    return not request.url.path.startswith("/api/") and "text/html" in request.headers.get("accept", "")


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problem responses of a handler, for OpenAPI."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {status: {"description": _TITLES[status][1], "content": {MEDIA_TYPE: schema}} for status in statuses}


def install_handlers(app: FastAPI) -> None:
    """Answer every error of this application with a problem."""

    @app.exception_handler(InvalidRequestError)
    def invalid(request: Request, error: InvalidRequestError) -> Response:
        return answer(request, make_problem(422, str(error), errors=error.errors))

    @app.exception_handler(RequestValidationError)
    def unreadable(request: Request, error: RequestValidationError) -> Response:
        return answer(request, _from_validation(error))

    @app.exception_handler(NotFoundError)
    def missing(request: Request, error: NotFoundError) -> Response:
        return answer(request, make_problem(404, str(error)))

    @app.exception_handler(NoWinnerError)
    def no_winner(request: Request, error: NoWinnerError) -> Response:
        return answer(request, make_problem(409, str(error), kind="no-winner", outcomes=error.outcomes))

    @app.exception_handler(ConflictError)
    def conflict(request: Request, error: ConflictError) -> Response:
        return answer(request, make_problem(409, str(error)))

    @app.exception_handler(ExportError)
    def inexpressible(request: Request, error: ExportError) -> Response:
        return answer(request, make_problem(422, str(error), kind="not-expressible",
                                            errors=[FieldError("format", str(error))]))

    @app.exception_handler(StoreUnavailableError)
    def unavailable(request: Request, error: StoreUnavailableError) -> Response:
        return unavailable_answer(request, error)

    @app.exception_handler(UnreadableError)
    def unreadable_row(request: Request, error: UnreadableError) -> Response:
        return answer(request, make_problem(500, str(error), kind="unreadable"))

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> Response:
        if error.status_code in (204, 304):
            return Response(status_code=error.status_code, headers=error.headers)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = _allowed_methods(request) or headers.get("Allow", "")
        return answer(request, make_problem(error.status_code, _http_detail(request, error)), headers)

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> Response:
        # Outside all middleware: a page would miss its security headers, so browsers get JSON here too.
        return problem_response(make_problem(500, "an unexpected error; the server's log tells more"))


def unavailable_answer(request: Request, error: StoreUnavailableError) -> Response:
    """503. The cause is for the operator's log: readiness is asked by anyone, and names of hosts are not theirs."""
    _log.warning("%s", error)
    return answer(request, make_problem(503, "the database cannot be used now; the server's log tells why"))


def _allowed_methods(request: Request) -> str:
    """All methods that the API documents for a path; the router itself knows those of one handler only."""
    for template, operations in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{[^}]+\}", "[^/]+", template), request.url.path):
            return ", ".join(sorted(method.upper() for method in operations))
    return ""


def _http_detail(request: Request, error: HTTPException) -> str:
    if error.status_code == 404:
        return f"no such path: {request.url.path}"
    if error.status_code == 405:
        return f"{request.url.path} does not have the method {request.method}"
    return str(error.detail)


def _from_validation(error: RequestValidationError) -> Problem:
    found = error.errors()
    if found and found[0]["type"] == "json_invalid":
        reason, position = found[0].get("ctx", {}).get("error", ""), found[0]["loc"][-1]
        return make_problem(400, f"the body is not JSON: {reason} at character {position}")
    errors = field_errors(found)
    return make_problem(422, "; ".join(f"{item.field}: {item.message}" for item in errors), errors=errors)


def _encodable(value: Any) -> Any:
    """Text as UTF-8 can carry it: what is refused may be quoted in the refusal."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value
