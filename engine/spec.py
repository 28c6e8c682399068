"""What is trained, as data: the `model` of a request. `engine.tasks.build_task` turns it into a task."""

import hashlib
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.values import Count, Value


class GptSpec(Value):
    """The bundled decoder language model."""

    kind: Literal["gpt"]
    layers: Count = 4
    hidden: Count = Field(256, description="width of the residual stream")
    heads: Count = 4
    vocab: Count = 4096
    sequence_length: Count = 128

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by heads {self.heads}")
        return self


class VitSpec(Value):
    """The bundled vision transformer, an image classifier."""

    kind: Literal["vit"]
    layers: Count = 4
    hidden: Count = 192
    heads: Count = 3
    image_size: Count = Field(64, description="pixels on a side, square")
    patch_size: Count = 8
    channels: Count = 3
    classes: Count = 100

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by heads {self.heads}")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is not divisible by patch_size {self.patch_size}")
        return self


class HuggingFaceSpec(Value):
    """Any transformers causal language model or image classifier, built from its config.json with random weights."""

    kind: Literal["huggingface"]
    config: dict[str, Any] = Field(description="the body of a transformers config.json, model_type included")
    head: Literal["causal_lm", "image_classification"] = "causal_lm"
    sequence_length: Count = Field(128, description="tokens per sample; causal language models only")

    @model_validator(mode="after")
    def _has_model_type(self) -> Self:
        if not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs model_type, as in the model's config.json, for example \"llama\"")
        return self


class PythonSpec(Value):
    """The user's own task: an entry point that the operator allows by prefix (AUTOTUNE_ALLOWED_TASKS)."""

    kind: Literal["python"]
    entry_point: str = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
                             description="package.module:make_task")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the entry point")


ALLOWED_TASKS_VARIABLE = "AUTOTUNE_ALLOWED_TASKS"


def allowed_prefixes(text: str) -> tuple[str, ...]:
    """The module prefixes in the operator's comma-separated list."""
    return tuple(prefix for prefix in (part.strip() for part in text.split(",")) if prefix)


def is_allowed_entry_point(entry_point: str, prefixes: tuple[str, ...]) -> bool:
    """Whether an entry point's module is one of the prefixes or lies below one; `ab` does not allow `abc`."""
    module = entry_point.partition(":")[0]
    return any(f"{module}.".startswith(f"{prefix.rstrip('.')}.") for prefix in prefixes)


ModelSpec = Annotated[GptSpec | VitSpec | HuggingFaceSpec | PythonSpec, Field(discriminator="kind")]


def spec_fingerprint(spec: ModelSpec) -> str:
    """Hex digest that is equal for equal specifications, whatever the order of keys."""
    import json

    return hashlib.sha256(json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:32]
