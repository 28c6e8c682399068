"""Who may do what: one API token, browser sessions, and the checks that keep other web pages out.

- The token is 32 random bytes (or `AUTOTUNE_TOKEN`); only its SHA-256 is stored. That is enough for a random token:
  there is nothing to guess. API clients send it as ``Authorization: Bearer``.
- A browser exchanges it once, at ``/login``, for a session: another random value in a cookie (HttpOnly,
  SameSite=Strict), stored hashed too, bound to the token: a new token ends all sessions. Sessions survive restarts.
- A request that changes something and does not carry the token itself must come from a page of this service
  (``Sec-Fetch-Site``, else ``Origin``); foreign Host headers are refused, which stops DNS rebinding.
- Everything needs the token or a session, unless its path is listed as public.
"""

import hashlib
import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from autotune.store.database import Database

if TYPE_CHECKING:
    from autotune.settings import Settings

SESSION_COOKIE = "autotune_session"
SESSION_LIFETIME = timedelta(days=30)
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SHORT_TOKEN = 16
"""A token of the operator's own with fewer characters than this is warned about."""


def hash_secret(secret: str) -> str:
    """SHA-256, hex. For random secrets only: a password would need a slow hash."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class Auth:
    """Checks tokens and sessions against the store.

    Args:
        public_paths: paths that need neither token nor session.
        public_prefixes: the same for everything below, such as ``/static/``.
    """

    def __init__(self, database: Database, settings: "Settings", *,
                 public_paths: frozenset[str] = frozenset({"/healthz", "/readyz", "/login"}),
                 public_prefixes: tuple[str, ...] = ("/static/",)) -> None:
        self._database = database
        self._settings = settings
        self.public_paths = public_paths
        self.public_prefixes = public_prefixes

    # tokens

    def ensure_token(self) -> str | None:
        """Make sure that there is a token; called once at start-up.

        Returns:
            The token where it is known: `AUTOTUNE_TOKEN`, or one made now. None when one was made before: it is
            stored only as a hash and cannot be shown again.
        """
        given = self._settings.token
        with self._database.begin() as transaction:
            if given is not None:
                token = given.get_secret_value()
                if not transaction.tokens.verify(hash_secret(token)):
                    transaction.tokens.replace(hash_secret(token))
                return token
            token = secrets.token_urlsafe(32)
            return token if transaction.tokens.add_first(hash_secret(token)) else None

    def new_token(self) -> str:
        """Replace the token. The old one and all sessions end at once."""
        token = secrets.token_urlsafe(32)
        with self._database.begin() as transaction:
            transaction.tokens.replace(hash_secret(token))
            transaction.sessions.clear()
        return token

    def check_token(self, token: str) -> bool:
        """Whether this is the token."""
        with self._database.read() as transaction:
            return transaction.tokens.verify(hash_secret(token))

    # sessions

    def log_in(self, token: str) -> str | None:
        """A new session's secret for the cookie, or None when the token is wrong."""
        session = secrets.token_urlsafe(32)
        with self._database.begin() as transaction:
            if not transaction.tokens.verify(hash_secret(token)):
                return None
            transaction.sessions.add(hash_secret(session), token_hash=hash_secret(token), lifetime=SESSION_LIFETIME)
        return session

    def check_session(self, session: str) -> bool:
        """Whether this session lives and the token it was opened with is still the one."""
        with self._database.read() as transaction:
            token_hash = transaction.sessions.token_hash(hash_secret(session))
            return token_hash is not None and transaction.tokens.verify(token_hash)

    def log_out(self, session: str) -> None:
        """End a session; an unknown one is no error."""
        with self._database.begin() as transaction:
            transaction.sessions.remove(hash_secret(session))

    # requests

    def is_public(self, path: str) -> bool:
        """Whether the path, as in the request's scope, needs neither token nor session.

        `Request.url` will not do: it is put together with the Host header, which older releases of Starlette took as
        it came, so that a header such as ``127.0.0.1/static/?`` made every path a public one.
        """
        return path in self.public_paths or path.startswith(self.public_prefixes)

    def authenticate(self, request: Request) -> bool:
        """Whether a request carries the token or a living session. A wrong bearer token is not saved by a cookie."""
        bearer = bearer_token(request.headers)
        if bearer is not None:
            return self.check_token(bearer)
        session = request.cookies.get(SESSION_COOKIE)
        return session is not None and self.check_session(session)

    def is_same_origin(self, request: Request) -> bool:
        """Whether a request that changes something may come from where it came.

        With the token in its header it may: no web page can add that. Otherwise the browser must say that a page of
        this service sent it.
        """
        if request.method in SAFE_METHODS or bearer_token(request.headers) is not None:
            return True
        site = request.headers.get("sec-fetch-site")
        if site is not None:
            return site == "same-origin"
        origin = request.headers.get("origin")
        return origin is not None and _split(origin)[0] == request.headers.get("host")

    def answers_host(self, request: Request) -> bool:
        """Whether the Host header names this service."""
        host = _split(f"//{request.headers.get('host', '')}")[1]
        return host is not None and self._settings.answers_host(host)


def _split(url: str) -> tuple[str | None, str | None]:
    """(host and port, host) of a URL; twice None for what is no URL, such as ``//[::1``."""
    try:
        parts = urlsplit(url)
        return parts.netloc, parts.hostname
    except ValueError:
        return None, None


def bearer_token(headers: Mapping[str, str]) -> str | None:
    """The token of ``Authorization: Bearer``; None without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def set_session_cookie(response: Response, session: str, request: Request) -> None:
    """Give the browser its session: unreadable for scripts, never sent from other sites, https-only under https."""
    response.set_cookie(SESSION_COOKIE, session, max_age=int(SESSION_LIFETIME.total_seconds()), path="/", httponly=True,
                        samesite="strict", secure=request.url.scheme == "https")


def clear_session_cookie(response: Response) -> None:
    response.delete_cookie(SESSION_COOKIE, path="/", httponly=True, samesite="strict")


