from collections.abc import Callable, Iterator

import pytest

from tests.support.ranks import RankPool, Ranks

SAME_OVER_SOCKETS = (0, 2)
"""Stages of which tests with a parameter `stage` leave sockets out: messages go as at stage 1."""


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(params=["shared", "sockets"])
def transport(request: pytest.FixtureRequest) -> str:
    """How ranks reach each other; one test for one of the two: `over_sockets`, `over_shared_memory`."""
    kind: str = request.param
    return kind


@pytest.fixture
def ranks(rank_pool: RankPool, transport: str) -> Callable[[int], Ranks]:
    """`ranks(2).run(function, *arguments)` runs a module-level function on 2 gloo ranks."""
    return lambda world_size: Ranks(rank_pool, world_size, sockets=transport == "sockets")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _is_same_again(item)]


def _is_same_again(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    parameters, chosen = item.callspec.params, [mark.args[0] for mark in item.iter_markers("parametrize")]
    if parameters.get("transport") != "sockets" or "transport" in chosen:
        return False
    return parameters.get("world_size") == 1 or parameters.get("stage") in SAME_OVER_SOCKETS
