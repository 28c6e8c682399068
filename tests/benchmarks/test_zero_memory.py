"""The table that held bytes are compared with."""

import pytest

from benchmarks.zero_memory import States, allowed, over, theory

BILLION = 10**9


@pytest.mark.parametrize(("ranks", "gigabytes"), [
    (4, (120, 52.5, 41.25, 30)), (16, (120, 35.625, 21.5625, 7.5)), (64, (120, 31.40625, 16.640625, 1.875))])
def test_mixed_precision_is_the_papers_table_1_at_7_5_billion_parameters(
        ranks: int, gigabytes: tuple[float, ...]) -> None:
    for stage, expected in enumerate(gigabytes):
        states = theory(stage, ranks=ranks, parameters=7_500_000_000, precision="bf16")
        assert states.total == pytest.approx(expected * BILLION)


def test_fp32_parameters_are_their_own_masters() -> None:
    assert theory(0, ranks=2, parameters=100, precision="fp32") == States(parameters=400, gradients=400, optimizer=800)
    assert theory(1, ranks=2, parameters=100, precision="fp32") == States(parameters=400, gradients=400, optimizer=400)
    assert theory(2, ranks=2, parameters=100, precision="fp32") == States(parameters=400, gradients=200, optimizer=400)
    assert theory(3, ranks=2, parameters=100, precision="fp32") == States(parameters=200, gradients=200, optimizer=400)


def test_only_gradients_may_hold_buckets_beside_the_tables_bytes() -> None:
    limit = allowed(States(parameters=1000, gradients=1000, optimizer=1000), bucket_bytes=70)
    assert (limit.parameters, limit.gradients, limit.optimizer) == (1030, 1170, 1030)
    assert over(limit, limit) == ""
    assert over(States(parameters=1031, gradients=1170, optimizer=1031), limit) == "parameters optimizer"
    assert over(States(parameters=0, gradients=1171, optimizer=0), limit) == "gradients"
