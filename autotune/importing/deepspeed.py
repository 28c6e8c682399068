"""DeepSpeed's ds_config.json.

Keys are those of DeepSpeed 0.19 (deepspeed.ai/docs/config-json), and older names of them.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from autotune.importing.base import DECIDED_BY_TRAINER, ImportedConfig, Reader, Said, resolve_batch
from engine.config import OptimizerConfig

TOOL = "DeepSpeed"

_PARALLEL = {"tensor_parallel.autotp_size": "tensor parallelism", "pipeline.stages": "pipeline parallelism",
             "sequence_parallel_size": "sequence parallelism"}
_OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "adagrad": "adagrad", "sgd": "sgd", "radam": "radam",
               "rmsprop": "rmsprop"}

_WATCHING = "about watching a run, not about training"
_INSIDE = "about DeepSpeed's own workings; the engine needs no such setting"
_NOT_THERE = "the engine has no such feature; left out"
_SCRIPTS = "the training script's, the same for every configuration; keep it there"
_PASSED_OVER: Mapping[str, str] = {
    **dict.fromkeys((
        "steps_per_print", "wall_clock_breakdown", "dump_state", "comms_logger", "flops_profiler", "tensorboard",
        "wandb", "csv_monitor", "comet", "memory_breakdown", "monitor_config", "timers"), _WATCHING),
    **dict.fromkeys((
        "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "disable_allgather", "checkpoint",
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "fp16.auto_cast",
        "bf16.immediate_grad_update", "bf16.check_grad_overflow", "fp16.consecutive_hysteresis",
        "optimizer.legacy_fusion", "optimizer.params.torch_adam", "optimizer.params.bias_correction"), _INSIDE),
    **dict.fromkeys((f"zero_optimization.{key}" for key in (
        "contiguous_gradients", "reduce_scatter", "allgather_partitions", "round_robin_gradients", "sub_group_size",
        "elastic_checkpoint", "load_from_fp32_weights", "ignore_unused_parameters", "legacy_stage1",
        "stage3_max_live_parameters", "max_live_parameters", "stage3_max_reuse_distance", "max_reuse_distance",
        "stage3_param_persistence_threshold", "param_persistence_threshold", "stage3_model_persistence_threshold",
        "model_persistence_threshold", "stage3_gather_16bit_weights_on_model_save", "memory_efficient_linear",
        "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "use_all_reduce_for_fetch_params", "log_trace_cache_warnings", "override_module_apply",
        "cpu_offload_use_pin_memory", "enable_sanity_checks")), _INSIDE),
    **dict.fromkeys((f"zero_optimization.{section}.{key}" for section in ("offload_optimizer", "offload_param")
                     for key in ("pin_memory", "nvme_path", "buffer_count", "buffer_size", "fast_init", "max_in_cpu",
                                 "pipeline", "pipeline_read", "pipeline_write")), _INSIDE),
    **dict.fromkeys((f"zero_optimization.{key}" for key in (
        "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "mics_shard_size",
        "mics_hierarchical_params_gather", "zero_quantized_nontrainable_weights")), _NOT_THERE),
    **dict.fromkeys((
        "amp", "aio", "compression_training", "curriculum_learning", "data_efficiency", "progressive_layer_drop",
        "sparse_attention", "quantize_training", "eigenvalue", "hybrid_engine", "elasticity", "nebula", "data_types",
        "compile", "fp16.fp16_master_weights_and_grads"), _NOT_THERE),
    "activation_checkpointing": "only concerns models that call DeepSpeed's own checkpoint function; give the engine's "
                                "activation_checkpointing",
    "autotuning": "a study's own work",
    "scheduler": _SCRIPTS,
}


_MARKS = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "communication_data_type", "zero_optimization", "fp16", "bf16", "bfloat16",
    *(place.partition(".")[0] for place in (*_PASSED_OVER, *_PARALLEL))})


def is_deepspeed(content: Mapping[str, Any]) -> bool:
    """Whether a file is one of DeepSpeed's."""
    return bool(_MARKS & content.keys())


def read_deepspeed(content: Mapping[str, Any], *, world_size: int | None = None) -> ImportedConfig:
    """What a ds_config.json says.

    Args:
        world_size: data-parallel ranks; follows from the three batch sizes where not given.

    Raises:
        InvalidRequestError: it contradicts itself or wants what the engine cannot do; names every key at fault.
    """
    reader = Reader(TOOL, content, _PASSED_OVER)
    read_parallelism(reader, _PARALLEL)
    _read_precision(reader)
    _read_zero(reader)
    reader.set("gradient_clipping", "gradient_clipping")
    optimizer = _read_optimizer(reader)
    ranks, global_batch = resolve_batch(
        reader, world_size, total=("train_batch_size", reader.count("train_batch_size")),
        micro=_per_rank(reader, "train_micro_batch_size_per_gpu", "micro_batch_size"),
        steps=_per_rank(reader, "gradient_accumulation_steps", "gradient_accumulation_steps"))
    return reader.result(optimizer=optimizer, world_size=ranks, global_batch_size=global_batch)


def read_parallelism(reader: Reader, degrees: Mapping[str, str]) -> bool:
    """Refuse every degree but 1, by place: ignoring one would change what a rank holds and what a batch is.

    Returns:
        Whether all ranks are data-parallel.
    """
    all_one = True
    for place, name in degrees.items():
        degree = reader.take(place)
        if degree not in (None, 1):
            reader.refuse(place, f"{name} is not supported: ranks are data-parallel; set it to 1 or leave it out")
            all_one = False
    return all_one


def _per_rank(reader: Reader, place: str, field: str) -> Said:
    return place, reader.count(place, if_open=f"{DECIDED_BY_TRAINER}, or search; {field} 1 stands here")


def _read_precision(reader: Reader) -> None:
    decided = f"{DECIDED_BY_TRAINER}; fp32 stands here"
    fp16 = reader.flag("fp16.enabled", if_open=decided)
    bf16 = reader.flag("bf16.enabled", "bfloat16.enabled", if_open=decided)
    if fp16 and bf16:
        reader.refuse("fp16.enabled", "true, and so is bf16.enabled: enable one of them")
    if fp16 or bf16:
        reader.put("precision", "fp16" if fp16 else "bf16", "fp16.enabled" if fp16 else "bf16.enabled")
    for field in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"):
        if fp16:
            reader.set(field, f"fp16.{field}")
        elif reader.take(f"fp16.{field}") is not None:
            reader.note(f"fp16.{field}: has no effect without fp16; left out")
    masters = reader.flag("bf16.bf16_master_weights_and_grads")
    states = reader.flag("bf16.bf16_optimizer_states")
    if bf16 and masters and states:
        reader.put("optimizer_precision", "compute", "bf16.bf16_optimizer_states")
    elif masters or states:
        reader.note("bf16.bf16_master_weights_and_grads, bf16.bf16_optimizer_states: the engine has both in bf16 or "
                    "neither; fp32 stands here")
    reduce_dtype = reader.take("communication_data_type")
    if reduce_dtype is not None:
        name = str(reduce_dtype)
        reader.put("reduce_dtype", {"bfp16": "bf16"}.get(name, name), "communication_data_type")


def _read_zero(reader: Reader) -> None:
    zero = "zero_optimization."
    reader.set("zero_stage", f"{zero}stage")
    stage = reader.fields.get("zero_stage", 0)
    reader.set("reduce_bucket_size", f"{zero}reduce_bucket_size")
    reader.set("allgather_bucket_size", f"{zero}allgather_bucket_size")
    reader.set("prefetch_bucket_size", f"{zero}stage3_prefetch_bucket_size", f"{zero}prefetch_bucket_size")
    reader.set("overlap_comm", f"{zero}overlap_comm")
    theirs: dict[str, int | bool] = {"reduce_bucket_size": 500_000_000, "overlap_comm": stage == 3}
    if stage in (1, 2):
        theirs["allgather_bucket_size"] = 500_000_000
    if stage == 3:
        theirs["prefetch_bucket_size"] = 50_000_000
    missing = [f"{field} ({value})" for field, value in theirs.items()
               if stage and field not in reader.fields and not any(place.endswith(field) for place in reader.open)]
    if missing:
        reader.note("not in the file, so the engine's defaults stand here in place of DeepSpeed's: "
                    f"{', '.join(missing)}")
    _read_offload(reader, stage)


def _read_offload(reader: Reader, stage: Any) -> None:
    zero = "zero_optimization."
    optimizer = _offloaded(reader, f"{zero}offload_optimizer", old=f"{zero}cpu_offload")
    ratio = reader.take(f"{zero}offload_optimizer.ratio")
    parameters = _offloaded(reader, f"{zero}offload_param", old=f"{zero}cpu_offload_params")
    if optimizer and stage == 0:
        reader.note(f"{optimizer}: DeepSpeed offloads the optimizer from stage 1 on, so at stage 0 it is left out")
    elif optimizer:
        reader.put("offload_optimizer_ratio", 1.0, optimizer)
        if ratio is not None and stage == 3:
            reader.put("offload_optimizer_ratio", ratio, f"{zero}offload_optimizer.ratio")
        elif ratio not in (None, 1):
            reader.note(f"{zero}offload_optimizer.ratio: DeepSpeed reads it at stage 3 only; all is offloaded")
    if parameters and stage != 3:
        reader.note(f"{parameters}: DeepSpeed offloads parameters at stage 3 only; left out")
    elif parameters:
        reader.put("offload_param", True, parameters)


def _offloaded(reader: Reader, section: str, *, old: str) -> str | None:
    """The place that turns an offload on, if one does."""
    if reader.flag(old):
        return old
    device = reader.take(f"{section}.device")
    if device == "nvme":
        reader.note(f"{section}.device: nvme cannot be tuned here; host memory (cpu) stands here")
    elif device not in (None, "none", "cpu"):
        reader.refuse(f"{section}.device", f"must be none, cpu or nvme, not {device!r}")
    return f"{section}.device" if device in ("cpu", "nvme") else None


def _read_optimizer(reader: Reader) -> OptimizerConfig | None:
    """None where the file has none, or one that the engine has no word for."""
    kind = reader.take("optimizer.type")
    fields = {field: reader.take(f"optimizer.params.{field}", if_open=f"{DECIDED_BY_TRAINER}; {field} {default} stands "
                                 "here") for field, default in OptimizerConfig() if field != "name"}
    adam_w = reader.take("optimizer.params.adam_w_mode")
    if kind is None:
        return None
    name = _OPTIMIZERS.get(str(kind).lower())
    if name is None:
        reader.note(f"optimizer: the engine has no {kind} by name: give engine.initialize a function that makes it; "
                    "left out")
        return None
    if name == "adam" and adam_w is not False:
        name = "adamw"
        reader.note("optimizer.type: DeepSpeed makes AdamW of Adam unless adam_w_mode is false; adamw stands here")
    try:
        return OptimizerConfig(name=name, **{field: value for field, value in fields.items() if value is not None})
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            field = f".{problem['loc'][0]}" if problem["loc"] else ""
            reader.refuse(f"optimizer.params{field}", problem["msg"].removeprefix("Value error, "))
        return None
