"""Long lists, a page at a time."""

from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Page(Generic[Item]):
    """Part of a list. Pages stay disjoint and complete while items are added.

    Attributes:
        next_cursor: opaque; give it back to get the following page. None at the end.
    """

    items: tuple[Item, ...]
    next_cursor: str | None
