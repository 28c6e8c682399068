"""The web process as one application: the REST service and the dashboard.

``uvicorn --factory autotune.asgi:create`` serves it with settings from ``AUTOTUNE_...`` variables; ``autotune serve``
adds the scheduler, the token and a stop that open streams notice.
"""

from fastapi import FastAPI

import web
from autotune.service.app import create_app
from autotune.settings import Settings, load_settings
from autotune.store import Database


def compose(database: Database, settings: Settings) -> FastAPI:
    """Service and dashboard over a database that is at head."""
    app = create_app(database, settings)
    web.mount(app)
    return app


def create() -> FastAPI:
    """The application from the environment; brings the database to head first."""
    settings = load_settings()
    database = Database(settings.database_url)
    database.upgrade()
    app = compose(database, settings)
    app.state.services.auth.ensure_token()
    return app
