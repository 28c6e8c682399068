"""Files and directories that all ranks agree on, and that survive a loss of power."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from engine.collectives import Ranks
from engine.errors import ConfigurationError

T = TypeVar("T")


def together(ranks: Ranks, action: Callable[[], T]) -> T:
    """Do something with files on every rank; where one rank fails, all raise its error, and none waits for it.

    Raises:
        ConfigurationError: naming `path`; the same on every rank.
    """
    results: list[T] = []
    problem: str | None = None
    try:
        results.append(action())
    except ConfigurationError as error:
        problem = str(error)
    except OSError as error:
        problem = f"path: {error}"
    for found in ranks.gather_objects(problem):
        if found is not None:
            raise ConfigurationError(found, fields=("path",))
    return results[0]


def real_path(path: str | os.PathLike[str]) -> Path:
    """A path that can name something, absolute and without symbolic links.

    Raises:
        ConfigurationError: no file system takes such a name, or it names the root; names `path`.
    """
    try:
        real = Path(os.path.realpath(path))
    except ValueError as error:  # a NUL, half of a surrogate pair
        raise ConfigurationError(f"path: {os.fspath(path)!r} cannot be a name: {error}", fields=("path",)) from error
    if not real.name:
        raise ConfigurationError(f"path: {real} is the root folder: name something in it", fields=("path",))
    return real


def first_ranks_path(ranks: Ranks, path: Path) -> Path:
    """The first rank's path, on every rank; see `real_path`. Collective.

    Raises:
        ConfigurationError: nothing can be called so; names `path`. The same on every rank.
    """
    found = together(ranks, lambda: real_path(path) if ranks.rank == 0 else path)
    return Path(ranks.gather_objects(os.fspath(found))[0])


def sync(path: Path) -> None:
    """Force what was written to a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
