"""The space of a study: a base configuration and the knobs that vary, at a fixed global batch.

Two configurations that differ only in knobs that do nothing (`Knob.is_active`) are one: the space holds the canonical
one. A field that `space` does not name keeps the base configuration's value, whatever else varies.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from autotune.search.knobs import KEEP, Fields, KnobKind
from engine.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One field that varies in a study.

    Attributes:
        kind: its entry in the catalogue.
        values: to try; ascending where ordinal.
        auto: the product chose the values, not the user.
        world_size: data-parallel size, on which some conditions depend.
    """

    kind: KnobKind
    values: tuple[Any, ...]
    auto: bool
    world_size: int

    @property
    def name(self) -> str:
        return self.kind.name

    def is_active(self, config: TrainConfig) -> bool:
        """Whether the knob does anything in this configuration."""
        return self.kind.active(config.__dict__, self.world_size)


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may be tried. Made by `parse_space`.

    Attributes:
        base_fields: fields that the base configuration sets; the rest have `TrainConfig`'s defaults.
        baseline: the user's own configuration, exactly as given; the default one where none was.
        has_own_baseline: whether the user gave one.
        knobs: those that vary, in the catalogue's order.
        global_batch_size: samples per optimizer step, the same for every configuration.
        world_size: data-parallel size.
        default: what one would run without tuning: the fields' defaults and no accumulation, as far as the space
            allows; the base where fields are not in the space.
    """

    base_fields: Mapping[str, Any]
    baseline: TrainConfig
    has_own_baseline: bool
    knobs: tuple[Knob, ...]
    global_batch_size: int
    world_size: int
    default: TrainConfig

    def knob(self, name: str) -> Knob | None:
        """The knob of this name, None where it does not vary."""
        return next((knob for knob in self.knobs if knob.name == name), None)

    def canonical(self, config: TrainConfig) -> TrainConfig:
        """The one configuration that stands for all that differ from this one only in inactive knobs."""
        folded = self._fold({knob.name: getattr(config, knob.name) for knob in self.knobs})
        changed = {knob.name: folded[knob.name] for knob in self.knobs
                   if knob.kind.inactive_value is KEEP and folded[knob.name] != getattr(config, knob.name)}
        return config.model_copy(update=changed) if changed else config

    def config(self, values: Mapping[str, Any]) -> TrainConfig:
        """The canonical configuration with these values of the knobs.

        Args:
            values: one per knob of the space.

        Raises:
            ValueError: the combination cannot run; the text says why.
        """
        folded = self._fold(values)
        self._refuse_forced_inactive(values, folded)
        return self._build(folded)

    def moved(self, config: TrainConfig, name: str, value: Any) -> TrainConfig:
        """A configuration, of the space or not, with one knob at another value; what that makes inactive follows.

        Raises:
            ValueError: the combination cannot run; the text says why.
        """
        fields = {**config.__dict__, name: value}
        if "reduce_dtype" not in self.base_fields:
            del fields["reduce_dtype"]
        for knob in self.knobs:
            if knob.kind.inactive_value is not KEEP and not knob.kind.active(fields, self.world_size):
                fields[knob.name] = knob.kind.inactive_value
        return self._build(fields)

    @cached_property
    def points(self) -> tuple[TrainConfig, ...]:
        """Every distinct configuration that can run, in a fixed order."""
        return tuple(config for config, _ in self._enumerated if config is not None)

    @cached_property
    def impossible_combinations(self) -> dict[str, int]:
        """How many combinations cannot run, by reason."""
        counts: dict[str, int] = {}
        for config, reason in self._enumerated:
            if config is None:
                counts[reason] = counts.get(reason, 0) + 1
        return counts

    def count(self, limit: int) -> int:
        """How many distinct combinations there are, counted up to `limit`."""
        return sum(1 for _ in itertools.islice(self._expand({}, 0), limit))

    @cached_property
    def _enumerated(self) -> tuple[tuple[TrainConfig | None, str], ...]:
        found: list[tuple[TrainConfig | None, str]] = []
        for combination in self._expand({}, 0):
            if isinstance(combination, str):
                found.append((None, combination))
                continue
            try:
                found.append((self._build(combination), ""))
            except ValueError as error:
                found.append((None, reason_of(error)))
        return tuple(found)

    def _expand(self, chosen: dict[str, Any], position: int) -> Iterator[dict[str, Any] | str]:
        """Every distinct combination from this knob on: branches where a knob is active. A text is a refusal."""
        if position == len(self.knobs):
            yield chosen
            return
        knob = self.knobs[position]
        if knob.kind.active({**_DEFAULTS, **self.base_fields, **chosen}, self.world_size):
            for value in knob.values:
                yield from self._expand({**chosen, knob.name: value}, position + 1)
            return
        forced = self._inactive_value(knob.kind)
        if knob.kind.inactive_value is not KEEP and forced not in knob.values:
            yield _forced_inactive(knob, knob.values[0])
            return
        yield from self._expand({**chosen, knob.name: forced}, position + 1)

    def _fold(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values with those of inactive knobs replaced: conditions look at knobs earlier in the catalogue."""
        fields: dict[str, Any] = {**_DEFAULTS, **self.base_fields, **values}
        folded: dict[str, Any] = {}
        for knob in self.knobs:
            if not knob.kind.active(fields, self.world_size):
                fields[knob.name] = self._inactive_value(knob.kind)
            folded[knob.name] = fields[knob.name]
        return folded

    def _inactive_value(self, kind: KnobKind) -> Any:
        if kind.inactive_value is KEEP:
            return self.base_fields.get(kind.name, _DEFAULTS[kind.name])
        return kind.inactive_value

    def _refuse_forced_inactive(self, values: Mapping[str, Any], folded: Fields) -> None:
        """Refuse a point at which a knob would have to take a value that the user left out of the list."""
        for knob in self.knobs:
            forced = folded[knob.name]
            if forced != values[knob.name] and knob.kind.inactive_value is not KEEP and forced not in knob.values:
                raise ValueError(_forced_inactive(knob, values[knob.name]))

    def _build(self, folded: Fields) -> TrainConfig:
        fields = {**self.base_fields, **folded}
        micro = fields.get("micro_batch_size", _DEFAULTS["micro_batch_size"])
        fields["gradient_accumulation_steps"] = self.global_batch_size // (micro * self.world_size)
        return TrainConfig(**fields)


def _forced_inactive(knob: Knob, value: Any) -> str:
    return f"{knob.name} {value} is possible only {knob.kind.condition}"


def reason_of(error: ValueError) -> str:
    """The text of what made a configuration impossible, without the library's decoration."""
    if isinstance(error, ValidationError):
        return error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
    return str(error)


_DEFAULTS: dict[str, Any] = dict(TrainConfig.model_validate({}).__dict__)
