"""The user's own task: an entry point in a module that the operator allows."""

import importlib
import inspect
import os
from typing import Any

from engine.errors import TaskError
from engine.spec import ALLOWED_TASKS_VARIABLE, PythonSpec, allowed_prefixes, is_allowed_entry_point
from engine.tasks.base import Task


def load_python_task(spec: PythonSpec, *, seed: int = 0) -> Task:
    """Import the module, call the entry point with the arguments and check what it returns.

    An entry point that takes a `seed` gets the training seed, unless the arguments name one.

    Raises:
        TaskError: not allowed, not importable, not callable, or the result is no task. Errors raised by the user's own
            code pass through as they are.
    """
    prefixes = allowed_prefixes(os.environ.get(ALLOWED_TASKS_VARIABLE, ""))
    if not is_allowed_entry_point(spec.entry_point, prefixes):
        raise TaskError(f"entry point {spec.entry_point} is not allowed here: the operator must list its module, or a "
                        f"package above it, in {ALLOWED_TASKS_VARIABLE}")
    module_name, _, attribute = spec.entry_point.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise TaskError(f"entry point {spec.entry_point}: {error}; the worker looks in its working directory, in "
                        "PYTHONPATH and in installed packages") from error
    make_task = getattr(module, attribute, None)
    if not callable(make_task):
        raise TaskError(f"entry point {spec.entry_point}: module {module_name} has no callable {attribute}")
    return _checked(make_task(**_arguments(make_task, spec.arguments, seed)), spec.entry_point)


def _arguments(make_task: Any, given: dict[str, Any], seed: int) -> dict[str, Any]:
    try:
        parameters = inspect.signature(make_task).parameters
    except ValueError:
        return given
    return {"seed": seed, **given} if "seed" in parameters else given


def _checked(task: Any, entry_point: str) -> Task:
    missing = [name for name in ("build_model", "batch", "loss") if not callable(getattr(task, name, None))]
    if missing:
        raise TaskError(f"entry point {entry_point} returned a {type(task).__name__} without {', '.join(missing)}")
    tokens = getattr(task, "tokens_per_sample", None)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise TaskError(f"entry point {entry_point}: tokens_per_sample must be a whole number of at least 1, not "
                        f"{tokens!r}")
    result: Task = task
    return result
