"""What every format shares: the value it yields, and a reader that never lets a key get lost."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autotune.domain.errors import FieldError, InvalidRequestError
from engine.config import OptimizerConfig, TrainConfig, resolve_batch_sizes
from engine.errors import BatchSizeError
from engine.values import Count, Value

_COUNT = TypeAdapter[int](Count)
DECIDED_BY_TRAINER = "the trainer's own argument decides"
_COMMENTS = ("_comment", "notes")
_LISTS = frozenset({"betas"})
_ONE = {"zero_optimization.stage": "one integer"}
_TRAINERS = frozenset({"micro_batch_size", "gradient_accumulation_steps", "gradient_clipping", "precision"})
"""Fields that a trainer fills in from its own arguments where the file says "auto"."""


class ImportedConfig(Value):
    """Another tool's configuration in the engine's words.

    Attributes:
        config: complete; what the file leaves open or does not say has the engine's default.
        optimizer: None where the file does not say, or names one that the engine has no word for.
        world_size: ranks; None where neither the file nor the caller says.
        global_batch_size: samples per optimizer step over all ranks; None where it is left open.
        open: keys of the file that are "auto", by their place in it.
        notes: what was left out, and what was read otherwise than one may think; names every such key.
    """

    config: TrainConfig
    optimizer: OptimizerConfig | None = None
    world_size: Count | None = None
    global_batch_size: Count | None = None
    open: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Reader:
    """Reads a file's keys by their place in it, ``section.key``; what nobody asked for ends up in the notes.

    Args:
        tool: as users call it, for messages.
        passed_over: keys and sections that say nothing of the engine's, by place, with the reason.
    """

    def __init__(self, tool: str, content: Mapping[str, Any], passed_over: Mapping[str, str]) -> None:
        self.tool = tool
        self.fields: dict[str, Any] = {}
        self.open: list[str] = []
        self._content = content
        self._passed_over = passed_over
        self._asked: set[str] = set(passed_over)
        self._places: dict[str, str] = {}
        self._notes: list[str] = []
        self._problems: list[FieldError] = []

    def note(self, text: str) -> None:
        self._notes.append(text)

    def refuse(self, place: str, why: str) -> None:
        """Remember what is wrong; `require_sound` raises all of it."""
        self._problems.append(FieldError(place, why))

    def require_sound(self) -> None:
        """Raises:
            InvalidRequestError: something was refused so far; names every place.
        """
        if self._problems:
            raise InvalidRequestError(*self._problems)

    def take(self, *places: str, if_open: str = DECIDED_BY_TRAINER) -> Any:
        """The value of a key, which may have several names; None where it is missing, null or "auto".

        Names that contradict each other, and a list where one value belongs, are refused.

        Args:
            if_open: what to say of an "auto".
        """
        given = [(place, value) for place in places if (value := self._look(place)) is not None]
        if not given:
            return None
        place, value = given[0]
        if any(other != value for _, other in given[1:]):
            others = " and ".join(f"{other} {what!r}" for other, what in given[1:])
            self.refuse(place, f"{value!r} contradicts {others}, another name for the same: keep one")
        if value == "auto":
            self.open.append(place)
            self.note(f'{place}: "auto": {if_open}')
            return None
        if isinstance(value, list) and place.rpartition(".")[2] not in _LISTS:
            self.refuse(place, f"{place.rpartition('.')[2]} must be {_ONE.get(place, 'one value')}; lists are search "
                               "spaces: give them in a study's search.space")
            return None
        return value

    def set(self, field: str, *places: str) -> None:
        """Give a field of the configuration the file's value, where it has one."""
        who = DECIDED_BY_TRAINER if field in _TRAINERS else "left to search"
        value = self.take(*places, if_open=f"{who}; {field} {TrainConfig.model_fields[field].default} stands here")
        if value is not None:
            self.put(field, value, next(place for place in places if self._look(place) is not None))

    def put(self, field: str, value: Any, place: str) -> None:
        """Give a field a value that a place of the file means."""
        self.fields[field], self._places[field] = value, place

    def flag(self, *places: str, if_open: str = DECIDED_BY_TRAINER) -> bool:
        """A key that is on or off; off where the file does not say."""
        value = self.take(*places, if_open=if_open)
        if value is not None and not isinstance(value, bool):
            self.refuse(places[0], f"must be true or false, not {value!r}")
        return value is True

    def count(self, *places: str, if_open: str = DECIDED_BY_TRAINER) -> int | None:
        """A whole number of at least 1."""
        value = self.take(*places, if_open=if_open)
        if value is None:
            return None
        try:
            return _COUNT.validate_python(value)
        except ValidationError as error:
            self.refuse(places[0], _first(error))
            return None

    def result(self, *, optimizer: OptimizerConfig | None = None, world_size: int | None = None,
               global_batch_size: int | None = None) -> ImportedConfig:
        """Everything read.

        Raises:
            InvalidRequestError: something was refused, or fields do not go together; names the keys as the file does.
        """
        config = self._config()
        reasons: dict[str, list[str]] = {}
        for place, value in self._unread(self._content, ""):
            reasons.setdefault(self._why_unread(place), []).append(place)
            if value == "auto":
                self.open.append(place)
        notes = (*self._notes, *(f"{', '.join(places)}: {reason}" for reason, places in reasons.items()))
        return ImportedConfig(config=config, optimizer=optimizer, world_size=world_size,
                              global_batch_size=global_batch_size, open=tuple(self.open), notes=notes)

    def _config(self) -> TrainConfig:
        self.require_sound()
        try:
            return TrainConfig(**self.fields)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                field = str(problem["loc"][0]) if problem["loc"] else ""
                self.refuse(self._places.get(field, field), problem["msg"].removeprefix("Value error, "))
            self.require_sound()
            raise

    def _look(self, place: str) -> Any:
        self._asked.add(place)
        *sections, key = place.split(".")
        found: Any = self._content
        for depth, section in enumerate(sections, start=1):
            found = found.get(section)
            if not isinstance(found, Mapping):
                where = ".".join(sections[:depth])
                if found is not None and all(problem.field != where for problem in self._problems):
                    self.refuse(where, f"must be a mapping of keys to values, not {found!r}")
                return None
        return found.get(key)

    def _unread(self, content: Mapping[str, Any], above: str) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for key, value in content.items():
            place = f"{above}{key}"
            if key in _COMMENTS or (place in self._asked and place not in self._passed_over):
                continue
            if place in self._passed_over or not self._is_section(place):
                found.append((place, value))
            else:
                found += self._unread(value or {}, f"{place}.")
        return found

    def _is_section(self, place: str) -> bool:
        return any(asked.startswith(f"{place}.") for asked in self._asked)

    def _why_unread(self, place: str) -> str:
        if place in self._passed_over:
            return self._passed_over[place]
        key = place.rpartition(".")[2]
        right = sorted({asked[:start + len(key)] for asked in self._asked
                        if (start := f".{asked}.".find(f".{key}.")) >= 0})
        if right:
            return f"{self.tool} reads it as {right[0]} only; where it stands it does nothing, and is left out"
        beside = [asked.rpartition(".")[2] for asked in self._asked
                  if asked.rpartition(".")[0] == place.rpartition(".")[0]]
        close = difflib.get_close_matches(key, beside, n=1, cutoff=0.8)
        return f"unknown{f', did you mean {close[0]}?' if close else ''}; left out"


Said = tuple[str, int | None]
"""A place in a file, and the number there if there is one."""


def resolve_batch(reader: Reader, world_size: int | None, *, total: Said, micro: Said,
                  steps: Said) -> tuple[int | None, int | None]:
    """Set the batch fields of the configuration from what a file says of them.

    Returns:
        The ranks and the global batch size, each None where it stays open.
    """
    places = {"global_batch_size": total, "micro_batch_size": micro, "gradient_accumulation_steps": steps}
    given = {field: number for field, (_, number) in places.items() if number is not None}
    if world_size is None and len(given) == 3:
        of_rank = given["micro_batch_size"] * given["gradient_accumulation_steps"]
        world_size = max(given["global_batch_size"] // of_rank, 1)
    if world_size is None and "global_batch_size" in given:
        reader.refuse(total[0], "how it is shared out depends on the number of ranks: give that with --devices")
        return None, None
    if "global_batch_size" not in given and "micro_batch_size" not in given:
        for field, number in given.items():
            reader.put(field, number, places[field][0])
        return world_size, None
    try:
        sizes = resolve_batch_sizes(data_parallel_size=world_size or 1, **given)
    except BatchSizeError as error:
        text = str(error)
        for field, (place, _) in places.items():
            text = text.replace(field, place)
        at = places[error.fields[0]][0]
        reader.refuse(at, text.removeprefix(f"{at}: ") + _ways_out(given, world_size or 1))
        return None, None
    reader.put("micro_batch_size", sizes.micro_batch_size, micro[0])
    reader.put("gradient_accumulation_steps", sizes.gradient_accumulation_steps, steps[0])
    return world_size, sizes.global_batch_size if world_size is not None else None


def _ways_out(given: Mapping[str, int], ranks: int) -> str:
    """For three numbers that contradict each other: what each way to mend it changes."""
    if len(given) < 3:
        return ""
    micro, steps = given["micro_batch_size"], given["gradient_accumulation_steps"]
    ways = [f"the global batch would be {micro * steps * ranks}"]
    if given["global_batch_size"] % (micro * ranks) == 0:
        ways.append(f"for the same batch accumulation would be {given['global_batch_size'] // (micro * ranks)}")
    return f"; on {ranks} ranks " + ", or ".join(ways)


def _first(error: ValidationError) -> str:
    return error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
