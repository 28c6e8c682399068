"""From pydantic's errors to the product's: dotted paths as the user wrote them, one message per field, suggestions.

Pydantic's locations contain more than the user's own keys (``body``, tags of unions) and its messages name no fix for
an unknown key. So the location is walked along the types: what is no key of the model at that place is left out.
"""

import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from autotune.domain.errors import FieldError, InvalidRequestError
from autotune.domain.request import StudyRequest
from autotune.service.checks import did_you_mean

_PLACES = ("body", "query", "path", "header", "cookie")


def parse_request(body: Any) -> StudyRequest:
    """A request from plain data, as a file or a form gives it.

    Raises:
        InvalidRequestError: with every problem found, each at its dotted field.
    """
    try:
        return StudyRequest.model_validate(body)
    except ValidationError as error:
        raise InvalidRequestError(*field_errors(error.errors(include_url=False, include_input=False))) from None


def field_errors(errors: Sequence[Any]) -> tuple[FieldError, ...]:
    """Pydantic's errors on a `StudyRequest` or on parameters, as the product's; alternatives of one field joined."""
    messages: dict[str, list[str]] = {}
    for error in errors:
        location = tuple(error["loc"])
        place = location[0] if location and location[0] in _PLACES else None
        rest = location[1:] if place else location
        if place in (None, "body"):
            path, model = _walk(rest)
        else:
            path, model = [str(part) for part in rest], None
        field, message = _describe(error, path, model)
        known = messages.setdefault(field, [])
        if message not in known:
            known.append(message)
    return tuple(FieldError(field, " or: ".join(texts)) for field, texts in messages.items())


def _describe(error: Any, path: list[str], model: type[BaseModel] | None) -> tuple[str, str]:
    kind, message = error["type"], str(error["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return ".".join(path), message
    if kind == "missing":
        return ".".join(path) or "body", "missing: give it"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return ".".join([*path, "kind"]), _tag_message(error)
    if kind == "value_error" and model is not None:
        first = message.partition(" ")[0].rstrip(":")
        if first in model.model_fields:
            path = [*path, first]
    return ".".join(path) or "body", message


def _tag_message(error: Any) -> str:
    context = error.get("ctx", {})
    expected = str(context.get("expected_tags", "")) or "'gpt', 'vit', 'huggingface', 'python'"
    if error["type"] == "union_tag_not_found":
        return f"missing: give one of {expected}"
    tag = str(context.get("tag", ""))
    return f"unknown kind {tag!r}{did_you_mean(tag, expected.replace(chr(39), '').split(', '))}; give one of {expected}"


def _walk(location: tuple[str | int, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """Returns (the user's own keys of a location, the model at whose level they end)."""
    path: list[str] = []
    current: Any = StudyRequest
    model: type[BaseModel] | None = StudyRequest
    for part in location:
        current = _strip(current)
        union = _members(current)
        if union is not None:
            current = _member(union, part)  # the part is a tag, no key of the user's
            model = current if _is_model(current) else None
            continue
        if _is_model(current):
            path.append(str(part))
            field = current.model_fields.get(str(part))
            model = current
            current = field.annotation if field else None
        elif get_origin(current) is dict:
            path.append(str(part))
            current = get_args(current)[1]
        elif current is None or get_origin(current) in (list, tuple) or current is Any:
            path.append(str(part))
            current = Any
        model = current if _is_model(_strip(current)) else model
    return path, model


def _strip(annotation: Any) -> Any:
    """Without Annotated and without an optional None."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
            continue
        if get_origin(annotation) in (Union, types.UnionType):
            members = [member for member in get_args(annotation) if member is not type(None)]
            if len(members) == 1:
                annotation = members[0]
                continue
        return annotation


def _members(annotation: Any) -> list[Any] | None:
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for member in get_args(annotation) if member is not type(None)]
    return None


def _member(members: list[Any], tag: str | int) -> Any:
    for member in map(_strip, members):
        if _is_model(member) and member.__name__ == tag:
            return member
        kind = getattr(member, "model_fields", {}).get("kind")
        if kind is not None and get_origin(kind.annotation) is Literal and tag in get_args(kind.annotation):
            return member
    return next((member for member in map(_strip, members)
                 if get_origin(member) is list and str(tag).startswith("list")), None)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
