"""Who gets in, and which requests are refused whoever sends them."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from autotune.service import auth as auth_module
from autotune.service.auth import SESSION_COOKIE, Auth, hash_secret, set_session_cookie
from autotune.settings import Settings
from autotune.store import Database
from tests.service.conftest import BASE_URL, TOKEN
from tests.service.stories import queued
from tests.support.samples import FakeClock

PROTECTED = ["/api/v1/studies", "/api/v1/models", "/api/v1/hardware", "/metrics", "/api/v1/openapi.json", "/",
             f"/api/v1/studies/{'0' * 32}/events", "/no/such/path"]


@pytest.mark.parametrize("path", PROTECTED)
def test_everything_but_health_needs_the_token(anonymous: TestClient, path: str) -> None:
    response = anonymous.get(path)
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert response.headers["content-type"] == "application/problem+json"
    assert TOKEN not in response.text


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_needs_none(anonymous: TestClient, path: str) -> None:
    assert anonymous.get(path).status_code == 200


def test_no_path_of_the_api_is_forgotten(app: FastAPI, anonymous: TestClient) -> None:
    for path, operations in app.openapi()["paths"].items():
        if path in ("/healthz", "/readyz"):
            continue
        for method in operations:
            assert anonymous.request(method, path).status_code == 401, (method, path)


@pytest.mark.parametrize("value", ["Bearer wrong", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "Bearer", "Bearer "])
def test_a_wrong_token_is_refused(anonymous: TestClient, value: str) -> None:
    assert anonymous.get("/api/v1/studies", headers={"Authorization": value}).status_code == 401


def test_the_scheme_is_not_case_sensitive(anonymous: TestClient) -> None:
    assert anonymous.get("/api/v1/studies", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200


def test_a_browser_is_sent_to_the_login_page_and_back(anonymous: TestClient) -> None:
    response = anonymous.get("/studies/x?a=1&b=2", headers={"Accept": "text/html"}, follow_redirects=False)
    assert response.status_code == 303
    assert response.headers["location"] == "/login?next=%2Fstudies%2Fx%3Fa%3D1%26b%3D2"


def test_a_token_is_made_once_and_kept_only_as_a_hash(
        database: Database, make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    first = Auth(database, make_settings(token=None))
    token = first.ensure_token()
    assert token is not None
    assert len(token) >= 43  # 32 bytes
    assert first.ensure_token() is None
    assert Auth(database, make_settings(token=None)).check_token(token)
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("autotune.sqlite3*"))
    assert token.encode() not in stored
    assert hash_secret(token).encode() in stored


def test_the_operators_own_token_replaces_the_one_made(
        database: Database, make_settings: Callable[..., Settings]) -> None:
    made = Auth(database, make_settings(token=None)).ensure_token()
    assert made is not None
    auth = Auth(database, make_settings(token="my-own-token-of-some-length"))
    assert auth.ensure_token() == "my-own-token-of-some-length"
    assert auth.check_token("my-own-token-of-some-length")
    assert not auth.check_token(made)


def test_a_session_opens_the_service_and_survives_a_restart(
        app: FastAPI, database: Database, make_settings: Callable[..., Settings], anonymous: TestClient) -> None:
    auth: Auth = app.state.services.auth
    session = auth.log_in(TOKEN)
    assert session is not None
    anonymous.cookies.set(SESSION_COOKIE, session)
    assert anonymous.get("/api/v1/studies").status_code == 200
    assert Auth(database, make_settings()).check_session(session)


def test_a_session_needs_the_right_token(app: FastAPI) -> None:
    assert app.state.services.auth.log_in("wrong") is None


def test_the_cookie_holds_neither_the_token_nor_what_is_stored(app: FastAPI, tmp_path: Path) -> None:
    session = app.state.services.auth.log_in(TOKEN)
    assert TOKEN not in session
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("autotune.sqlite3*"))
    assert session.encode() not in stored


def test_a_new_token_ends_the_old_one_and_all_sessions(app: FastAPI) -> None:
    auth: Auth = app.state.services.auth
    session = auth.log_in(TOKEN)
    assert session is not None
    token = auth.new_token()
    assert not auth.check_token(TOKEN)
    assert not auth.check_session(session)
    assert auth.check_token(token)


def test_changing_the_operators_token_ends_sessions_too(
        app: FastAPI, database: Database, make_settings: Callable[..., Settings]) -> None:
    session = app.state.services.auth.log_in(TOKEN)
    changed = Auth(database, make_settings(token="another-token-of-some-length"))
    changed.ensure_token()
    assert not changed.check_session(session)


def test_logging_out_ends_one_session(app: FastAPI) -> None:
    auth: Auth = app.state.services.auth
    first, second = auth.log_in(TOKEN), auth.log_in(TOKEN)
    assert first is not None
    assert second is not None
    auth.log_out(first)
    assert not auth.check_session(first)
    assert auth.check_session(second)


def test_sessions_expire(tmp_path: Path, make_settings: Callable[..., Settings]) -> None:
    clock = FakeClock()
    database = Database(f"sqlite:///{tmp_path}/other.sqlite3", clock=clock)
    database.upgrade()
    auth = Auth(database, make_settings())
    auth.ensure_token()
    session = auth.log_in(TOKEN)
    assert session is not None
    clock.now += auth_module.SESSION_LIFETIME - timedelta(seconds=1)
    assert auth.check_session(session)
    clock.advance(2)
    assert not auth.check_session(session)
    database.close()


@pytest.mark.parametrize(("scheme", "secure"), [("http", False), ("https", True)])
def test_the_cookie_is_out_of_reach_for_scripts_and_other_sites(scheme: str, secure: bool) -> None:
    response = Response()
    request = Request({"type": "http", "scheme": scheme, "server": ("127.0.0.1", 80), "path": "/", "headers": []})
    set_session_cookie(response, "secret", request)
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/" in cookie
    assert ("secure;" in cookie or cookie.endswith("secure")) is secure


class TestRequestsThatChangeSomething:
    """With a session's cookie, a browser must say that the request comes from a page of this service."""

    @pytest.fixture
    def browser(self, app: FastAPI, anonymous: TestClient) -> TestClient:
        anonymous.cookies.set(SESSION_COOKIE, app.state.services.auth.log_in(TOKEN))
        return anonymous

    @pytest.mark.parametrize("headers", [
        {"Sec-Fetch-Site": "same-origin"}, {"Origin": BASE_URL}, {"Sec-Fetch-Site": "same-origin", "Origin": BASE_URL}])
    def test_of_this_service_are_let_through(
            self, browser: TestClient, database: Database, headers: dict[str, str]) -> None:
        response = browser.post(f"/api/v1/studies/{queued(database)}/cancel", headers=headers)
        assert response.status_code == 200

    @pytest.mark.parametrize("headers", [
        {}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "none"},
        {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:9999"},
        {"Sec-Fetch-Site": "cross-site", "Origin": BASE_URL}, {"Origin": "http://[::1"}])
    def test_of_other_sites_change_nothing(
            self, browser: TestClient, database: Database, headers: dict[str, str]) -> None:
        study_id = queued(database)
        response = browser.post(f"/api/v1/studies/{study_id}/cancel", headers=headers)
        assert response.status_code == 403
        with database.read() as transaction:
            assert transaction.studies.get(study_id).state == "queued"

    def test_with_the_token_need_no_origin(self, client: TestClient, database: Database) -> None:
        assert client.post(f"/api/v1/studies/{queued(database)}/cancel").status_code == 200

    def test_the_login_form_of_another_site_is_refused(self, anonymous: TestClient) -> None:
        response = anonymous.post("/login", data={"token": TOKEN}, headers={"Origin": "http://evil.example"})
        assert response.status_code == 403

    def test_a_wrong_token_is_not_saved_by_a_cookie(self, browser: TestClient) -> None:
        assert browser.get("/api/v1/studies", headers={"Authorization": "Bearer wrong"}).status_code == 401


class TestHost:
    """A foreign name in the Host header is refused: DNS rebinding makes a browser send one."""

    @pytest.mark.parametrize("host", [
        "evil.example", "evil.example:8420", "127.0.0.1.evil.example", "192.168.1.9:8420", "", "[::1", "[x]", "a]b"])
    def test_foreign_names_are_refused(self, client: TestClient, host: str) -> None:
        response = client.get("/api/v1/studies", headers={"Host": host})
        assert response.status_code == 421
        assert response.json()["type"] == "urn:autotune:problem:wrong-host"

    @pytest.mark.parametrize("host", ["127.0.0.1:8420", "localhost:8420", "LOCALHOST", "[::1]:8420", "127.0.0.1:9"])
    def test_loopback_names_are_answered(self, client: TestClient, host: str) -> None:
        assert client.get("/api/v1/studies", headers={"Host": host}).status_code == 200

    def test_health_answers_by_any_name(self, anonymous: TestClient) -> None:
        assert anonymous.get("/healthz", headers={"Host": "10.1.2.3:8420"}).status_code == 200

    def test_the_operator_adds_names(self, make_settings: Callable[..., Settings]) -> None:
        settings = make_settings(host="10.0.0.5", allowed_hosts="tuner.example, other")
        assert settings.answers_host("tuner.example")
        assert settings.answers_host("Other")
        assert settings.answers_host("10.0.0.5")
        assert not settings.answers_host("evil.example")
        assert make_settings(allowed_hosts="*").answers_host("evil.example")

    def test_on_a_wildcard_address_any_literal_address_is_answered_but_no_name(
            self, make_settings: Callable[..., Settings]) -> None:
        settings = make_settings(host="0.0.0.0")
        assert settings.answers_host("192.168.1.9")
        assert settings.answers_host("fe80::1")
        assert not settings.answers_host("evil.example")
        assert not make_settings(host="127.0.0.1").answers_host("192.168.1.9")


def test_every_answer_carries_security_headers(client: TestClient, anonymous: TestClient) -> None:
    for response in (client.get("/api/v1/studies"), anonymous.get("/healthz"), anonymous.get("/api/v1/studies"),
                     client.get("/api/v1/nothing"), client.get("/", headers={"Host": "evil.example"})):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-store"
        policy = response.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy


@pytest.mark.parametrize("host", ["127.0.0.1/static/?", "127.0.0.1/static/#", "127.0.0.1/login?"])
def test_the_host_header_makes_no_path_public(app: FastAPI, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    def as_older_releases_did(self: Request) -> URL:
        return URL(f"http://{self.headers['host']}{self.scope['path']}")

    monkeypatch.setattr(Request, "url", property(as_older_releases_did))
    with TestClient(app, base_url=BASE_URL) as client:
        assert client.get("/api/v1/studies", headers={"Host": host}).status_code == 401
