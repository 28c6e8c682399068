"""The dashboard: server-rendered pages over the service, for a browser that need not reach the internet."""

from collections.abc import Callable
from datetime import UTC, datetime

from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware

from web.assets import Assets
from web.rendering import Pages
from web.routes import Dashboard, error_page
from web.routes import router as pages_router
from web.submit import router as submit_router


def mount(app: FastAPI, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
    """Put the dashboard beside the REST service, under ``/``.

    Args:
        app: as `autotune.service.app.create_app` made it: its `state.services` is what the pages work with.
        clock: tells the time, aware.
    """
    app.state.dashboard = Dashboard(pages=Pages(), clock=clock)
    app.state.html_error = error_page
    app.include_router(submit_router)  # first: /studies/new is no study's id
    app.include_router(pages_router)
    app.mount("/static", GZipMiddleware(Assets(), minimum_size=1024))
