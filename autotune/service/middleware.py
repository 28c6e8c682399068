"""What every request passes, outermost first: counting, security headers, Host, size, authentication.

Plain ASGI: nothing here buffers a stream.
"""

import time
from collections.abc import Callable
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autotune.domain.errors import StoreUnavailableError
from autotune.service.auth import Auth
from autotune.service.problems import answer, make_problem, problem_response, unavailable_answer, wants_html

API_PREFIX = "/api/v1"
HEALTH_PATHS = ("/healthz", "/readyz")

CONTENT_SECURITY_POLICY = ("default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
                           "form-action 'self'; frame-ancestors 'none'")

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
}

Observer = Callable[[str, str, int, float], None]
"""Called with (method, route, status, seconds) after each request."""


class CountingMiddleware:
    """Tells an observer about every request, by route template: ids never become labels."""

    def __init__(self, app: ASGIApp, observe: Observer) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            self._observe(scope["method"], _route_template(scope), status, time.perf_counter() - started)


def _route_template(scope: Scope) -> str:
    """The path as it was declared: ``/api/v1/studies/{study_id}``, whatever the id."""
    template: str = getattr(scope.get("route"), "path", "unmatched")
    return f"{API_PREFIX}{template}" if scope["path"].startswith(API_PREFIX) and template != "unmatched" else template


class SecurityHeadersMiddleware:
    """Adds what a handler has not set itself; answers that are not files or streams are never cached."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if not scope["path"].startswith("/static/"):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, with_headers)


class HostMiddleware:
    """Refuses foreign Host headers, the tool of DNS rebinding. Health checks may come by any name."""

    def __init__(self, app: ASGIApp, auth: Auth) -> None:
        self._app = app
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in HEALTH_PATHS
        if guarded and not self._auth.answers_host(Request(scope)):
            response = problem_response(make_problem(
                421, "the Host header is no name of this service; the operator adds names with AUTOTUNE_ALLOWED_HOSTS"))
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """Refuses bodies over a size, announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = f"the body is larger than {self._max_bytes} bytes"
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced[:20]) > self._max_bytes:
            await problem_response(make_problem(413, too_large), {"Connection": "close"})(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, too_large)
            return message

        await self._app(scope, counted, send)


class AuthMiddleware:
    """Lets nobody in without the token or a session, but to public paths; and no other site's requests at all."""

    def __init__(self, app: ASGIApp, auth: Auth) -> None:
        self._app = app
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            refusal = await self._refusal(request)
        except StoreUnavailableError as error:  # handlers of errors are further inside
            refusal = unavailable_answer(request, error)
        await (refusal or self._app)(scope, receive, send)

    async def _refusal(self, request: Request) -> Response | None:
        if self._auth.is_public(request.scope["path"]) or await run_in_threadpool(self._auth.authenticate, request):
            if self._auth.is_same_origin(request):
                return None
            return answer(request, make_problem(
                403, "a request that changes something must carry the token, or come from a page of this service"))
        if request.method == "GET" and wants_html(request):
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(f"/login?next={quote(request.url.path + query, safe='')}", status_code=303)
        return problem_response(
            make_problem(401, "send the API token as `Authorization: Bearer TOKEN`; the server printed it at its first "
                         "start, `autotune token` makes a new one"), {"WWW-Authenticate": 'Bearer realm="autotune"'})
