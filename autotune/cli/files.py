"""Studies from files: the body of ``POST /studies`` as JSON or YAML."""

import json
import sys
from pathlib import Path
from typing import Any

from autotune.domain.errors import FieldError, InvalidRequestError
from autotune.domain.request import StudyRequest


def read_study(path: Path) -> StudyRequest:
    """The study in a file; ``-`` is standard input.

    Raises:
        InvalidRequestError: the file cannot be read, is neither JSON nor YAML, or is no valid study; names the file and
            every field at fault.
    """
    return parse_study(read_mapping(path, "study"), path)


def parse_study(body: dict[str, Any], path: Path) -> StudyRequest:
    """A study from what a file says.

    Raises:
        InvalidRequestError: it is no valid study; names the file and every field at fault.
    """
    from autotune.service.fields import parse_request

    try:
        return parse_request(body)
    except InvalidRequestError as error:
        raise InvalidRequestError(*(
            FieldError(f"{path}: {item.field}", item.message) for item in error.errors)) from None


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """What a JSON or YAML file says; ``-`` is standard input.

    Raises:
        InvalidRequestError: the file cannot be read, is neither JSON nor YAML, or holds something else.
    """
    body = _parse(_read(path), path)
    if not isinstance(body, dict):
        raise InvalidRequestError(FieldError(str(path), f"a {what} is a mapping, not {_kind(body)}"))
    return body


def _read(path: Path) -> str:
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(FieldError(str(path), f"cannot be read: {error.strerror}")) from None
    except UnicodeDecodeError:
        raise InvalidRequestError(FieldError(str(path), "is not UTF-8 text")) from None


def _parse(text: str, path: Path) -> Any:
    if path.suffix.lower() == ".json" or text.lstrip().startswith("{"):
        try:
            return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, path))
        except json.JSONDecodeError as error:
            if path.suffix.lower() == ".json":
                raise InvalidRequestError(FieldError(
                    str(path), f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}")) from None
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that comes twice, of which YAML's own would drop the first."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            _unique([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)
                     and key.value != "<<"], path)
            return node

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InvalidRequestError(FieldError(
            str(path), f"is neither JSON nor YAML: {getattr(error, 'problem', None) or error}{where}")) from None


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """The pairs as a mapping.

    Raises:
        InvalidRequestError: a key comes twice.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidRequestError(FieldError(f"{path}: {key}", "is given twice: keep one"))
        found[key] = value
    return found


def _kind(body: Any) -> str:
    if isinstance(body, list):
        return "a list"
    return "nothing" if body is None else "text" if isinstance(body, str) else repr(body)
