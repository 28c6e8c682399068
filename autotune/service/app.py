"""The REST service as one application: handlers, problems, middleware."""

from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Security
from fastapi.security import HTTPBearer

from autotune.service.api import clusters, events, hardware, health, metrics, models, studies, trials
from autotune.service.auth import Auth
from autotune.service.commands import Commands
from autotune.service.middleware import (
    API_PREFIX,
    AuthMiddleware,
    BodyLimitMiddleware,
    CountingMiddleware,
    HostMiddleware,
    SecurityHeadersMiddleware,
)
from autotune.service.problems import Problem, install_handlers, responses
from autotune.service.queries import Queries
from autotune.service.state import Services
from autotune.settings import Settings
from autotune.store.database import Database

_bearer = HTTPBearer(auto_error=False, description="the API token, printed at the first start")


def create_app(database: Database, settings: Settings) -> FastAPI:
    """The application over a database that is at head.

    `app.state.services` holds queries, commands and authentication for whatever is mounted beside the API, and the
    event that ends open streams. No token is made here: see `Auth.ensure_token`.
    """
    app = FastAPI(
        title="Autotune", version=version("autotune"), openapi_url=f"{API_PREFIX}/openapi.json", docs_url=None,
        redoc_url=None, description="Finds the fastest configuration for training a PyTorch model on given hardware. "
        "Errors are RFC 9457 problem details; lists are paginated by cursor.")
    services = Services(settings=settings, queries=Queries(database), commands=Commands(database, settings),
                        auth=Auth(database, settings))
    app.state.services = services
    app.state.metrics = metrics.Metrics(services.queries)
    _add_routes(app)
    _document_problems(app)
    install_handlers(app)
    # the last added is the outermost
    app.add_middleware(AuthMiddleware, auth=services.auth)
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes)
    app.add_middleware(HostMiddleware, auth=services.auth)
    app.add_middleware(SecurityHeadersMiddleware)
    app.add_middleware(CountingMiddleware, observe=app.state.metrics.observe)
    return app


def _bearer_scheme(_: Annotated[Any, Security(_bearer)]) -> None:
    """Only for OpenAPI: the middleware has let the request in already."""


def _add_routes(app: FastAPI) -> None:
    api = APIRouter(prefix=API_PREFIX, dependencies=[Depends(_bearer_scheme)], responses=responses(401))
    for part in (studies, trials, events, models, hardware, clusters):
        api.include_router(part.router)
    app.include_router(api)
    app.include_router(health.router)
    app.include_router(metrics.router, dependencies=[Depends(_bearer_scheme)], responses=responses(401))


def _document_problems(app: FastAPI) -> None:
    """Put the problem's schema where the handlers' responses point, in place of FastAPI's own error schema."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        if "Problem" not in schemas:
            problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(problem.pop("$defs", {}))
            schemas["Problem"] = problem
            for operation in (operation for path in document["paths"].values() for operation in path.values()):
                if "422" in operation["responses"]:
                    operation["responses"] |= {str(status): body for status, body in responses(422).items()}
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
