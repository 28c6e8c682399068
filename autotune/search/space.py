"""From a request to its `Space`: everything about the search that can be checked before any device is used."""

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import ValidationError

from autotune.domain.cluster import Cluster
from autotune.domain.errors import FieldError, InvalidRequestError
from autotune.domain.request import HardwareRequest, StudyRequest
from autotune.predict.cluster import bundled_clusters, described
from autotune.search.knobs import FOREIGN_NAMES, KNOBS, NOT_A_KNOB, PARALLEL_DEGREES, KnobKind
from autotune.search.points import Knob, Space
from engine.config import TrainConfig, resolve_batch_sizes
from engine.errors import BatchSizeError

MAX_POINTS = 50_000
_MAX_AUTO_MICRO_BATCHES = 10
_FIELDS = tuple(TrainConfig.model_fields)


def parse_space(request: StudyRequest) -> Space:
    """Make the space of a study, or refuse the request.

    Checks the batch arithmetic, the baseline, the names and values of knobs and that something can run at all.

    Raises:
        InvalidRequestError: with every problem found, each at a dotted field such as ``search.space.zero_stage``.
    """
    draft = _draft(request)
    if draft.count(MAX_POINTS + 1) > MAX_POINTS:
        raise InvalidRequestError(FieldError(
            "search.space", f"more than {MAX_POINTS} configurations, the largest space possible: give fewer values"))
    if not draft.points:
        raise InvalidRequestError(*(FieldError("search.space", f"no combination can run: {reason}")
                                    for reason in draft.impossible_combinations))
    default = _default_config(draft)
    return replace(draft, baseline=draft.baseline if draft.has_own_baseline else default, default=default)


def count_points(request: StudyRequest, limit: int) -> int:
    """How many configurations the space of a study has, counted up to `limit`; quicker than to make it.

    Raises:
        InvalidRequestError: as `parse_space`, as far as nothing needs to be made.
    """
    return _draft(request).count(limit)


def _draft(request: StudyRequest) -> Space:
    """The space before any of its points is made, with the baseline in place of the default configuration."""
    if request.hardware.cluster is not None:
        named_cluster(request.hardware)
    world_size, global_batch = request.hardware.devices, request.training.global_batch_size
    _require_divisible(global_batch, world_size)
    base_fields, baseline = _parse_baseline(request)
    knobs = _parse_knobs(request, per_rank=global_batch // world_size)
    return Space(base_fields=base_fields, baseline=baseline, has_own_baseline=request.search.baseline is not None,
                 knobs=knobs, global_batch_size=global_batch, world_size=world_size, default=baseline)


def named_cluster(hardware: HardwareRequest) -> Cluster:
    """The cluster that a request of mode plan names or describes.

    Raises:
        InvalidRequestError: no cluster of this name is bundled.
    """
    assert hardware.cluster is not None
    try:
        return described(hardware.cluster)
    except KeyError:
        raise InvalidRequestError(FieldError(
            "hardware.cluster", f"no cluster is known as {hardware.cluster!r}: give one of "
            f"{', '.join(bundled_clusters())}, or describe one of your own")) from None


def _require_divisible(global_batch: int, world_size: int) -> None:
    try:
        resolve_batch_sizes(data_parallel_size=world_size, global_batch_size=global_batch)
    except BatchSizeError as error:
        raise InvalidRequestError(FieldError("training.global_batch_size", str(error))) from None


# --- the baseline ---


def _parse_baseline(request: StudyRequest) -> tuple[dict[str, Any], TrainConfig]:
    """Returns (fields that the base configuration sets, the configuration)."""
    given = request.search.baseline or {}
    problems = [problem for name, value in given.items()
                if (problem := _baseline_problem(request, name, value)) is not None]
    if problems:
        raise InvalidRequestError(*problems)
    try:
        sizes = _resolve(request, given)
        fields = {**given, "micro_batch_size": sizes.micro_batch_size,
                  "gradient_accumulation_steps": sizes.gradient_accumulation_steps,
                  "gradient_clipping": request.training.gradient_clipping}
        config = TrainConfig(**fields)
    except BatchSizeError as error:
        raise InvalidRequestError(*(FieldError(_batch_field(name), str(error)) for name in error.fields
                                    if name in given or name == error.fields[0])) from None
    except ValidationError as error:
        raise InvalidRequestError(*(FieldError(
            ".".join(("search.baseline", *(str(part) for part in problem["loc"]))),
            problem["msg"].removeprefix("Value error, ")) for problem in error.errors(include_url=False))) from None
    return {name: getattr(config, name) for name in fields}, config


def _resolve(request: StudyRequest, given: dict[str, Any]) -> Any:
    """The baseline's batch sizes, each checked as a count first: ``"8"`` is one, 1.5 is refused."""
    named = {name: given[name] for name in ("micro_batch_size", "gradient_accumulation_steps") if name in given}
    checked = TrainConfig(**named)
    return resolve_batch_sizes(data_parallel_size=request.hardware.devices,
                               global_batch_size=request.training.global_batch_size,
                               **{name: getattr(checked, name) for name in named})


def _batch_field(name: str) -> str:
    return "training.global_batch_size" if name == "global_batch_size" else f"search.baseline.{name}"


def _baseline_problem(request: StudyRequest, name: str, value: Any) -> FieldError | None:
    field = f"search.baseline.{name}"
    if name in PARALLEL_DEGREES:
        return FieldError(field, _no_such_degree(name))
    if name == "global_batch_size":
        return FieldError(field, "set training.global_batch_size instead")
    if name not in _FIELDS:
        return FieldError(field, f"unknown field{TrainConfig.meaning(name)}")
    if isinstance(value, list):
        what = "one integer" if type(TrainConfig.model_fields[name].default) is int else "one value"
        return FieldError(field, f"{name} must be {what}; lists are search spaces: move it to search.space.{name}")
    wanted = request.training.gradient_clipping
    if name == "gradient_clipping" and value != wanted:
        return FieldError(field, f"{value} contradicts training.gradient_clipping {wanted}: set it there")
    return None


# --- the knobs ---


def _parse_knobs(request: StudyRequest, *, per_rank: int) -> tuple[Knob, ...]:
    asked: dict[str, list[Any] | Literal["auto"]] | None = request.search.space
    if asked is None:
        asked = {kind.name: "auto" for kind in KNOBS.values() if kind.by_default}
    problems = [FieldError(f"search.space.{name}", _unknown_knob(name)) for name in asked if name not in KNOBS]
    knobs = []
    for kind in KNOBS.values():
        if kind.name not in asked:
            continue
        values = asked[kind.name]
        try:
            if values == "auto":
                knobs.append(Knob(kind=kind, values=_auto_values(kind, per_rank, request.hardware.devices),
                                  auto=True, world_size=request.hardware.devices))
            else:
                knobs.append(Knob(kind=kind, values=_checked_values(kind, values, request, per_rank),
                                  auto=False, world_size=request.hardware.devices))
        except ValueError as error:
            problems.append(FieldError(f"search.space.{kind.name}", str(error)))
    if problems:
        raise InvalidRequestError(*problems)
    return tuple(knobs)


def _unknown_knob(name: str) -> str:
    if name in PARALLEL_DEGREES:
        return _no_such_degree(name)
    if name in NOT_A_KNOB:
        return f"is no knob: it {NOT_A_KNOB[name]}"
    if name in _FIELDS:
        return "is no knob: set it in search.baseline"
    suggestion = _did_you_mean(name, [*KNOBS, *NOT_A_KNOB])
    return f"no such knob{suggestion or '; knobs are ' + ', '.join(KNOBS)}"


def _no_such_degree(name: str) -> str:
    return (f"{name} is not supported: parameters are sharded over data-parallel ranks only, as many as "
            "hardware.devices; leave it out (mode plan has hardware.tensor_parallel and hardware.pipeline_parallel)")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    known = list(known)
    if FOREIGN_NAMES.get(name) in known:
        return f"; did you mean {FOREIGN_NAMES[name]}?"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _auto_values(kind: KnobKind, per_rank: int, world_size: int) -> tuple[Any, ...]:
    if kind.name == "micro_batch_size":
        return _spread(divisors(per_rank), _MAX_AUTO_MICRO_BATCHES)
    if kind.name == "reduce_bucket_size" and world_size == 1:
        # nothing is reduced; the update still goes bucket by bucket, which is not worth a search
        return (TrainConfig.model_fields[kind.name].default,)
    if kind.name == "zero_stage" and world_size == 1:
        # on one device stages differ only in what they can offload: optimizer states from 1 on, parameters at 3
        return (0, 1, 3)
    return kind.auto


def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return tuple(sorted({*small, *(number // candidate for candidate in small)}))


def _spread(values: Sequence[int], count: int) -> tuple[int, ...]:
    """At most `count` of the values, both ends kept, evenly by rank."""
    if len(values) <= count:
        return tuple(values)
    return tuple(values[round(place * (len(values) - 1) / (count - 1))] for place in range(count))


def _checked_values(kind: KnobKind, given: list[Any], request: StudyRequest, per_rank: int) -> tuple[Any, ...]:
    if not given:
        raise ValueError("the list is empty: give at least one value, or leave the knob out")
    if len(given) > MAX_POINTS:
        raise ValueError(f"{len(given)} values, the most possible is {MAX_POINTS}: give fewer")
    values: dict[Any, None] = {}  # in the order given, once each
    for raw in given:
        try:
            value = kind.check(raw)
        except ValueError as error:
            suggestion = _did_you_mean(raw, [str(known) for known in kind.auto]) if isinstance(raw, str) else ""
            raise ValueError(f"{error}{suggestion}") from None
        values[value] = None
    if kind.name == "micro_batch_size":
        for value in values:
            if per_rank % value:
                raise ValueError(
                    f"{value} does not divide {per_rank}, the samples per device (global_batch_size "
                    f"{request.training.global_batch_size} / {request.hardware.devices} devices): possible are "
                    f"{', '.join(map(str, divisors(per_rank)))}")
    return tuple(sorted(values)) if kind.ordinal else tuple(values)


# --- the default configuration ---


def _default_config(space: Space) -> TrainConfig:
    """What one would run without tuning: the base with the field defaults and no accumulation, as far as allowed."""
    wanted: dict[str, Any] = {}
    for knob in space.knobs:
        if knob.name == "micro_batch_size":
            wanted[knob.name] = knob.values[-1]
        else:
            default = TrainConfig.model_fields[knob.name].default
            wanted[knob.name] = default if default in knob.values else knob.values[0]
    try:
        return space.config(wanted)
    except ValueError:
        return min(space.points, key=lambda config: sum(
            getattr(config, name) != value for name, value in wanted.items()))


__all__ = ["MAX_POINTS", "Knob", "Space", "count_points", "divisors", "named_cluster", "parse_space"]
