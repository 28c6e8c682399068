"""The submit form: from what a browser sends to the body of ``POST /api/v1/studies``, and back to what it shows.

The form is a view of the same JSON that the API takes. Fields are named by their path in it, so that a problem found
anywhere (schema, batch arithmetic, search space) is shown beside the field it names; what has no field of its own is
shown at the top.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.domain.errors import FieldError
from autotune.domain.request import SearchRequest

EXAMPLE: dict[str, Any] = {
    "name": "gpt-tiny",
    "model": {"kind": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 4096, "sequence_length": 128},
    "training": {"global_batch_size": 32, "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
                 "gradient_clipping": 1.0},
    "hardware": {"device": "auto", "devices": 1, "memory_limit_bytes": None},
    "search": {"sampler": SearchRequest().sampler, "seed": 0},
    "budget": {"max_trials": 20, "max_seconds": 600},
}
"""What the form and the editor start with."""

_HF_CONFIG = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096}

_MODEL_FIELDS: dict[str, tuple[tuple[str, str], ...]] = {
    "gpt": (("layers", "4"), ("hidden", "256"), ("heads", "4"), ("vocab", "4096"), ("sequence_length", "128")),
    "vit": (("layers", "4"), ("hidden", "192"), ("heads", "3"), ("image_size", "64"), ("patch_size", "8"),
            ("channels", "3"), ("classes", "100")),
    "huggingface": (("config", json.dumps(_HF_CONFIG, indent=2)), ("head", "causal_lm"), ("sequence_length", "128")),
    "python": (("entry_point", ""), ("arguments", "{}")),
}
_JSON_FIELDS = frozenset({"config", "arguments"})
_TEXT_FIELDS = frozenset({"head", "entry_point"})

CHOICES: dict[str, tuple[str, ...]] = {
    "zero_stage": ("0", "1", "2", "3"),
    "precision": ("fp32", "bf16", "fp16"),
    "activation_checkpointing": ("none", "selective", "full"),
    "offload_optimizer_ratio": ("0", "0.5", "1"),
    "overlap_comm": ("true", "false"),
}
"""Knobs that the form offers by ticking values; the editor has all of them."""

PURPOSES: dict[str, str] = {"tune": "Measure on these devices", "plan": "Plan for a cluster that is not here"}
"""What a study is for, by its mode. The field is not called `mode`, which tells the form from the editor."""

MEMORY_UNITS: dict[str, int] = {"MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, kw_only=True)
class FormView:
    """What the form shows: every field's text, ticked values of knobs, and problems by field.

    Attributes:
        values: text by field name, such as ``training.global_batch_size`` or ``gpt.layers``.
        ticked: values by knob.
        errors: messages by field name.
        general: problems that no field of the form stands for.
    """

    values: Mapping[str, str]
    ticked: Mapping[str, tuple[str, ...]]
    errors: Mapping[str, tuple[str, ...]]
    general: tuple[FieldError, ...]


def default_values() -> dict[str, str]:
    """Every field's text at first."""
    training, budget = EXAMPLE["training"], EXAMPLE["budget"]
    values = {f"{kind}.{name}": text for kind, fields in _MODEL_FIELDS.items() for name, text in fields}
    return values | {
        "name": EXAMPLE["name"], "kind": "gpt", "purpose": "tune", "hardware.cluster": "",
        "hardware.tensor_parallel": "1", "hardware.pipeline_parallel": "1",
        "training.global_batch_size": str(training["global_batch_size"]),
        "training.optimizer.name": "adamw", "training.optimizer.lr": "3e-4",
        "training.optimizer.weight_decay": str(training["optimizer"]["weight_decay"]),
        "training.gradient_clipping": str(training["gradient_clipping"]), "hardware.device": "auto",
        "hardware.devices": "1", "hardware.memory_limit_bytes": "", "memory_unit": "GiB",
        "search.sampler": EXAMPLE["search"]["sampler"],
        "search.seed": "0", "space": "default", "search.space.micro_batch_size": "",
        "budget.max_trials": str(budget["max_trials"]), "budget.max_seconds": str(budget["max_seconds"]),
        "budget.max_device_seconds": ""}


def request_body(values: Mapping[str, str], ticked: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """The JSON body that a form stands for. What cannot be read as a number stays text: the schema then says so.

    Raises:
        FormError: JSON in a field that cannot be read.
    """
    kind = values.get("kind", "")
    model: dict[str, Any] = {"kind": kind}
    for name, _ in _MODEL_FIELDS.get(kind, ()):
        text = values.get(f"{kind}.{name}", "").strip()
        if name in _JSON_FIELDS:
            model[name] = _json(text or "{}", f"{kind}.{name}")
        elif text or name in _TEXT_FIELDS:
            model[name] = text if name in _TEXT_FIELDS else _number(text)
    plans = values.get("purpose") == "plan"
    optimizer = {name: _typed(values, f"training.optimizer.{name}") for name in ("lr", "weight_decay")}
    search: dict[str, Any] = {} if plans else {"sampler": values.get("search.sampler", "")} | _given(
        values, "search", ("seed",))
    if values.get("space") == "chosen":
        search["space"] = _space(values, ticked)
    return {
        "name": values.get("name", ""), **({"mode": "plan"} if plans else {}), "model": model,
        "training": {**_given(values, "training", ("global_batch_size", "gradient_clipping")),
                     "optimizer": {"name": values.get("training.optimizer.name", "")}
                     | {name: value for name, value in optimizer.items() if value is not None}},
        "hardware": {**(_planned(values) if plans else {"device": values.get("hardware.device", "")}),
                     **_given(values, "hardware", ("devices",)), "memory_limit_bytes": _memory_limit(values)},
        "search": search, **({} if plans else {"budget": _given(
            values, "budget", ("max_trials", "max_seconds", "max_device_seconds"))})}


class FormError(ValueError):
    """A field whose text cannot be read."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.error = FieldError(field, message)


def parse_json(text: str) -> Any:
    """The editor's text.

    Raises:
        FormError: not JSON; says where.
    """
    return _json(text, "json")


Placed = dict[str, tuple[str, ...]]
"""Messages by the form's field."""


def place_errors(errors: Iterable[FieldError], *, kind: str) -> tuple[Placed, tuple[FieldError, ...]]:
    """Problems by the form's field, and those that no field stands for."""
    known = {*default_values(), "search.space", *(f"search.space.{knob}" for knob in CHOICES)}
    placed: Placed = {}
    general: list[FieldError] = []
    for error in errors:
        field = next((name for name in _candidates(error.field, kind) if name in known), None)
        if field is None:
            general.append(error)
        else:
            inner = error.field.removeprefix(f"{field}.") if error.field.startswith(f"{field}.") else ""
            placed[field] = (*placed.get(field, ()), f"{inner}: {error.message}" if inner else error.message)
    return placed, tuple(general)


def _candidates(path: str, kind: str) -> list[str]:
    """Names under which the form may know a path: itself, the chosen model's field, then what encloses it."""
    parts = path.split(".")
    if parts[0] == "model":
        rest = parts[2:] if len(parts) > 2 and parts[1] == kind else parts[1:]
        return [f"{kind}.{rest[0]}"] if rest and rest[0] != "kind" else ["kind"]
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _space(values: Mapping[str, str], ticked: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    space: dict[str, Any] = {}
    for knob, known in CHOICES.items():
        chosen = [value for value in known if value in set(ticked.get(knob, ()))]
        if chosen:
            space[knob] = [_literal(value) for value in chosen]
    sizes = values.get("search.space.micro_batch_size", "").strip()
    if sizes:
        space["micro_batch_size"] = "auto" if sizes == "auto" else [
            _number(size) for size in sizes.replace(",", " ").split()]
    return space


def _planned(values: Mapping[str, str]) -> dict[str, Any]:
    """What only a plan says of hardware: a described cluster and degrees of parallelism."""
    degrees = {name: values.get(f"hardware.{name}", "").strip() for name in ("tensor_parallel", "pipeline_parallel")}
    return {"cluster": values.get("hardware.cluster", ""), **{
        name: text if text == "auto" else [_number(degree) for degree in text.replace(",", " ").split()]
        for name, text in degrees.items() if text}}


def _literal(text: str) -> Any:
    return {"true": True, "false": False}.get(text, _number(text))


def _memory_limit(values: Mapping[str, str]) -> Any:
    number = _typed(values, "hardware.memory_limit_bytes")
    unit = MEMORY_UNITS.get(values.get("memory_unit", ""), 1)
    return round(number * unit) if isinstance(number, int | float) and abs(number) < 1e9 else number


def _given(values: Mapping[str, str], part: str, names: Iterable[str]) -> dict[str, Any]:
    """The named fields that are not empty."""
    typed = {name: _typed(values, f"{part}.{name}") for name in names}
    return {name: value for name, value in typed.items() if value is not None}


def _typed(values: Mapping[str, str], name: str) -> Any:
    text = values.get(name, "").strip()
    return _number(text) if text else None


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise FormError(field, f"not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise FormError(field, "not JSON: nested too deeply") from None
