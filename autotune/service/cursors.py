"""Pages of short lists that are read whole, ordered by a text key."""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import TypeVar

from autotune.domain.errors import FieldError, InvalidRequestError
from autotune.domain.page import Page

Item = TypeVar("Item")


def page_of(items: Sequence[Item], *, key: Callable[[Item], str], cursor: str | None, limit: int) -> Page[Item]:
    """The items after the cursor, at most `limit`.

    Args:
        items: in ascending order of `key`, which is unique.

    Raises:
        InvalidRequestError: a cursor that no page gave.
    """
    rest = items if cursor is None else [item for item in items if key(item) > _decode(cursor)]
    more = len(rest) > limit
    return Page(items=tuple(rest[:limit]), next_cursor=_encode(key(rest[limit - 1])) if more else None)


def _encode(text: str) -> str:
    return base64.urlsafe_b64encode(b"k1:" + text.encode()).decode().rstrip("=")


def _decode(cursor: str) -> str:
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        if raw.startswith(b"k1:"):
            return raw[3:].decode()
    except (binascii.Error, ValueError):
        pass
    raise InvalidRequestError(FieldError("cursor", "not a cursor of this list: leave it out for the first page"))
