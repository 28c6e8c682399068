from collections.abc import Callable, Iterator

import pytest

from tests.support.ranks import RankPool, Ranks


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(rank_pool: RankPool) -> Callable[[int], Ranks]:
    """`ranks(2).run(function, *arguments)` runs a module-level function on 2 gloo ranks."""
    return lambda world_size: Ranks(rank_pool, world_size)
