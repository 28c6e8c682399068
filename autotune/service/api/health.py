"""Whether the process lives and can work; no token needed, nothing told."""

from fastapi import APIRouter

from autotune.service.problems import responses
from autotune.service.schemas import Health
from autotune.service.state import QueriesDep

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Does the process live?")
def healthz() -> Health:
    """Answers as long as the process can answer at all."""
    return Health(status="ok")


@router.get("/readyz", summary="Can it work?", responses=responses(503))
def readyz(queries: QueriesDep) -> Health:
    """Whether the database answers and has the schema of this version; 503 otherwise."""
    queries.check()
    return Health(status="ready")
