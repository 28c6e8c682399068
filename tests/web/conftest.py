"""A store, the whole application over it, and a browser that reports every console error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import Browser, Page, sync_playwright

from autotune.asgi import compose
from autotune.settings import Settings
from autotune.store import Database
from tests.support.service import RunningService, running_service

TOKEN = "a-token-for-tests-only-0123456789"
CHROMIUM = "/usr/bin/chromium"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(f"sqlite:///{tmp_path}/autotune.db")
    made.upgrade()
    yield made
    made.close()


@pytest.fixture
def anonymous(database: Database, tmp_path: Path) -> Iterator[TestClient]:
    """A browser without a session, in-process; it asks for pages and says where a form came from."""
    app = compose(database, Settings(token=TOKEN, data_dir=tmp_path))  # type: ignore[arg-type]
    app.state.services.auth.ensure_token()
    with TestClient(app, base_url="http://127.0.0.1", follow_redirects=False,
                    headers={"Accept": "text/html", "Sec-Fetch-Site": "same-origin"}) as client:
        yield client


@pytest.fixture
def client(anonymous: TestClient) -> TestClient:
    """A browser that has logged in."""
    assert anonymous.post("/login", data={"token": TOKEN}).status_code == 303
    return anonymous


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM if Path(CHROMIUM).exists() else None, args=list(FLAGS))
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """The real service as a process, without a scheduler: tests tell their studies' stories through the store.

    One for all tests, as it takes seconds to start: a test looks only at studies of its own.
    """
    with running_service(tmp_path_factory.mktemp("service"), "--no-scheduler") as running:
        yield running


@pytest.fixture
def store(service: RunningService) -> Iterator[Database]:
    """The running service's database."""
    opened = Database(Settings(data_dir=service.data_dir).database_url)
    yield opened
    opened.close()


class Watched:
    """Collects what a page complains about: console errors and warnings, exceptions, failed requests."""

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        self.allowed: tuple[str, ...] = ()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text} ({message.location.get('url')})")

    def check(self) -> None:
        left = [complaint for complaint in self.complaints if not any(text in complaint for text in self.allowed)]
        assert left == []


@pytest.fixture
def page(browser: Browser, service: RunningService) -> Iterator[Page]:
    """A fresh window that has not logged in; the test fails if anything shows up on its console."""
    context = browser.new_context(base_url=service.url, viewport={"width": 1280, "height": 900})
    context.set_default_timeout(15_000)
    opened = context.new_page()
    watched = Watched(opened)
    opened.watched = watched  # type: ignore[attr-defined]
    yield opened
    context.close()
    watched.check()


@pytest.fixture
def logged_in(page: Page, service: RunningService) -> Page:
    page.goto(f"/login#token={service.token}")
    page.wait_for_url(f"{service.url}/")
    return page
