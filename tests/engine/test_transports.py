"""Collectives over each transport against what they are to compute, and what becomes of the memory in between."""

import os
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine import shared_memory
from engine.collectives import Ranks
from engine.transports.pairwise import sum_in_order
from tests.engine.training import RanksOf, over_shared_memory

CPU = torch.device("cpu")
SLICE = 1000

counts = pytest.mark.parametrize("world_size", [2, 3, 4])
wires = pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])


def connected() -> Ranks:
    return Ranks(dist.group.WORLD, device=CPU)


def values(rank: int, size: int, wire: torch.dtype) -> Tensor:
    """What rank `rank` of `size` brings to a reduction."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size * SLICE, generator=generator).to(wire)


def expected(size: int, wire: torch.dtype) -> Tensor:
    return torch.stack([values(rank, size, wire).double() for rank in range(size)]).sum(0)


def filled(ranks: Ranks, wire: torch.dtype, room: int = 0) -> Tensor:
    return ranks.empty(ranks.size * SLICE, wire, room=room).copy_(values(ranks.rank, ranks.size, wire))


def _sums(wire: torch.dtype, rooms: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    ranks = connected()
    ranks.reserve(rooms)
    mine = ranks.reduce_scatter(filled(ranks, wire), dtype=torch.float32).wait()
    whole = ranks.all_reduce(filled(ranks, wire), dtype=torch.float32).wait()
    # More at once than there is room for, waited for in the order in which they were started.
    many = [ranks.reduce_scatter(filled(ranks, wire, room=number % 3).mul_(number), dtype=torch.float32)
            for number in range(1, 6)]
    sums = [pending.wait() for pending in many]
    ranks.close()
    return mine, whole, sums


@wires
@counts
@pytest.mark.parametrize("rooms", [(0, 0, 0), (1, 0, 1), (1, 1, 1)])
def test_sums_are_rounded_once(ranks: RanksOf, world_size: int, wire: torch.dtype, rooms: tuple[int, ...]) -> None:
    total = expected(world_size, wire)
    results = ranks(world_size).run(_sums, wire, [room * world_size * SLICE * wire.itemsize for room in rooms])
    for rank, (mine, whole, many) in enumerate(results):
        own = slice(rank * SLICE, (rank + 1) * SLICE)
        torch.testing.assert_close(mine.double(), total[own], atol=1e-6, rtol=1e-6)
        # Sums travel to the other ranks in the wire's dtype.
        torch.testing.assert_close(whole.double(), total.to(wire).double(), atol=1e-6, rtol=torch.finfo(wire).eps)
        for number, summed in enumerate(many, start=1):
            products = [(values(peer, world_size, wire) * number).double()[own] for peer in range(world_size)]
            torch.testing.assert_close(summed.double(), torch.stack(products).sum(0), atol=1e-5, rtol=1e-6)


def test_every_rank_gets_the_same_sum_in_every_bit(ranks: RanksOf) -> None:
    for wire in (torch.float32, torch.bfloat16):
        wholes = [whole for _, whole, _ in ranks(3).run(_sums, wire, (0, 0, 0))]
        assert all(torch.equal(whole, wholes[0]) for whole in wholes)


def _gathers(mirrored: bool) -> list[Tensor]:
    ranks = connected()
    size = ranks.size * SLICE * 4
    memory = ranks.mirrored([size, size]) if mirrored else [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    rows = [place.view(torch.float32).view(ranks.size, SLICE) for place in memory]
    for number, row in enumerate(rows):
        row[ranks.rank] = ranks.rank + number / 2
    ranks.all_gather([rows[0]]).wait()
    ranks.all_gather([rows[1][:, :300], rows[1][:, 300:]]).wait()
    answer = [row.clone() for row in rows]
    ranks.barrier()
    ranks.close()
    return answer


@counts
@pytest.mark.parametrize("mirrored", [True, False])
def test_gathers_complete_rows_wherever_they_lie(ranks: RanksOf, world_size: int, mirrored: bool) -> None:
    for first, second in ranks(world_size).run(_gathers, mirrored):
        for rank in range(world_size):
            assert bool((first[rank] == rank).all())
            assert bool((second[rank] == rank + 0.5).all())


def _many(count: int) -> tuple[float, float]:
    ranks = connected()
    row = ranks.mirrored([ranks.size * count * 4])[0].view(torch.float32).view(ranks.size, count)
    row[ranks.rank] = torch.arange(count) + 0.5 * ranks.rank
    for pending in [ranks.all_gather([row[:, place:place + 1]]) for place in range(count)]:
        pending.wait()
    ranks.finish_reading()
    ranks.close()
    return float(row.sum()), float(row[-1, -1])


def test_more_messages_may_be_under_way_than_a_box_holds_notes(ranks: RanksOf) -> None:
    count = 3000
    for total, last in ranks(2).run(_many, count):
        assert total == pytest.approx(count * (count - 1) + count / 2)
        assert last == count - 0.5


def _reused() -> tuple[bool, bool, bool, float]:
    ranks = connected()
    ranks.reserve([ranks.size * SLICE * 4] * 2)
    first = filled(ranks, torch.float32)
    taken = ranks.is_room(first) and not ranks.is_room(filled(ranks, torch.float32))
    other = filled(ranks, torch.float32, room=1)
    ranks.discard(other)
    discarded = ranks.is_room(other) and ranks.is_room(filled(ranks, torch.float32, room=1))
    for number in range(20):  # free again as the others have read
        ranks.reduce_scatter(first, dtype=torch.float32).wait()
        ranks.barrier()
        first = filled(ranks, torch.float32).mul_(number)
        assert ranks.is_room(first)
    ranks.barrier()
    before = float(first.abs().sum())
    ranks.trim()
    trimmed = before > 0 and float(first.abs().sum()) == 0
    ranks.barrier()
    kept = ranks.all_reduce(first.copy_(values(ranks.rank, ranks.size, torch.float32)), dtype=torch.float32).wait()
    ranks.barrier()
    assert kept.data_ptr() == first.data_ptr()
    assert not ranks.is_room(filled(ranks, torch.float32)), "the sum is still there"
    summed = float(kept.double().sum())
    ranks.discard(kept)
    assert ranks.is_room(filled(ranks, torch.float32))
    ranks.barrier()
    ranks.close()
    return taken, discarded, trimmed, summed


@over_shared_memory
def test_rooms_for_messages_are_used_again(ranks: RanksOf) -> None:
    total = float(expected(2, torch.float32).sum())
    for taken, discarded, trimmed, summed in ranks(2).run(_reused):
        assert taken
        assert discarded
        assert trimmed
        assert summed == pytest.approx(total, abs=1e-2)


def _reserved_again() -> tuple[int, int, bool, list[float]]:
    ranks = connected()
    size = ranks.size * SLICE * 4
    ranks.reserve([size, size])
    small = ranks.shared_bytes
    for room in range(2):
        ranks.reduce_scatter(filled(ranks, torch.float32, room=room), dtype=torch.float32).wait()
    held = ranks.all_reduce(filled(ranks, torch.float32), dtype=torch.float32).wait()
    ranks.reserve([2 * size, size])
    larger = ranks.empty(2 * ranks.size * SLICE, torch.float32, room=0)
    in_room = ranks.is_room(larger)
    larger[:] = ranks.rank + 1
    ranks.reduce_scatter(larger, dtype=torch.float32).wait()
    again_too_early = ranks.is_room(ranks.empty(2 * ranks.size * SLICE, torch.float32, room=0))
    ranks.barrier()
    again = ranks.is_room(ranks.empty(2 * ranks.size * SLICE, torch.float32, room=0)) or again_too_early
    answer = small, ranks.shared_bytes, in_room and again, held.tolist()
    ranks.barrier()
    ranks.close()
    return answer


@over_shared_memory
def test_rooms_may_be_made_anew(ranks: RanksOf) -> None:
    total = expected(2, torch.float32).float()
    for small, large, in_room, held in ranks(2).run(_reserved_again):
        assert in_room
        assert large - small == 2 * SLICE * 4
        torch.testing.assert_close(torch.tensor(held), total, atol=1e-6, rtol=1e-6)


def _common() -> tuple[list[float], int, int]:
    ranks = connected()
    place = ranks.common([ranks.size * 8])[0].view(torch.float64)
    place[ranks.rank] = ranks.rank + 1
    ranks.barrier()
    seen, held = place.tolist(), ranks.shared_bytes
    ranks.reserve([1 << 20])
    return seen, held, ranks.shared_bytes - held


@over_shared_memory
def test_common_memory_is_one_for_all(ranks: RanksOf) -> None:
    for seen, held, reserved in ranks(2).run(_common):
        assert seen == [1.0, 2.0]
        assert held == 64 // 2
        assert (1 << 20) <= reserved < (1 << 20) + 2**17


def _without(breakage: Callable[[], None]) -> tuple[bool, list[float]]:
    if dist.get_rank() == 1:
        breakage()
    ranks = connected()
    summed = ranks.reduce_scatter(filled(ranks, torch.float32), dtype=torch.float32).wait()
    return ranks.shares_memory, summed.tolist()


def _no_descriptors() -> None:
    """As in a container that may not look at the other ranks' processes."""
    shared_memory._map = _refused


def _no_anonymous_files() -> None:
    del os.memfd_create


def _refused(pid: int, descriptor: int, size: int) -> shared_memory.Segment:
    raise PermissionError("not yours")


@over_shared_memory
@pytest.mark.parametrize("breakage", [_no_descriptors, _no_anonymous_files])
def test_where_one_rank_cannot_share_all_use_sockets(ranks: RanksOf, breakage: Callable[[], None]) -> None:
    pool = ranks(2)
    try:
        results = pool.run(_without, breakage)
    finally:
        pool.restart()
    total = expected(2, torch.float32)
    for rank, (shares, summed) in enumerate(results):
        assert not shares
        torch.testing.assert_close(torch.tensor(summed), total[rank * SLICE:(rank + 1) * SLICE].float())


def test_a_sum_may_be_put_where_a_part_lies() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        parts = [values(rank, 200, dtype) for rank in range(3)]
        total = torch.stack([part.double() for part in parts]).sum(0).to(dtype)
        assert sum_in_order(parts, parts[1]) is parts[1]
        torch.testing.assert_close(parts[1], total, atol=1e-6, rtol=torch.finfo(dtype).eps)
