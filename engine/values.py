"""The base of every value that crosses a module or process boundary."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Precision = Literal["fp32", "bf16", "fp16"]

BYTES_PER_ELEMENT: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


class Value(BaseModel):
    """A frozen, complete, comparable value: unknown keys are refused, non-finite numbers never occur."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _whole_number(value: object) -> object:
    """Accept ``5e8`` and ``"5e8"`` (YAML reads the bare form as a string) where a count is meant; refuse booleans."""
    if isinstance(value, bool):
        raise ValueError("give a whole number, not true/false")
    if isinstance(value, str):
        try:
            value = float(value) if not value.strip().lstrip("+-").isdigit() else int(value)
        except ValueError:
            raise ValueError(f"give a whole number, not {value!r}") from None
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"give a whole number, not {value}")
        return int(value)
    return value


Count = Annotated[int, BeforeValidator(_whole_number), Field(ge=1, le=2**62)]
"""A whole number of at least 1; written ``500000000``, ``5e8`` or ``"5e8"``."""


def _no_boolean(value: object) -> object:
    """Refuse booleans, which Python and pydantic take for 0 and 1 (YAML reads a bare ``yes`` or ``on`` as true)."""
    if isinstance(value, bool):
        raise ValueError("give a number, not true/false")
    return value


Whole = Annotated[int, BeforeValidator(_no_boolean)]
"""A whole number; true is not 1."""

Real = Annotated[float, BeforeValidator(_no_boolean)]
"""A number; true is not 1."""
