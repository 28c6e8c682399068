"""Tasks that go wrong."""

from typing import Any


def refuses() -> Any:
    raise ValueError("bad arg")
