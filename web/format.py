"""Numbers and times for people: three significant digits, and always the unit.

Every function takes None for "not known" and gives an em dash for it.
"""

import math
from datetime import UTC, datetime

NOTHING = "—"
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_COUNT_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def significant(value: float, digits: int = 3) -> str:
    """A number with at least `digits` significant digits, never in exponent form; thousands are set apart.

    >>> significant(1234.5), significant(12.345), significant(0.012345)
    ('1,234', '12.3', '0.0123')
    """
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    rounded = round(value, digits - 1 - magnitude) if magnitude < digits else value
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def number_bytes(count: float | None) -> str:
    """Bytes in binary units: ``1.50 GiB``."""
    if count is None:
        return NOTHING
    power = 0
    while abs(count) >= 1024 and power < len(_BYTE_UNITS) - 1:
        count, power = count / 1024, power + 1
    if power == 0:
        return f"{count:.0f} B"
    return f"{significant(count)} {_BYTE_UNITS[power]}"


def byte_unit(largest: float) -> tuple[int, str]:
    """(bytes per unit, unit) in which a series up to `largest` bytes reads well."""
    power = 0
    while largest >= 1024 and power < len(_BYTE_UNITS) - 1:
        largest, power = largest / 1024, power + 1
    return 1024**power, _BYTE_UNITS[power]


def rate(per_second: float | None, unit: str = "tok/s") -> str:
    """A rate: ``12,345 tok/s``."""
    return NOTHING if per_second is None else f"{significant(per_second)} {unit}"


def seconds(value: float | None) -> str:
    """A short time, as of one step: ``42.1 ms``, ``3.20 s``, ``2 min 05 s``."""
    if value is None:
        return NOTHING
    if value < 1e-3:
        return f"{significant(value * 1e6)} µs"
    if value < 1:
        return f"{significant(value * 1e3)} ms"
    return f"{significant(value)} s" if value < 60 else duration(value)


def duration(value: float | None) -> str:
    """A long time, to the second: ``42 s``, ``2 min 05 s``, ``1 h 04 min``, ``3 d 2 h``."""
    if value is None:
        return NOTHING
    whole = round(max(value, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def count(value: float | None) -> str:
    """A count in short form: ``124 M`` parameters."""
    if value is None:
        return NOTHING
    for size, unit in _COUNT_UNITS:
        if abs(value) >= size:
            return f"{significant(value / size)} {unit}"
    return f"{value:,.0f}"


def flops(per_second: float | None) -> str:
    """Arithmetic rate: ``98.2 GFLOP/s``."""
    if per_second is None:
        return NOTHING
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if per_second >= size:
            return f"{significant(per_second / size)} {prefix}FLOP/s"
    return f"{significant(per_second)} FLOP/s"


def factor(value: float | None) -> str:
    """A speedup: ``1.42×``."""
    return NOTHING if value is None else f"{value:.2f}×"


def percent(fraction: float | None, *, signed: bool = False) -> str:
    """A share: ``42 %``, one decimal below ten; with a sign where it is a change: ``+4.2 %``, ``−3.1 %``."""
    if fraction is None:
        return NOTHING
    value = fraction * 100
    text = f"{abs(value):.0f}" if abs(value) >= 9.95 else f"{abs(value):.1f}"
    sign = "−" if value < 0 and float(text) else "+" if signed and float(text) else ""
    return f"{sign}{text} %"


def change(factor_: float | None) -> str:
    """A factor as a change: 1.42 -> ``+42 %``."""
    return percent(None if factor_ is None else factor_ - 1, signed=True)


def knob(value: object) -> str:
    """A configuration's value: booleans as on/off, large counts with their thousands set apart."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return NOTHING if value is None else str(value)


def utc(moment: datetime) -> str:
    """Date and time to the second, in UTC: ``2026-03-01 12:30:05 UTC``."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def ago(moment: datetime, now: datetime) -> str:
    """How long ago, in the largest unit: ``just now``, ``5 min ago``, ``3 d ago``."""
    passed = (now - moment).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if passed >= size:
            return f"{int(passed // size)} {unit} ago"
    return "just now" if passed < 5 else f"{int(passed)} s ago"
