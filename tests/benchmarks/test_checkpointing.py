"""Bytes counted of blocks, and what is made of times."""

import pytest

from benchmarks.checkpointing import inputs_bytes, kept_bytes, rows_of
from benchmarks.turns import Seconds

MIB = 2**20


def test_inputs_of_the_blocks() -> None:
    assert inputs_bytes() == 6 * MIB  # 6 blocks, 2 samples of 256 tokens, 512 wide: 1 MiB in fp32 each


def test_full_keeps_inputs_and_none_what_each_block_saves() -> None:
    assert kept_bytes("full", layers=2) == pytest.approx(2 * MIB, rel=0.01)
    one_block = kept_bytes("none", layers=1)
    assert kept_bytes("none", layers=2) == 2 * one_block
    assert one_block > 10 * MIB


def test_a_row_stands_beside_no_checkpointing() -> None:
    rounds = {"none": [Seconds(2.0, 1.0)], "selective": [Seconds(2.2, 1.1)], "full": [Seconds(3.0, 1.3)]}
    none, selective, full = rows_of(rounds, {"none": 4 * MIB, "selective": 3 * MIB, "full": 2 * MIB},
                                    {"none": 96 * MIB, "selective": 66 * MIB, "full": 8 * MIB}, 16 * MIB)
    assert (none["step / none"], none["CPU / none"], none["peak / none"], none["most MiB"]) == (1.0, 1.0, 1.0, None)
    assert selective["CPU / none"] == pytest.approx(1.1)
    assert (full["step / none"], full["CPU / none"], full["peak / none"]) == pytest.approx((1.5, 1.3, 0.5))
    assert (full["kept MiB"], full["most MiB"], full["inputs + one block MiB"]) == (8.0, 24.0, 22.0)
