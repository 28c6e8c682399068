"""The bytes that counted ones are compared with."""

import pytest

from benchmarks.communication import is_wrong, theory


@pytest.mark.parametrize(("stage", "accumulation", "megabytes"), [
    (0, 1, 120), (0, 4, 120), (1, 1, 120), (1, 4, 120), (2, 1, 120), (2, 4, 300), (3, 1, 180), (3, 4, 720)])
def test_80_megabytes_of_parameters_on_4_ranks(stage: int, accumulation: int, megabytes: float) -> None:
    assert theory(stage, accumulation=accumulation, ranks=4, parameter_bytes=80) == pytest.approx(megabytes)


def test_one_rank_sends_nothing() -> None:
    assert all(theory(stage, accumulation=2, ranks=1, parameter_bytes=80) == 0 for stage in range(4))


@pytest.mark.parametrize(("sent", "seen", "wrong"), [
    (1.0, 1.0, False), (1.02, None, False), (0.5, 1.04, False), (1.04, 1.0, True), (1.0, 1.06, True), (1.0, 0.9, True)])
def test_more_than_theory_or_other_than_counted_is_wrong(sent: float, seen: float | None, wrong: bool) -> None:
    assert is_wrong({"sent / theory": sent, "loopback / sent": seen}) is wrong
