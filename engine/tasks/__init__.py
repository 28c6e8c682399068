"""What is trained: the bundled tasks and the user's own, behind one small protocol. Torch is loaded on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.tasks.base import Batch, Task
    from engine.tasks.build import build_task

_NEEDS_TORCH = ("Batch", "Task", "build_task")


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        from engine.tasks import base, build

        return getattr(build if name == "build_task" else base, name)
    raise AttributeError(f"module 'engine.tasks' has no attribute {name!r}")


__all__ = ["Batch", "Task", "build_task"]
