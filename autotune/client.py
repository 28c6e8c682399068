"""A small client of the REST service, used by the command line and by scripts.

ClientError
├── UnreachableError        nobody answers there
├── UnauthorizedError       the token is missing or wrong
├── AmbiguousIdError        several studies' ids begin like this
└── RefusedError            the service answered with a problem; carries it
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import httpx
from pydantic import BaseModel

from autotune.domain.errors import AutotuneError
from autotune.domain.study import BestConfig, Event, PlanSummary, Trial
from autotune.service.schemas import StudyView

READ_SECONDS = 60.0
"""A stream sends at least a comment every 15 s; one that is silent for so long is dead."""

MAX_WAIT_SECONDS = 5.0

_ID_LENGTH = 32
_SHOWN_STUDIES = 10


class ClientError(AutotuneError):
    """Base of what goes wrong between client and service."""


class UnreachableError(ClientError):
    """Nobody answers there."""


class UnauthorizedError(ClientError):
    """The token is missing or wrong."""


class AmbiguousIdError(ClientError):
    """Several studies' ids begin like this, or might soon; the message lists them, or says how much to give."""


class RefusedError(ClientError):
    """The service answered with a problem. The message says each at its field, or once where it is about no field.

    Attributes:
        problem: its body (RFC 9457); empty where the answer was none.
    """

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        errors = problem.get("errors") or []
        lines = [item.get("message") if item.get("message") == problem.get("detail")
                 else f"{item.get('field')}: {item.get('message')}" for item in errors]
        super().__init__("\n".join(lines) or str(problem.get("detail") or f"HTTP status {status}"))
        self.status = status
        self.problem = problem


class Download(NamedTuple):
    """An exported configuration."""

    filename: str
    media_type: str
    text: str
    notes: tuple[str, ...]


class Client:
    """Talks to one service. Close it, or use it in a `with`.

    Args:
        server: base URL, such as http://127.0.0.1:8420.
        token: the API token.

    Raises (every method):
        UnreachableError, UnauthorizedError, RefusedError.
    """

    def __init__(self, server: str, token: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self._server = server.rstrip("/")
        self._http = httpx.Client(
            base_url=f"{self._server}/api/v1", headers={"Authorization": f"Bearer {token}"}, transport=transport,
            timeout=httpx.Timeout(READ_SECONDS, connect=5.0), trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, request: BaseModel | dict[str, Any], *, idempotency_key: str | None = None) -> StudyView:
        """Queue a study; with a key that was used for the same request, the first study is returned."""
        body = request.model_dump(mode="json") if isinstance(request, BaseModel) else request
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return StudyView.model_validate(self._json("POST", "/studies", json=body, headers=headers))

    def study(self, study_id: str) -> StudyView:
        return StudyView.model_validate(self._json("GET", f"/studies/{study_id}"))

    def studies(self, *, state: str | None = None, model: str | None = None) -> Iterator[StudyView]:
        """All studies, newest first."""
        filters = {name: value for name, value in (("state", state), ("model", model)) if value is not None}
        return (StudyView.model_validate(item) for item in self._items("/studies", filters))

    def find(self, beginning: str, *, at_least: int = 1) -> str:
        """The id of the one study whose id begins like this; what no id begins like comes back as it is.

        Args:
            at_least: characters, where a slip could not be undone.

        Raises:
            AmbiguousIdError: several do, or it is too short.
        """
        if len(beginning) >= _ID_LENGTH or not beginning:
            return beginning
        if len(beginning) < at_least:
            raise AmbiguousIdError(f"{beginning} is too little of an id for what cannot be undone: give at least "
                                   f"{at_least} characters")
        found = [study for study in self.studies() if study.id.startswith(beginning)]
        if len(found) > 1:
            shown = "".join(f"\n  {study.id}  {study.state.value}  {study.name}" for study in found[:_SHOWN_STUDIES])
            more = f"\n  and {len(found) - _SHOWN_STUDIES} more" if len(found) > _SHOWN_STUDIES else ""
            raise AmbiguousIdError(f"{len(found)} studies' ids begin with {beginning}, give more of it:{shown}{more}")
        return found[0].id if found else beginning

    def cancel(self, study_id: str) -> StudyView:
        return StudyView.model_validate(self._json("POST", f"/studies/{study_id}/cancel"))

    def delete(self, study_id: str) -> None:
        self._send("DELETE", f"/studies/{study_id}")

    def trials(self, study_id: str) -> Iterator[Trial]:
        """All trials, by number."""
        return (Trial.model_validate(item) for item in self._items(f"/studies/{study_id}/trials", {}))

    def trial(self, study_id: str, number: int) -> Trial:
        return Trial.model_validate(self._json("GET", f"/studies/{study_id}/trials/{number}"))

    def log(self, study_id: str, number: int) -> str:
        return self._send("GET", f"/studies/{study_id}/trials/{number}/log").text

    def plan(self, study_id: str) -> PlanSummary:
        """What the plan found, with all its rows."""
        return PlanSummary.model_validate(self._json("GET", f"/studies/{study_id}/plan", params={"limit": "1000"}))

    def best(self, study_id: str) -> BestConfig:
        return BestConfig.model_validate(self._json("GET", f"/studies/{study_id}/best"))

    def export(self, study_id: str, format: str, row: int | None = None) -> Download:
        """The winner as a file; with `row`, that row of a plan."""
        params = {"format": format} | ({} if row is None else {"row": str(row)})
        response = self._send("GET", f"/studies/{study_id}/export", params=params)
        disposition = response.headers.get("content-disposition", "")
        filename = disposition.partition('filename="')[2].rstrip('"') or "export.txt"
        return Download(filename, response.headers.get("content-type", ""), response.text,
                        tuple(json.loads(response.headers.get("x-autotune-notes", "[]"))))

    def hardware(self) -> dict[str, Any]:
        return dict(self._json("GET", "/hardware"))

    def events(self, study_id: str, *, after: int = 0, give_up_seconds: float = 60.0) -> Iterator[Event]:
        """Every event of a study with a larger id than `after`, in order, until it ends.

        A broken connection is made again and goes on after the last event seen: none is lost, none comes twice.

        Args:
            give_up_seconds: without a connection for so long, UnreachableError is raised.
        """
        last_id, failing_since, wait_seconds = after, None, 0.2
        while True:
            try:
                for event in self._stream(study_id, last_id):
                    failing_since, wait_seconds, last_id = None, 0.2, event.id
                    yield event
                    if event.ends_study:
                        return
                if self.study(study_id).state.is_final and not self._has_more(study_id, last_id):
                    return
            except (UnreachableError, RefusedError) as error:
                if isinstance(error, RefusedError) and error.status < 500:
                    raise
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > give_up_seconds:
                    raise
            time.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * 2, MAX_WAIT_SECONDS)

    def _has_more(self, study_id: str, last_id: int) -> bool:
        with self._open(study_id, last_id) as response:
            return response.status_code != 204

    def _stream(self, study_id: str, last_id: int) -> Iterator[Event]:
        with self._open(study_id, last_id) as response, self._reaching():
            if response.status_code == 204:
                return
            data: list[str] = []
            for line in response.iter_lines():
                if line.startswith("data:"):
                    data.append(line[5:].removeprefix(" "))
                elif not line and data:
                    yield Event.model_validate_json("\n".join(data))
                    data = []

    @contextmanager
    def _open(self, study_id: str, last_id: int) -> Iterator[httpx.Response]:
        headers = {"Last-Event-ID": str(last_id)} if last_id else {}
        with self._reaching(), self._http.stream("GET", f"/studies/{study_id}/events", headers=headers) as response:
            if response.status_code >= 400:
                response.read()
            _check(response)
            yield response

    def _items(self, path: str, filters: dict[str, str]) -> Iterator[dict[str, Any]]:
        cursor: str | None = None
        while True:
            page = self._json("GET", path, params={**filters, "limit": 200, **({"cursor": cursor} if cursor else {})})
            yield from page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def _json(self, method: str, path: str, **arguments: Any) -> Any:
        response = self._send(method, path, **arguments)
        try:
            return response.json()
        except ValueError:
            raise UnreachableError(f"{self._server} answers, but not as this service: is the URL right?") from None

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        with self._reaching():
            response = self._http.request(method, path, **arguments)
        _check(response)
        return response

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UnreachableError(f"cannot reach {self._server} ({str(error) or type(error).__name__}): is `autotune "
                                   "serve` running there? Set --server or AUTOTUNE_SERVER") from error


def _check(response: httpx.Response) -> None:
    if response.status_code == 401:
        raise UnauthorizedError("the service does not accept the token: give --token or AUTOTUNE_TOKEN; it was printed "
                                "when the service first started, and `autotune token` makes a new one")
    if response.status_code >= 400:
        try:
            problem = response.json()
        except ValueError:
            problem = {}
        raise RefusedError(response.status_code, problem if isinstance(problem, dict) else {})
