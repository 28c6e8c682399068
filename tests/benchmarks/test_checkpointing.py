"""Bytes counted of blocks, and what is made of trials."""

import pytest

from benchmarks.checkpointing import CHOICES, inputs_bytes, kept_bytes, rows_of
from tests.support.samples import sample_measurement

MIB = 2**20


def test_inputs_of_the_blocks() -> None:
    assert inputs_bytes() == 6 * MIB  # 6 blocks, 2 samples of 256 tokens, 512 wide: 1 MiB in fp32 each


def test_full_keeps_inputs_and_none_what_each_block_saves() -> None:
    assert kept_bytes("full", layers=2) == pytest.approx(2 * MIB, rel=0.01)
    one_block = kept_bytes("none", layers=1)
    assert kept_bytes("none", layers=2) == 2 * one_block
    assert one_block > 10 * MIB


def test_ratios_are_taken_within_a_round() -> None:
    slow, fast = 2.0, 1.0  # the machine, in two rounds; full takes 1.5 times as long in both, and 1.25 in a third
    rounds = [{"none": sample_measurement(pace), "selective": sample_measurement(pace * 1.1),
               "full": sample_measurement(pace * factor, peak_device_bytes=400_000, contended=pace == slow)}
              for pace, factor in ((slow, 1.5), (fast, 1.5), (fast, 1.25))]
    none, selective, full = rows_of(rounds, dict.fromkeys(CHOICES, 8 * MIB), 16 * MIB)  # type: ignore[arg-type]
    assert (none["step / none"], none["peak / none"], none["most MiB"]) == (1.0, 1.0, None)
    assert selective["step / none"] == pytest.approx(1.1)
    assert full["step / none"] == pytest.approx(1.5)
    assert full["peak / none"] == pytest.approx(0.4)
    assert (full["most MiB"], full["inputs + one block MiB"]) == (24.0, 22.0)
    assert (none["undisturbed rounds"], full["undisturbed rounds"]) == (3, 2)
