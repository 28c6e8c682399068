"""Accelerate's YAML, as `accelerate config` writes it: DeepSpeed, FSDP1, FSDP2 and plain data parallelism.

Keys are those of Accelerate 1.10 to 1.15 and older names of them.
"""

from collections.abc import Mapping
from typing import Any

from autotune.domain.errors import FieldError, InvalidRequestError
from autotune.importing.base import ImportedConfig, Reader
from autotune.importing.deepspeed import read_deepspeed, read_parallelism

TOOL = "Accelerate"

_MARKS = frozenset({"distributed_type", "compute_environment", "deepspeed_config", "fsdp_config", "mixed_precision",
                    "num_processes", "parallelism_config"})
_PRECISIONS = {"no": "fp32", "False": "fp32", "bf16": "bf16", "fp16": "fp16"}
_STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0, "True": 3, "False": 2}
"""FSDP's names and numbers (3 is no sharding, not ZeRO's stage 3), and FSDP2's reshard_after_forward."""
_PREFETCH = {"BACKWARD_PRE": True, "BACKWARD_POST": True, "NO_PREFETCH": False}
_PARALLEL = {f"parallelism_config.parallelism_config_{degree}_size": name for degree, name in (
    ("tp", "tensor parallelism"), ("cp", "context parallelism"), ("sp", "sequence parallelism"),
    ("dp_replicate", "replication between shards"))}

_LAUNCHING = "about starting processes, not about training"
_INSIDE = "about the tool's own workings; the engine needs no such setting"
_PASSED_OVER: Mapping[str, str] = {
    **dict.fromkeys((
        "compute_environment", "debug", "machine_rank", "main_process_ip", "main_process_port",
        "main_training_function", "rdzv_backend", "same_network", "use_cpu", "tpu_env", "tpu_use_cluster",
        "tpu_use_sudo", "tpu_name", "tpu_zone", "commands", "command_file", "enable_cpu_affinity", "mpirun_config",
        "ipex_config", "downcast_bf16", "deepspeed_config.deepspeed_multinode_launcher",
        "deepspeed_config.deepspeed_hostfile", "deepspeed_config.deepspeed_exclusion_filter",
        "deepspeed_config.deepspeed_inclusion_filter"), _LAUNCHING),
    **dict.fromkeys((
        "deepspeed_config.zero3_init_flag", "deepspeed_config.zero3_save_16bit_model",
        "deepspeed_config.offload_optimizer_nvme_path", "deepspeed_config.offload_param_nvme_path",
        "dynamo_config.dynamo_mode", "dynamo_config.dynamo_use_dynamic", "dynamo_config.dynamo_use_fullgraph",
        "dynamo_config.dynamo_use_regional_compilation", *(f"fsdp_config.fsdp_{key}" for key in (
            "version", "state_dict_type", "use_orig_params", "sync_module_states", "cpu_ram_efficient_loading",
            "forward_prefetch"))), _INSIDE),
    **dict.fromkeys((f"fsdp_config.fsdp_{key}" for key in (
        "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params")),
        "about what is gathered together; the engine finds the repeated blocks itself"),
    "deepspeed_config.deepspeed_moe_layer_cls_names": "the engine has no such feature; left out",
}


def is_accelerate(content: Mapping[str, Any]) -> bool:
    """Whether a file is one of Accelerate's."""
    return bool(_MARKS & content.keys())


def read_accelerate(content: Mapping[str, Any], *, world_size: int | None = None,
                    deepspeed: Mapping[str, Any] | None = None) -> ImportedConfig:
    """What an Accelerate configuration says.

    Args:
        world_size: ranks, where the file does not say.
        deepspeed: the file that it names as its deepspeed_config_file.

    Raises:
        InvalidRequestError: it contradicts itself or wants what the engine cannot do; names every key at fault.
    """
    reader = Reader(TOOL, content, _PASSED_OVER)
    ranks = _read_ranks(reader, world_size) if read_parallelism(reader, _PARALLEL) else None
    _read_precision(reader)
    if reader.take("deepspeed_config.deepspeed_config_file") is not None:
        return _with_deepspeed(reader, ranks, deepspeed)
    if deepspeed is not None:
        reader.refuse("deepspeed_config.deepspeed_config_file", "names no DeepSpeed file, but one was given beside it: "
                      "name it, or leave it out")
    kind = str(reader.take("distributed_type") or "NO")
    if kind == "DEEPSPEED":
        _read_deepspeed_section(reader)
    elif kind == "FSDP":
        _read_fsdp_section(reader)
    elif not kind.startswith("MULTI_") and kind not in ("NO", "False"):  # YAML reads a bare NO as false
        reader.refuse("distributed_type", f"{kind} is not supported: give DEEPSPEED, FSDP, MULTI_GPU, MULTI_CPU or NO")
    _read_compile(reader)
    reader.note("the micro-batch is your script's, as is the optimizer: micro_batch_size 1 stands here")
    reader.set("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps",
               "gradient_accumulation_steps")
    return reader.result(world_size=ranks)


def _read_ranks(reader: Reader, world_size: int | None) -> int | None:
    """All that say how many ranks there are, which must agree."""
    said = {"num_processes": reader.count("num_processes"),
            "parallelism_config.parallelism_config_dp_shard_size":
                reader.count("parallelism_config.parallelism_config_dp_shard_size")}
    machines, devices = reader.count("num_machines"), reader.take("gpu_ids")
    if devices not in (None, "all"):  # those of every machine
        said["gpu_ids"] = len(str(devices).split(",")) * (machines or 1)
    said["the ranks asked for"] = world_size
    numbers = {place: number for place, number in said.items() if number is not None}
    if len(set(numbers.values())) > 1:
        reader.refuse(next(iter(numbers)), "these must be the same number of ranks: "
                      + ", ".join(f"{place} {number}" for place, number in numbers.items()))
    return next(iter(numbers.values()), None)


def _read_precision(reader: Reader) -> None:
    mixed = reader.take("mixed_precision")
    if mixed is None:
        return
    if str(mixed) not in _PRECISIONS:
        reader.refuse("mixed_precision", f"must be no, bf16 or fp16, not {mixed!r}")
        return
    reader.put("precision", _PRECISIONS[str(mixed)], "mixed_precision")


def _with_deepspeed(reader: Reader, ranks: int | None, deepspeed: Mapping[str, Any] | None) -> ImportedConfig:
    """Everything that is tuned is in the DeepSpeed file."""
    place = "deepspeed_config.deepspeed_config_file"
    if deepspeed is None:
        reader.refuse(place, "a file that another one names is not opened: give it too, with --deepspeed")
    reader.take("distributed_type")
    beside = reader.result()
    found = read_deepspeed(_filled(deepspeed or {}, reader.fields.get("precision")), world_size=ranks)
    mixed = reader.fields.get("precision", found.config.precision)
    if mixed != found.config.precision:
        raise InvalidRequestError(FieldError("mixed_precision", (
            f"means {mixed}, but fp16 and bf16 of the DeepSpeed file mean {found.config.precision}: leave "
            "mixed_precision out, or make them agree")))
    return found.model_copy(update={"notes": (*beside.notes, *found.notes)})


def _filled(deepspeed: Mapping[str, Any], precision: str | None) -> dict[str, Any]:
    """The file with Accelerate's own precision, if it says one, where it leaves that at "auto"."""
    found = dict(deepspeed)
    for name, means in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        section = found.get(name)
        if precision is not None and isinstance(section, Mapping) and section.get("enabled") == "auto":
            found[name] = {**section, "enabled": precision == means}
    return found


def _read_deepspeed_section(reader: Reader) -> None:
    section = "deepspeed_config."
    reader.set("zero_stage", f"{section}zero_stage")
    reader.set("gradient_clipping", f"{section}gradient_clipping")
    if "zero_stage" not in reader.fields:
        reader.put("zero_stage", 2, f"{section}zero_stage")
        reader.note(f"{section}zero_stage: not in the file; Accelerate's default of 2 stands here")
    stage = reader.fields["zero_stage"]
    offloads = (("offload_optimizer_ratio", 1.0, "offload_optimizer_device", stage != 0),
                ("offload_param", True, "offload_param_device", stage == 3))
    for field, value, key, applies in offloads:
        device = reader.take(section + key)
        if device in (None, "none"):
            continue
        if device == "nvme":
            reader.note(f"{section}{key}: nvme cannot be tuned here; host memory (cpu) stands here")
        elif device != "cpu":
            reader.refuse(section + key, f"must be none, cpu or nvme, not {device!r}")
        if applies:
            reader.put(field, value, section + key)
        else:
            reader.note(f"{section}{key}: DeepSpeed does not offload so at stage {stage}; left out")
    reader.note("Accelerate has no keys for DeepSpeed's buckets: the engine's defaults stand here")


def _read_fsdp_section(reader: Reader) -> None:
    section = "fsdp_config."
    keys = (f"{section}fsdp_sharding_strategy", f"{section}fsdp_reshard_after_forward")
    said = {key: value for key in keys if (value := reader.take(key)) is not None}
    stages = {key: _stage(reader, key, value) for key, value in said.items()}
    stage, place = next(iter(stages.values()), _STRATEGIES["FULL_SHARD"]), " and ".join(said or keys)
    if len(set(stages.values())) > 1:
        reader.refuse(place, " and ".join(f"{said[key]!r} is stage {number}" for key, number in stages.items())
                      + ": make them agree, or keep one")
    reader.put("zero_stage", stage, place)
    if reader.flag(f"{section}fsdp_offload_params"):
        reader.put("offload_optimizer_ratio", 1.0, f"{section}fsdp_offload_params")
        if stage == 3:
            reader.put("offload_param", True, f"{section}fsdp_offload_params")
        else:
            reader.note(f"{section}fsdp_offload_params: the engine offloads parameters at stage 3 only; the optimizer "
                        "alone is offloaded")
    prefetch = reader.take(f"{section}fsdp_backward_prefetch", f"{section}fsdp_backward_prefetch_policy")
    if prefetch is not None and str(prefetch) not in _PREFETCH:
        reader.refuse(f"{section}fsdp_backward_prefetch", f"must be one of {', '.join(_PREFETCH)}, not {prefetch!r}")
    elif prefetch is not None:
        reader.put("overlap_comm", _PREFETCH[str(prefetch)], f"{section}fsdp_backward_prefetch")
    if reader.flag(f"{section}fsdp_activation_checkpointing"):
        reader.put("activation_checkpointing", "full", f"{section}fsdp_activation_checkpointing")


def _stage(reader: Reader, place: str, strategy: Any) -> int:
    name = str(strategy)
    stage = _STRATEGIES.get(name.title() if name in ("true", "false") else name)
    if stage is None:
        reader.refuse(place, f"{name} is not supported: give FULL_SHARD, SHARD_GRAD_OP or NO_SHARD")
    return stage or 0


def _read_compile(reader: Reader) -> None:
    backend = reader.take("dynamo_config.dynamo_backend", "dynamo_backend")
    if backend is None or str(backend).upper() in ("NO", "FALSE"):
        return
    if str(backend).upper() == "INDUCTOR":
        reader.put("compile", True, "dynamo_config.dynamo_backend")
    else:
        reader.note(f"dynamo_config.dynamo_backend: the engine compiles with INDUCTOR only, not {backend}; left out")
