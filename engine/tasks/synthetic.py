"""Synthetic samples that depend on nothing but (seed, sample index, position): a counter-based random generator.

A hash of the counter instead of a stateful generator makes any set of samples in a few vectorised operations, equal
on every machine and whatever the order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def random_bits(seed: int, indices: Sequence[int], count: int, *, stream: int = 0) -> Tensor:
    """Independent random integers for each sample, by splitmix64 (Steele et al., OOPSLA 2014).

    Args:
        seed: of the whole data set.
        indices: global indices of the samples, N of them.
        count: numbers per sample.
        stream: numbers of different streams are independent.

    Returns:
        (N, count) int64, uniform in [0, 2**62).
    """
    rows = _mix(torch.as_tensor(list(indices), dtype=torch.int64) * _GOLDEN + _mix_one(seed * 2_654_435_761 + stream))
    columns = torch.arange(1, count + 1, dtype=torch.int64) * _GOLDEN
    return _shift_right(_mix(rows[:, None] + columns[None, :]), 2)


def random_uniform(seed: int, indices: Sequence[int], count: int, *, stream: int = 0) -> Tensor:
    """(N, count) fp32, uniform in [0, 1)."""
    return (random_bits(seed, indices, count, stream=stream) >> 38).to(torch.float32) * 2.0**-24


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return torch.bitwise_xor(state, _shift_right(state, 31))


def _mix_one(value: int) -> Tensor:
    return _mix(torch.tensor(((value + 2**63) % 2**64) - 2**63, dtype=torch.int64))


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return torch.bitwise_and(state >> bits, 2 ** (64 - bits) - 1)
