"""Buckets and all-gather batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine.buckets import ALIGNMENT, SMALLEST_CUT, Bucket, ManagedParameter, gather_batches, lay_out


def managed(sizes: list[int], *, dtype: torch.dtype = torch.float32, frozen: bool = False) -> list[ManagedParameter]:
    return [ManagedParameter(index, f"p{index}", nn.Parameter(torch.full((size,), float(index + 1)),
                                                              requires_grad=not frozen), dtype)
            for index, size in enumerate(sizes)]


sizes_lists = st.lists(st.integers(0, 200), min_size=1, max_size=12)


@given(sizes=sizes_lists, limit=st.integers(1, 500), world_size=st.integers(1, 5))
def test_every_element_is_owned_by_exactly_one_rank(sizes: list[int], limit: int, world_size: int) -> None:
    buckets = lay_out(managed(sizes), bucket_size=limit, world_size=world_size)
    owned: dict[int, list[int]] = {index: [] for index in range(len(sizes))}
    for bucket in buckets:
        assert bucket.size % (world_size * ALIGNMENT) == 0
        for rank in range(world_size):
            shard = bucket.shard(rank)
            for run in bucket.runs(shard.start, shard.stop):
                assert run.start % ALIGNMENT == 0
                owned[run.managed.index] += range(run.start, run.stop)
    assert {index: sorted(elements) for index, elements in owned.items()} == {
        index: list(range(size)) for index, size in enumerate(sizes)}


@given(sizes=sizes_lists, limit=st.integers(1, 500))
def test_buckets_keep_the_order_and_the_limit(sizes: list[int], limit: int) -> None:
    buckets = lay_out(managed(sizes), bucket_size=limit, world_size=2)
    assert [slot.managed.index for bucket in buckets for slot in bucket.slots] == list(range(len(sizes)))
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert len(bucket.slots) == 1 or sum(slot.numel for slot in bucket.slots) <= limit


@given(sizes=sizes_lists)
def test_filled_buckets_hold_the_values_and_zeros_between(sizes: list[int]) -> None:
    for bucket in lay_out(managed(sizes), bucket_size=300, world_size=3):
        flat = torch.full((bucket.size,), float("nan"))
        bucket.fill(flat)
        for slot in bucket.slots:
            assert (slot.view(flat) == slot.managed.index + 1).all()
        assert float(flat.sum()) == sum(slot.numel * (slot.managed.index + 1) for slot in bucket.slots)
        bucket.bind(flat)
        flat.zero_()
        assert all(float(slot.managed.parameter.detach().sum()) == 0 for slot in bucket.slots)


def test_dtypes_and_frozen_parameters_do_not_mix() -> None:
    mixed = [managed([8])[0], managed([8], dtype=torch.bfloat16)[0], managed([8], frozen=True)[0], managed([9])[0]]
    buckets = lay_out(mixed, bucket_size=100, world_size=1)
    assert [(bucket.dtype, bucket.trainable, len(bucket.slots)) for bucket in buckets] == [
        (torch.float32, True, 2), (torch.bfloat16, True, 1), (torch.float32, False, 1)]


def covered(buckets: list[Bucket], limit: int) -> list[list[tuple[int, int, int]]]:
    return [[(bucket.index, start, stop) for bucket, start, stop in batch.pieces]
            for batch in gather_batches(buckets, limit=limit)]


@given(sizes=st.lists(st.integers(1, 30_000), min_size=1, max_size=6), limit=st.integers(1, 50_000),
       world_size=st.integers(1, 4))
def test_gather_batches_cover_every_shard_once_in_order(sizes: list[int], limit: int, world_size: int) -> None:
    buckets = lay_out(managed(sizes), bucket_size=1, world_size=world_size)
    pieces = [piece for batch in covered(buckets, limit) for piece in batch]
    assert [index for index, _, _ in pieces] == sorted(index for index, _, _ in pieces)
    for bucket in buckets:
        columns = [column for index, start, stop in pieces if index == bucket.index for column in range(start, stop)]
        assert columns == list(range(bucket.shard_size))
    for batch in covered(buckets, limit):
        elements = sum(stop - start for _, start, stop in batch) * world_size
        assert elements <= max(limit, SMALLEST_CUT) or (len(batch) == 1 and elements == buckets[batch[0][0]].size)


@pytest.mark.parametrize(("limit", "batches"), [(10**6, 1), (3000, 2), (64, 4)])
def test_small_buckets_share_a_gather_up_to_the_limit(limit: int, batches: int) -> None:
    buckets = lay_out(managed([1000, 1000, 1000, 1000]), bucket_size=1, world_size=2)
    assert len(covered(buckets, limit)) == batches
