"""The base of every value that crosses a module or process boundary."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

Precision = Literal["fp32", "bf16", "fp16"]

BYTES_PER_ELEMENT: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


class Value(BaseModel):
    """A frozen, complete, comparable value: unknown keys are refused, non-finite numbers never occur.

    Attributes:
        other_names: what users of other tools may call a field -> the field, or a sentence that says what to do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    other_names: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _say_what_was_meant(cls, data: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validated(data)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            if not any(problem["type"] == "extra_forbidden" for problem in problems):
                raise
            raise ValidationError.from_exception_data(error.title, list(map(cls._in_words, problems))) from None

    @classmethod
    def _in_words(cls, problem: ErrorDetails) -> InitErrorDetails:
        """Unknown keys of this value with what was meant; those of the values inside it have been told already."""
        told: InitErrorDetails = {"type": problem["type"], "loc": problem["loc"], "input": problem["input"],
                                  "ctx": problem.get("ctx", {})}
        if problem["type"] == "extra_forbidden":
            mine = len(problem["loc"]) == 1
            message = f"unknown field{cls.meaning(str(problem['loc'][0]))}" if mine else problem["msg"]
            told["type"] = PydanticCustomError("extra_forbidden", "{message}", {"message": message})
        return told

    @classmethod
    def meaning(cls, unknown: str) -> str:
        """The end of a message about an unknown field: what was meant, or which fields there are."""
        known = list(cls.model_fields)
        close = cls.other_names.get(unknown.lower()) or next(iter(difflib.get_close_matches(unknown, known, n=1)), None)
        if close is None:
            return f"; known here: {', '.join(known)}"
        return f": did you mean {close!r}?" if close in known else f": {close}"


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
