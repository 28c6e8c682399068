"""`TrainConfig`: every knob the engine has; and the arithmetic of batch sizes.

Names and meanings are the field's own (DeepSpeed, FSDP); sizes are in elements, as in DeepSpeed.
"""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.errors import BatchSizeError
from engine.values import Count, Precision, Real, Value, Whole

Checkpointing = Literal["none", "selective", "full"]


class TrainConfig(Value):
    """How a model is trained, complete: what is not given takes its default, nothing is left open.

    Raises:
        pydantic.ValidationError: an unknown field, a value out of range, or a combination that cannot run.
    """

    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="what is sharded: 0 nothing, 1 optimizer states, "
                                            "2 and gradients, 3 and parameters (arXiv 1910.02054)")
    micro_batch_size: Count = Field(1, description="samples per rank and forward pass")
    gradient_accumulation_steps: Count = Field(1, description="forward passes per optimizer step")
    precision: Precision = Field("fp32", description="dtype of parameters, activations and gradients in compute")
    optimizer_precision: Literal["fp32", "compute"] = Field(
        "fp32", description="fp32: master weights and states in fp32; compute: in the compute precision")
    reduce_dtype: Precision = Field("fp32", description="dtype gradients are reduced in; the precision where not given")
    reduce_bucket_size: Count = Field(2_000_000, description="elements reduced in one collective")
    allgather_bucket_size: Count = Field(2_000_000, description="elements gathered in one collective")
    prefetch_bucket_size: Count = Field(10_000_000, description="elements gathered ahead of use (stage 3)")
    overlap_comm: bool = Field(True, description="run collectives beside the backward pass")
    offload_optimizer_ratio: Real = Field(0.0, ge=0, le=1, description="share of the optimizer states kept and "
                                           "updated on the host: 0 none, 1 all")
    offload_param: bool = Field(False, description="keep parameter shards on the host (stage 3)")
    activation_checkpointing: Checkpointing = "none"
    compile: bool = Field(False, description="torch.compile each repeated block")
    gradient_clipping: Real = Field(0.0, ge=0, description="largest global gradient norm; 0: no clipping")
    loss_scale: Real = Field(0.0, ge=0, description="fp16: a static loss scale; 0: dynamic")
    initial_scale_power: Whole = Field(16, ge=0, le=32, description="fp16, dynamic: the first scale is 2 to this power")
    loss_scale_window: Count = Field(1000, description="fp16, dynamic: steps without overflow before the scale doubles")
    hysteresis: Count = Field(2, description="fp16, dynamic: overflows since the scale last doubled before it halves")
    min_loss_scale: Real = Field(1.0, gt=0, description="fp16, dynamic: the scale's floor")

    @model_validator(mode="before")
    @classmethod
    def _reduce_dtype_follows_precision(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("reduce_dtype") is None:
            return {**data, "reduce_dtype": data.get("precision", "fp32")}
        return data

    @field_validator("zero_stage", mode="before")
    @classmethod
    def _whole_stage(cls, value: Any) -> Any:
        if isinstance(value, bool | float):
            raise ValueError(f"must be 0, 1, 2 or 3, not {value!r}")
        return value

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.offload_param and self.zero_stage != 3:
            raise ValueError(f"offload_param needs zero_stage 3, not {self.zero_stage}: set zero_stage to 3 or "
                             "offload_param to false")
        if self.optimizer_precision == "compute" and self.precision == "fp16":
            raise ValueError("optimizer_precision compute cannot be used with precision fp16, whose range is too small "
                             "for optimizer states: use bf16, or optimizer_precision fp32")
        return self

    def global_batch_size(self, data_parallel_size: int) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * data_parallel_size


class OptimizerConfig(Value):
    """A stock `torch.optim` optimizer, by name, with the arguments that users set.

    A field that the named optimizer does not have is refused when set to anything but its default.
    """

    name: Literal["adamw", "adam", "sgd", "adagrad", "radam", "rmsprop"] = "adamw"
    lr: Real = Field(1e-3, ge=0)
    weight_decay: Real = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: Real = Field(1e-8, gt=0)
    momentum: Real = Field(0.0, ge=0, lt=1, description="sgd and rmsprop only")

    @model_validator(mode="after")
    def _fields_apply(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas}")
        if self.betas != (0.9, 0.999) and self.name not in ("adamw", "adam", "radam"):
            raise ValueError(f"betas do not apply to {self.name}: leave them out, or use adamw, adam or radam")
        if self.eps != 1e-8 and self.name == "sgd":
            raise ValueError("eps does not apply to sgd: leave it out")
        if self.momentum and self.name not in ("sgd", "rmsprop"):
            raise ValueError(f"momentum does not apply to {self.name}: leave it out, or use sgd or rmsprop")
        return self


class BatchSizes(Value):
    """The three numbers that fix a step's batch, consistent with the data-parallel size they were resolved for."""

    global_batch_size: Count
    micro_batch_size: Count
    gradient_accumulation_steps: Count


def resolve_batch_sizes(
    *,
    data_parallel_size: int,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
) -> BatchSizes:
    """Complete and check global = micro x accumulation x data-parallel size.

    With only the global batch given, accumulation is 1; with only the micro-batch given, so too.

    Raises:
        BatchSizeError: nothing to go by, a remainder, or a contradiction.
    """
    given, micro, accumulation, ranks = (
        global_batch_size, micro_batch_size, gradient_accumulation_steps, data_parallel_size)
    if given is None and micro is None:
        raise BatchSizeError("give one of global_batch_size and micro_batch_size",
                             fields=("global_batch_size", "micro_batch_size"))
    if given is None:
        assert micro is not None
        accumulation = accumulation or 1
        return BatchSizes(global_batch_size=micro * accumulation * ranks, micro_batch_size=micro,
                          gradient_accumulation_steps=accumulation)
    if micro is not None and accumulation is not None:
        if micro * accumulation * ranks != given:
            raise BatchSizeError(
                f"global_batch_size must be micro_batch_size x gradient_accumulation_steps x data-parallel size: "
                f"{given} != {micro}*{accumulation}*{ranks}",
                fields=("global_batch_size", "micro_batch_size", "gradient_accumulation_steps"))
        return BatchSizes(global_batch_size=given, micro_batch_size=micro, gradient_accumulation_steps=accumulation)
    if micro is None and accumulation is None:
        accumulation = 1
    if micro is None:
        micro = _divide(given, accumulation, ranks, field="gradient_accumulation_steps")
    else:
        accumulation = _divide(given, micro, ranks, field="micro_batch_size")
    assert accumulation is not None
    return BatchSizes(global_batch_size=given, micro_batch_size=micro, gradient_accumulation_steps=accumulation)


def _divide(global_batch_size: int, known: int | None, ranks: int, *, field: str) -> int:
    assert known is not None
    if global_batch_size % ranks:
        raise BatchSizeError(f"global_batch_size: {global_batch_size} not divisible by {ranks} (data-parallel size)",
                             fields=("global_batch_size",))
    if global_batch_size % (known * ranks):
        raise BatchSizeError(
            f"global_batch_size: {global_batch_size} not divisible by {known * ranks} "
            f"({field} {known} x data-parallel size {ranks})", fields=("global_batch_size", field))
    return global_batch_size // (known * ranks)


def require_global_batch(config: TrainConfig, *, global_batch_size: int, data_parallel_size: int) -> None:
    """Check that a configuration trains on the global batch asked for.

    Raises:
        BatchSizeError: it does not.
    """
    resolve_batch_sizes(data_parallel_size=data_parallel_size, global_batch_size=global_batch_size,
                        micro_batch_size=config.micro_batch_size,
                        gradient_accumulation_steps=config.gradient_accumulation_steps)

