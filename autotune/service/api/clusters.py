"""Clusters that can be planned for by name."""

from fastapi import APIRouter

from autotune.service.schemas import ClusterList
from autotune.service.state import QueriesDep

router = APIRouter(prefix="/clusters", tags=["hardware"])


@router.get("", summary="Clusters to plan for")
def list_clusters(queries: QueriesDep) -> ClusterList:
    """Described clusters whose names `hardware.cluster` takes in mode plan, each figure with its source. One of your
    own is given as an object of the same form."""
    return ClusterList(items=queries.clusters())
