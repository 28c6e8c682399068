"""The way from a `ModelSpec` to a task; each kind's libraries are loaded when it is asked for."""

from engine.spec import GptSpec, HuggingFaceSpec, ModelSpec, PythonSpec, VitSpec
from engine.tasks.base import Task


def build_task(spec: ModelSpec, *, seed: int = 0) -> Task:
    """The task that a specification describes. No weights are made yet, but every module it needs is imported.

    Args:
        seed: of the batches. Weights follow torch's global generator.

    Raises:
        TaskError: the specification cannot be built, or names an entry point that is not allowed.
    """
    if isinstance(spec, GptSpec):
        from engine.tasks.gpt import GptTask

        return GptTask(spec, seed=seed)
    if isinstance(spec, VitSpec):
        from engine.tasks.vit import VitTask

        return VitTask(spec, seed=seed)
    if isinstance(spec, HuggingFaceSpec):
        from engine.tasks.huggingface import build_huggingface_task

        return build_huggingface_task(spec, seed=seed)
    assert isinstance(spec, PythonSpec)
    from engine.tasks.python import load_python_task

    return load_python_task(spec, seed=seed)
