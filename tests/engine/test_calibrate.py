"""Calibration: plausible numbers, quickly, and a fingerprint that follows what matters."""

import time

import pytest
import torch
import torch.distributed as dist

from engine.calibrate import (
    _collectives,
    _cost,
    _joined,
    _longer,
    _Sample,
    calibrate,
    can_train,
    hardware_fingerprint,
    matmul_flops_per_second,
    operator_scale,
)
from engine.process import host_memory_bytes
from engine.ranks import RankContext
from tests.engine.training import RanksOf
from tests.support.samples import sample_hardware_profile

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_one_rank_is_calibrated_within_ten_seconds() -> None:
    begun = time.perf_counter()
    profile = calibrate(RankContext(rank=0, world_size=1, device=CPU, host_devices=2))
    assert time.perf_counter() - begun < 10
    assert profile.device_type == "cpu"
    assert {"fp32", "bf16"} <= set(profile.precisions)
    assert set(profile.matmul_flops_per_second) == set(profile.precisions)
    assert 1e8 < profile.matmul_flops_per_second["fp32"] < 1e13
    assert 1e8 < profile.copy_bytes_per_second < 1e12
    assert (profile.allreduce_bytes_per_second, profile.allreduce_latency_seconds) == (None, None)
    assert profile.memory_bytes == profile.host_memory_bytes // 2
    assert profile.host_devices == 2
    assert (profile.host_bytes_per_second, profile.host_update_bytes_per_second) == (None, None)
    assert profile.host_memory_bytes < host_memory_bytes()
    assert profile.software["torch"] == torch.__version__
    assert 1e-8 < (profile.launch_seconds or 0) < 1e-4
    assert 1e8 < (profile.update_bytes_per_second or 0) < 1e12
    assert (profile.reduce_scatter, profile.all_reduce, profile.all_gather) == ({}, {}, None)
    costs = profile.operators["fp32"]
    # A cost is a median, where other work counts, and the rate the best that was reached.
    assert 0.4 < costs["product"].seconds_per_flop * profile.matmul_flops_per_second["fp32"] < 10
    assert 1e-12 < costs["other"].seconds_per_byte < 1e-8


@pytest.mark.parametrize(("disturbed", "contended", "times"), [
    ([False], False, 1), ([True, False], False, 2), ([True, True], True, 2)])
def test_a_disturbed_calibration_is_repeated_once(
    monkeypatch: pytest.MonkeyPatch, disturbed: list[bool], contended: bool, times: int,
) -> None:
    measured = []
    monkeypatch.setattr("engine.calibrate._measured", lambda context: measured.append(1) or sample_hardware_profile())
    monkeypatch.setattr("engine.calibrate.is_contended", lambda before, after: disturbed[len(measured) - 1])
    profile = calibrate(RankContext(rank=0, world_size=1, device=CPU, core=0))
    assert (profile.contended, len(measured)) == (contended, times)


def test_operators_on_accelerators_are_as_large_as_their_time_allows() -> None:
    """From 1 TFLOP/s to 1 PFLOP/s the largest takes about as long, and never more than a tenth of a second."""
    rates = (1e10, 1e12, 8e12, 5e13, 1e15)
    assert [operator_scale("cuda", rate) for rate in rates] == [1, 2, 4, 4, 8]
    assert all(6.5e9 * operator_scale("cuda", rate)**3 / rate < 0.1 for rate in rates[1:])
    assert operator_scale("cpu", 1e15) == 1


def _joined_name() -> str:
    size = dist.get_world_size()
    context = RankContext(rank=dist.get_rank(), world_size=size, device=CPU, control=dist.group.WORLD)
    return _joined(context, "one" if context.rank else "another")


def test_all_ranks_name_the_devices_alike(ranks: RanksOf) -> None:
    assert ranks(2).run(_joined_name) == ["another, one"] * 2
    assert ranks(3).run(_joined_name) == ["another, one"] * 3


def test_costs_are_the_line_through_the_samples() -> None:
    samples = [_Sample(flops, moved, 3e-9 * flops + 2e-10 * moved)
               for flops, moved in ((1e6, 1e6), (1e6, 1e8), (1e8, 1e6))]
    cost = _cost(samples)
    assert (cost.seconds_per_flop, cost.seconds_per_byte) == (pytest.approx(3e-9), pytest.approx(2e-10))


@pytest.mark.parametrize(("samples", "expected"), [
    ([_Sample(0.0, 1e6, 1e-3), _Sample(0.0, 2e6, 2e-3)], (0.0, 1e-9)),  # nothing but bytes
    ([_Sample(1e6, 1e6, 1e-3), _Sample(2e6, 1.5e6, 2e-3)], (1e-9, 0.0)),  # bytes explain nothing
    ([_Sample(1e6, 1e6, 1e-3), _Sample(3e6, 1e6, 1e-3)], (0.0, 1e-9)),  # operations explain nothing
])
def test_no_cost_is_negative(samples: list[_Sample], expected: tuple[float, float]) -> None:
    cost = _cost(samples)
    assert (cost.seconds_per_flop, cost.seconds_per_byte) == pytest.approx(expected)


def test_a_precision_that_does_not_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        raise NotImplementedError('"gelu" not implemented for Half')

    monkeypatch.setattr("torch.nn.functional.gelu", refuse)
    assert not can_train("fp16", CPU)


def test_gradients_that_are_not_finite_do_not_count_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.functional.gelu", lambda value: value * float("nan"))
    assert not can_train("fp32", CPU)


def test_the_rate_is_that_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 512
    left, right = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(30):
        begun = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - begun)
    by_hand = 2 * size**3 / best
    assert 0.4 * by_hand < matmul_flops_per_second("fp32", CPU) < 2.5 * by_hand


def test_the_fingerprint_follows_devices_count_and_software() -> None:
    def make(name: str = "x", world_size: int = 2, memory: int = 2**34, torch_version: str = "2.13", *,
             shares_memory: bool | None = None) -> str:
        return hardware_fingerprint("cpu", name, world_size, memory, {"torch": torch_version},
                                    shares_memory=shares_memory)

    assert make() == make(memory=2**34 + 10_000_000) == make(shares_memory=True)
    assert len({make(), make(name="y"), make(world_size=1), make(memory=2**35), make(torch_version="2.12"),
                make(shares_memory=False)}) == 6


def _collectives_of_a_rank() -> tuple[bool | None, list[float]]:
    context = RankContext(rank=dist.get_rank(), world_size=dist.get_world_size(), device=CPU, control=dist.group.WORLD)
    found = _collectives(context, ("fp32", "bf16"))
    assert found.all_gather is not None
    each = [*found.reduce_scatter.values(), *found.all_reduce.values(), found.all_gather]
    return found.shares_memory, [value for collective in each
                                 for value in (collective.latency_seconds, collective.bytes_per_second)]


def test_a_small_message_that_was_held_up_does_not_make_the_large_one_free() -> None:
    assert _longer(1.0, 0.1) == 0.9
    assert _longer(1.0, 0.99) == _longer(1.0, 2.0) == 0.25


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_are_measured_among_any_number_of_ranks(ranks: RanksOf, transport: str, size: int) -> None:
    """The same on all of them: 3 do not divide a power of two."""
    found = ranks(size).run(_collectives_of_a_rank)
    assert [shares_memory for shares_memory, _ in found] == [transport == "shared"] * size
    first, *others = (numbers for _, numbers in found)
    assert len(first) == 2 * 5
    assert all(0 <= latency < 0.1 for latency in first[::2])
    assert all(1e6 < rate < 1e13 for rate in first[1::2])
    assert all(other == first for other in others)
