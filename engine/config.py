"""`TrainConfig`: every knob the engine has; and the arithmetic of batch sizes.

Names and meanings are the field's own (DeepSpeed, FSDP); sizes are in elements, as in DeepSpeed.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from engine.errors import BatchSizeError
from engine.values import Count, Precision, Real, Value, Whole

Checkpointing = Literal["none", "selective", "full"]

_OTHER_PRECISIONS: Mapping[str, Precision] = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "no": "fp32"}

_OPTIMIZERS_FIELD = "it is the optimizer's: give it there"
_GLOBAL_BATCH = ("it follows: micro_batch_size x gradient_accumulation_steps x ranks; give micro_batch_size and "
                 "gradient_accumulation_steps")


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

    other_names: ClassVar[Mapping[str, str]] = {
        "stage": "zero_stage", "zero": "zero_stage", "zero_optimization": "zero_stage",
        "sharding_strategy": "give zero_stage: 3 for FULL_SHARD, 2 for SHARD_GRAD_OP, 0 for NO_SHARD",
        "batch_size": "micro_batch_size", "per_device_train_batch_size": "micro_batch_size",
        "train_micro_batch_size_per_gpu": "micro_batch_size", "micro_batch_size_per_gpu": "micro_batch_size",
        "global_batch_size": _GLOBAL_BATCH, "train_batch_size": _GLOBAL_BATCH,
        "gradient_accumulation": "gradient_accumulation_steps", "accumulation_steps": "gradient_accumulation_steps",
        "grad_accum_steps": "gradient_accumulation_steps", "accumulate_grad_batches": "gradient_accumulation_steps",
        "fp16": 'give precision "fp16"', "bf16": 'give precision "bf16"',
        "mixed_precision": "precision", "dtype": "precision", "torch_dtype": "precision", "amp": "precision",
        "communication_data_type": "reduce_dtype", "bucket_size": "reduce_bucket_size",
        "allreduce_bucket_size": "reduce_bucket_size", "stage3_prefetch_bucket_size": "prefetch_bucket_size",
        "offload": "offload_optimizer_ratio", "cpu_offload": "offload_optimizer_ratio",
        "offload_optimizer": "offload_optimizer_ratio", "offload_params": "offload_param",
        "gradient_checkpointing": "activation_checkpointing", "checkpointing": "activation_checkpointing",
        "torch_compile": "compile", "max_grad_norm": "gradient_clipping", "grad_clip": "gradient_clipping",
        "clip_grad_norm": "gradient_clipping", "gradient_clip_val": "gradient_clipping",
        **dict.fromkeys(("optimizer", "lr", "learning_rate", "weight_decay", "betas", "eps", "momentum"),
                        _OPTIMIZERS_FIELD),
    }

    @model_validator(mode="before")
    @classmethod
    def _reduce_dtype_follows_precision(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("reduce_dtype") is None:
            precision = data.get("precision")
            known = precision in get_args(Precision)  # else the precision alone is to blame
            return {**data, "reduce_dtype": precision if known else "fp32"}
        return data

    @field_validator("precision", "reduce_dtype", mode="before")
    @classmethod
    def _short_precision(cls, value: Any) -> Any:
        meant = _OTHER_PRECISIONS.get(value) if isinstance(value, str) else None
        if meant is not None:
            raise ValueError(f"unknown precision {value!r}: did you mean {meant!r}?")
        return value

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

    other_names: ClassVar[Mapping[str, str]] = {
        "learning_rate": "lr", "wd": "weight_decay", "l2": "weight_decay", "decay": "weight_decay",
        "epsilon": "eps", "adam_epsilon": "eps", "type": "name", "optimizer": "name", "optim": "name", "kind": "name",
        **dict.fromkeys(("beta", "beta1", "beta2", "adam_beta1", "adam_beta2"), "betas"),
        **dict.fromkeys(("gradient_clipping", "max_grad_norm", "grad_clip", "clip_grad_norm"),
                        "gradients are clipped by gradient_clipping, outside the optimizer"),
    }

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

