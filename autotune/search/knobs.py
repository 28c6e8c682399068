"""The knobs: which fields of `TrainConfig` can be searched, with which values, and when each does anything at all."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from engine.config import TrainConfig

Fields = Mapping[str, Any]
"""Values of `TrainConfig`'s fields by name."""

KEEP = object()
"""Marks a knob that, while inactive, keeps the base configuration's value: it changes nothing whatever it is."""


@dataclass(frozen=True, kw_only=True)
class KnobKind:
    """One searchable field.

    Attributes:
        name: the field of `TrainConfig`.
        auto: values tried for "auto"; empty where they follow from the request (`micro_batch_size`).
        by_default: part of the space that is searched when a request names none.
        ordinal: values have an order and a distance; else they are categories.
        active: whether the knob does anything, given the other fields and the world size.
        condition: `active` in words, for messages: "has an effect only ...".
        inactive_value: what the field must be while inactive, or `KEEP`.
    """

    name: str
    auto: tuple[Any, ...]
    by_default: bool = True
    ordinal: bool = False
    active: Callable[[Fields, int], bool] = lambda fields, world_size: True
    condition: str = ""
    inactive_value: Any = KEEP

    def check(self, value: object) -> Any:
        """The value as `TrainConfig` would hold it.

        Raises:
            ValueError: the field cannot have it; the text says what it can.
        """
        if isinstance(value, bool) != (self.name in _BOOLEAN):
            raise ValueError(f"must be true or false, not {value!r}" if self.name in _BOOLEAN
                             else f"must not be true or false, but one of {self.describe()}")
        try:
            return _ADAPTERS[self.name].validate_python(value)
        except ValidationError as error:
            text = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"{value!r} is not possible: {text}") from None

    def describe(self) -> str:
        return ", ".join(str(value) for value in self.auto) or "whole numbers"


def _several_ranks(fields: Fields, world_size: int) -> bool:
    return world_size > 1


def _gathers(fields: Fields, world_size: int) -> bool:
    return world_size > 1 and fields["zero_stage"] >= 1


def _gathers_ahead(fields: Fields, world_size: int) -> bool:
    return world_size > 1 and fields["zero_stage"] == 3 and fields["overlap_comm"]


def _stage_3(fields: Fields, world_size: int) -> bool:
    return bool(fields["zero_stage"] == 3)


def _shards_optimizer(fields: Fields, world_size: int) -> bool:
    return bool(fields["zero_stage"] >= 1)


def _sixteen_bit(fields: Fields, world_size: int) -> bool:
    return bool(fields["precision"] != "fp32")


_BUCKETS = (2_000_000, 10_000_000, 100_000_000)

KNOBS: dict[str, KnobKind] = {kind.name: kind for kind in (
    KnobKind(name="zero_stage", auto=(0, 1, 2, 3), ordinal=True),
    KnobKind(name="micro_batch_size", auto=(), ordinal=True),
    KnobKind(name="precision", auto=("fp32", "bf16", "fp16")),
    KnobKind(name="activation_checkpointing", auto=("none", "selective", "full")),
    KnobKind(name="reduce_bucket_size", auto=_BUCKETS, ordinal=True),
    KnobKind(name="allgather_bucket_size", auto=_BUCKETS, ordinal=True, active=_gathers,
             condition="from zero_stage 1 on and on more than one device"),
    KnobKind(name="overlap_comm", auto=(True, False), active=_several_ranks, condition="with more than one device"),
    KnobKind(name="prefetch_bucket_size", auto=_BUCKETS, ordinal=True, active=_gathers_ahead,
             condition="with zero_stage 3 and overlap_comm on more than one device"),
    KnobKind(name="offload_optimizer_ratio", auto=(0.0, 0.5, 1.0), ordinal=True, active=_shards_optimizer,
             condition="from zero_stage 1 on", inactive_value=0.0),
    KnobKind(name="offload_param", auto=(False, True), active=_stage_3, condition="with zero_stage 3",
             inactive_value=False),
    KnobKind(name="optimizer_precision", auto=("fp32", "compute"), by_default=False, active=_sixteen_bit,
             condition="with precision bf16"),
    KnobKind(name="compile", auto=(False, True), by_default=False),
)}
"""In the order in which a space is enumerated."""

_BOOLEAN = frozenset({"overlap_comm", "offload_param", "compile"})

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(Annotated[field.annotation, field])  # type: ignore[arg-type]
    for name, field in TrainConfig.model_fields.items() if name in KNOBS
}

NOT_A_KNOB: dict[str, str] = {
    "gradient_accumulation_steps": "follows from the global batch, micro_batch_size and the number of devices: give "
                                   "micro_batch_size instead",
    "gradient_clipping": "decides what is learned, so it is not searched: set training.gradient_clipping",
    "loss_scale": "decides what is learned, so it is not searched: set it in search.baseline",
    "global_batch_size": "decides what is learned, so it is not searched: set training.global_batch_size",
    "reduce_dtype": "follows precision, or is fixed in search.baseline",
}
"""Fields that users name in a space by mistake, with where they belong."""

_DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "sequence_parallel", "expert_parallel",
            "data_parallel", "tp", "pp", "cp", "sp", "ep", "dp", "autotp", "model_parallel")
PARALLEL_DEGREES: frozenset[str] = frozenset(
    degree + ending for degree in _DEGREES for ending in ("", "_size", "_degree"))
"""Names of parallel degrees other than the data-parallel one, which is the number of devices. Refused, never ignored:
an ignored degree would change what a rank holds and what the global batch is."""

FOREIGN_NAMES: dict[str, str] = {**TrainConfig.other_names, "train_batch_size": "global_batch_size"}
"""What other tools call our fields, for "did you mean"."""


def positions(values: Sequence[int | float]) -> tuple[int, ...]:
    """Distinct whole numbers for ordinal values, so that equal ratios lie equally far apart (log2) where all are > 0.

    Args:
        values: distinct, ascending.

    Returns:
        One position per value, ascending, the first 0.
    """
    if values[0] <= 0 or len(values) == 1:
        return tuple(range(len(values)))
    for resolution in (1, 2, 4, 8, 16, 32, 64):
        found = tuple(round(resolution * math.log2(value / values[0])) for value in values)
        if len(set(found)) == len(found):
            return found
    return tuple(range(len(values)))
