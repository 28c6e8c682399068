"""Numbers as people read them: three significant digits, always with the unit."""

from datetime import UTC, datetime, timedelta

import pytest

from web import format as fmt

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (1.5, "1.50"), (12.345, "12.3"), (999.6, "1,000"), (1234.5, "1,234"), (0.012345, "0.0123"),
    (-42.42, "-42.4"), (9.999, "10.0"), (1_234_567, "1,234,567")])
def test_significant_digits(value: float, text: str) -> None:
    assert fmt.significant(value) == text


@pytest.mark.parametrize(("count", "text"), [
    (None, "—"), (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (600 * 2**20, "600 MiB"), (1.5 * 2**30, "1.50 GiB"),
    (5 * 2**50, "5,120 TiB")])
def test_bytes(count: float | None, text: str) -> None:
    assert fmt.number_bytes(count) == text


@pytest.mark.parametrize(("value", "text"), [
    (None, "—"), (2e-5, "20.0 µs"), (0.0421, "42.1 ms"), (3.2, "3.20 s"), (125, "2 min 05 s")])
def test_step_times(value: float | None, text: str) -> None:
    assert fmt.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [
    (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3840, "1 h 04 min"), (266_400, "3 d 2 h")])
def test_durations(value: float, text: str) -> None:
    assert fmt.duration(value) == text


@pytest.mark.parametrize(("factor", "text"), [(1.42, "+42 %"), (0.968, "−3.2 %"), (1.0, "0.0 %"), (None, "—")])
def test_a_factor_as_a_change(factor: float | None, text: str) -> None:
    assert fmt.change(factor) == text


def test_rates_and_knobs_carry_what_they_are() -> None:
    assert fmt.rate(16_700.4) == "16,700 tok/s"
    assert fmt.rate(None) == "—"
    assert fmt.flops(98.2e9) == "98.2 GFLOP/s"
    assert [fmt.knob(value) for value in (True, False, 10_000_000, 0.5, "bf16", None)] == [
        "on", "off", "10,000,000", "0.5", "bf16", "—"]


def test_ages() -> None:
    ages = [fmt.ago(NOW - timedelta(seconds=seconds), NOW) for seconds in (1, 30, 90, 7200, 3 * 86400)]
    assert ages == ["just now", "30 s ago", "1 min ago", "2 h ago", "3 d ago"]


def test_a_series_has_one_unit() -> None:
    assert fmt.byte_unit(600 * 2**20) == (2**20, "MiB")
    assert fmt.byte_unit(0) == (1, "B")
