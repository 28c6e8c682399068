"""Models seen, and the best stored configuration of each."""

from typing import Annotated

from fastapi import APIRouter, Path

from autotune.service.api.parameters import Cursor, Limit
from autotune.service.cursors import page_of
from autotune.service.problems import responses
from autotune.service.schemas import BestList, ModelList
from autotune.service.state import QueriesDep

router = APIRouter(prefix="/models", tags=["models"])


@router.get("", summary="Models seen", responses=responses(422))
def list_models(queries: QueriesDep, cursor: Cursor = None, limit: Limit = 50) -> ModelList:
    """Every model that was submitted or has a stored best configuration, by name."""
    page = page_of(queries.models(), key=lambda model: model.name, cursor=cursor, limit=limit)
    return ModelList(items=page.items, next_cursor=page.next_cursor)


@router.get("/{name:path}/best", summary="Best stored configurations of a model", responses=responses(404, 422))
def best_for_model(name: Annotated[str, Path(max_length=120, pattern=r"^[^\x00-\x1f\x7f]*$",
                                             description="the name that its studies were submitted under")],
                   queries: QueriesDep) -> BestList:
    """The fastest configuration per model, training set-up and hardware; stays when its study is deleted."""
    return BestList(items=queries.best_for_model(name))
