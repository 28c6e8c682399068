"""What of a request is refused before anything is stored, beyond its schema and its search space. Pure."""

import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Any

from autotune.domain.errors import FieldError, InvalidRequestError
from autotune.domain.hardware import Host
from autotune.domain.request import StudyRequest
from autotune.search.layouts import check_layouts
from autotune.search.space import parse_space
from autotune.settings import Settings
from engine.errors import ConfigurationError
from engine.spec import HuggingFaceSpec, PythonSpec, VitSpec

MAX_DEPTH = 40
"""How deep a request may nest: pydantic's serializer gives up at 255, a browser's table long before."""

MAX_IDEMPOTENCY_KEY = 255

MAX_IMAGE_VALUES = 2**26
"""Numbers in one image: samples are made for real, the first of them before any memory is predicted."""

_LARGEST = {
    "model.layers": 10_000, "model.hidden": 2**20, "model.heads": 2**16, "model.vocab": 2**26,
    "model.sequence_length": 2**24, "model.image_size": 2**14, "model.patch_size": 2**14, "model.channels": 2**12,
    "model.classes": 2**26, "training.global_batch_size": 2**24, "hardware.devices": 2**16,
}
"""Beyond every machine there is. Past these, numbers are mistakes, and arithmetic on them would take for ever."""


_LARGEST_IN_CONFIG = dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 10_000) | {
    "num_labels": 2**20, "vocab_size": 2**26, "image_size": 2**12, "num_channels": 2**6}
"""The same for a transformers configuration: building it takes time and memory as these, before anything is known."""


def check_sizes(request: StudyRequest) -> None:
    """Refuse sizes beyond all reason.

    Raises:
        InvalidRequestError: names every field at fault.
    """
    problems = []
    for path, largest in _LARGEST.items():
        part, _, name = path.partition(".")
        value = getattr(getattr(request, part), name, None)
        if isinstance(value, int) and value > largest:
            problems.append(FieldError(path, f"{value} is out of range: give at most {largest}"))
    if isinstance(request.model, VitSpec):
        values = request.model.image_size**2 * request.model.channels
        if values > MAX_IMAGE_VALUES:
            problems.append(FieldError(
                "model.image_size", f"{values} values in an image are out of range: give at most {MAX_IMAGE_VALUES}"))
    if isinstance(request.model, HuggingFaceSpec):
        problems.extend(_config_problems(request.model.config, "model.config"))
    if problems:
        raise InvalidRequestError(*problems)


def _config_problems(config: dict[str, Any], path: str) -> Iterator[FieldError]:
    """Sizes beyond all reason in a transformers configuration and those nested in it."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _config_problems(value, f"{path}.{name}")
        largest = _LARGEST_IN_CONFIG.get(name)
        if largest is not None and isinstance(value, int | float) and value > largest:
            yield FieldError(f"{path}.{name}", f"{value} is out of range: give at most {largest}")


def check_task(request: StudyRequest, settings: Settings) -> None:
    """Refuse code that the operator has not allowed.

    Raises:
        InvalidRequestError: a python model outside the allowed prefixes.
    """
    if not isinstance(request.model, PythonSpec) or settings.allows_task(request.model.entry_point):
        return
    allowed = ", ".join(settings.allowed_tasks) or "none"
    raise InvalidRequestError(FieldError(
        "model.entry_point", f"{request.model.entry_point!r} is not under a module prefix that the operator allows "
        f"with AUTOTUNE_ALLOWED_TASKS (now: {allowed})"))


def check_devices(request: StudyRequest, hosts: tuple[Host, ...]) -> None:
    """Refuse what no host seen so far could ever give. Before the first host reports, anything may be asked for.

    Raises:
        InvalidRequestError: a kind or number of devices that no host has.
    """
    if not hosts or request.mode == "plan":
        return
    wanted = request.hardware
    usable = [host for host in hosts if wanted.device in ("auto", host.device_type)]
    if not usable:
        kinds = ", ".join(sorted({host.device_type for host in hosts}))
        raise InvalidRequestError(FieldError(
            "hardware.device", f"no host has {wanted.device} devices; there are: {kinds}"))
    largest = max(host.device_count for host in usable)
    if wanted.devices > largest:
        raise InvalidRequestError(FieldError(
            "hardware.devices",
            f"{wanted.devices} asked for, but the largest host has {largest}: give at most {largest}"))


def check_space(request: StudyRequest) -> None:
    """Refuse batch sizes, baselines and search spaces with which nothing could run.

    Raises:
        InvalidRequestError: names every field at fault.
    """
    try:
        check_layouts(request) if request.mode == "plan" else parse_space(request)
    except ConfigurationError as error:
        raise InvalidRequestError(*(FieldError(f"search.baseline.{field}", str(error))
                                    for field in error.fields)) from error


def check_idempotency_key(key: str) -> None:
    """Refuse a key that could not be stored or compared.

    Raises:
        InvalidRequestError: empty, too long, or with unprintable characters.
    """
    if not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY or not key.isascii() or not key.isprintable():
        raise InvalidRequestError(FieldError(
            "Idempotency-Key", f"give 1 to {MAX_IDEMPOTENCY_KEY} printable ASCII characters"))


def check_free_parts(request: StudyRequest) -> None:
    """`check_plain` on the parts of a request that have no schema of their own.

    Raises:
        InvalidRequestError: names the path.
    """
    if isinstance(request.model, HuggingFaceSpec):
        check_plain(request.model.config, "model.config")
    if isinstance(request.model, PythonSpec):
        check_plain(request.model.arguments, "model.arguments")
    check_plain(request.search.space, "search.space")
    check_plain(request.search.baseline, "search.baseline")


def check_plain(value: Any, path: str = "", depth: int = 0) -> None:
    """Refuse what JSON text or a database cannot hold: non-finite numbers, NUL and lone surrogates, deep nesting.

    Python's JSON reader lets these pass (``NaN``, ``1e999``, ``"\\ud800"``), and free-form parts of a request, such as
    a transformers configuration, have no schema that would stop them.

    Raises:
        InvalidRequestError: names the path.
    """
    if depth > MAX_DEPTH:
        raise InvalidRequestError(FieldError(path[:200], f"nested deeper than {MAX_DEPTH} levels"))
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequestError(FieldError(path, "not a finite number: JSON has no NaN or infinity"))
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(str(key), path)
            check_plain(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{path}.{index}" if path else str(index), depth + 1)


def _check_text(text: str, path: str) -> None:
    if "\x00" in text:
        raise InvalidRequestError(FieldError(path, "contains a NUL character: remove it"))
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequestError(FieldError(path, "contains half of a surrogate pair: not valid Unicode text"))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``: did you mean 'x'?`` where one of the known words is close, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""
