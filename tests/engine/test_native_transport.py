"""The backend's own collectives, which accelerators use, here gloo's: against what they are to compute."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.collectives import Ranks
from engine.transports.native import NativeTransport
from tests.engine.training import RanksOf, over_shared_memory

counts = pytest.mark.parametrize("world_size", [2, 3])


def _native() -> NativeTransport:
    assert dist.group.WORLD is not None
    return NativeTransport(dist.group.WORLD)


def _sums() -> tuple[Tensor, Tensor, Tensor]:
    transport, rank, size = _native(), dist.get_rank(), dist.get_world_size()
    full = torch.arange(2 * size, dtype=torch.float32) + 10 * rank
    scattered = transport.reduce_scatter(full.clone(), dtype=torch.float64).wait()
    whole = transport.all_reduce(full.to(torch.bfloat16), dtype=torch.float32).wait()
    small = torch.tensor([float(rank), 1.0])
    transport.sum_small(small)
    return scattered, whole, small


@over_shared_memory
@counts
def test_sums_are_over_all_ranks_and_come_in_the_dtype_asked_for(ranks: RanksOf, world_size: int) -> None:
    others = sum(range(world_size))
    total = torch.arange(2.0 * world_size) * world_size + 10 * others
    for rank, (scattered, whole, small) in enumerate(ranks(world_size).run(_sums)):
        assert scattered.tolist() == total[2 * rank:2 * rank + 2].tolist()
        assert scattered.dtype == torch.float64
        assert whole.tolist() == total.tolist()
        assert whole.dtype == torch.float32
        assert small.tolist() == [others, world_size]


def _gathers() -> list[Tensor]:
    transport, rank, size = _native(), dist.get_rank(), dist.get_world_size()
    memory = torch.full((size, 6), -1.0)
    whole, (left, right) = torch.full((size, 3), -1.0), memory.split([2, 4], dim=1)
    for row in (whole, left, right):
        row[rank] = 10 * rank + torch.arange(row.shape[1])
    transport.all_gather([whole]).wait()
    transport.all_gather([left, right]).wait()
    part = memory.new_full((size, 6), -1.0)[:, 1:3]
    part[rank] = rank
    pending = transport.all_gather([part])
    pending.wait()
    pending.wait()
    return [whole, memory, part]


@over_shared_memory
@counts
def test_gathers_complete_rows_wherever_they_lie(ranks: RanksOf, world_size: int) -> None:
    for whole, memory, part in ranks(world_size).run(_gathers):
        for rank in range(world_size):
            assert whole[rank].tolist() == [10 * rank + place for place in range(3)]
            assert memory[rank].tolist() == [10 * rank + place for place in (0, 1, 0, 1, 2, 3)]
            assert part[rank].tolist() == [rank, rank]


def _on_a_device() -> tuple[list[float], dict[str, int], int, bool]:
    """Tensors are on the CPU all the same: what is sent is the backend's affair."""
    ranks = Ranks(dist.group.WORLD, device=torch.device("meta"))
    total = ranks.all_reduce(torch.ones(4), dtype=torch.float32).wait()
    answer = total.tolist(), dict(ranks.counts), ranks.sent_bytes, ranks.shares_memory
    ranks.close()
    return answer


@over_shared_memory
def test_ranks_on_accelerators_use_it(ranks: RanksOf) -> None:
    """16 bytes, of which a ring of two sends half twice."""
    assert ranks(2).run(_on_a_device) == [([2.0] * 4, {"all_reduce": 1}, 16, False)] * 2
