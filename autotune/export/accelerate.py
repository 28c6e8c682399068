"""Accelerate's YAML for ``accelerate launch --config_file``: the DeepSpeed flavour and the FSDP ones.

Keys are those of Accelerate 1.10 to 1.15. Everything without a key of its own is in the comments at the top.
"""

from typing import Any

import yaml

from autotune.export.base import ConfigReader, ExportedFile, Source

_MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def write_accelerate_deepspeed(source: Source) -> ExportedFile:
    """The values that Accelerate has keys for; DeepSpeed's buckets need the `deepspeed-hf` file beside it.

    Raises:
        ExportError: stage 0 with offload, which DeepSpeed does not have.
    """
    reader = ConfigReader(source, "Accelerate's DeepSpeed section")
    stage, ratio = reader.take("zero_stage"), reader.take("offload_optimizer_ratio")
    if ratio > 0 and stage == 0:
        raise reader.refuse("offload_optimizer_ratio", "DeepSpeed offloads the optimizer from stage 1 on, not at stage "
                            "0", "use the engine format, or tune with zero_stage 1")
    if 0 < ratio < 1:
        reader.note(f"offload_optimizer_ratio {ratio} is written as a full offload, the only one Accelerate has: less "
                    f"device memory, slower steps than {reader.known}")
    section: dict[str, Any] = {
        "zero_stage": stage,
        "gradient_accumulation_steps": reader.take("gradient_accumulation_steps"),
        "offload_optimizer_device": "cpu" if ratio > 0 else "none",
        "offload_param_device": "cpu" if reader.take("offload_param") else "none",
        "zero3_init_flag": stage == 3,
        "zero3_save_16bit_model": stage == 3,
    }
    clipping = reader.take("gradient_clipping")
    if clipping > 0:
        section["gradient_clipping"] = clipping
    reader.note("DeepSpeed's bucket sizes have no key here: for all values save the deepspeed-hf export as "
                "ds_config_hf.json, keep only 'deepspeed_config_file: ds_config_hf.json' and zero3_init_flag in "
                "deepspeed_config, and leave out mixed_precision")
    _note_optimizer(reader)
    return _file(reader, {"distributed_type": "DEEPSPEED", "deepspeed_config": section, **_common(reader)},
                 "accelerate_deepspeed.yaml")


def write_accelerate_fsdp2(source: Source) -> ExportedFile:
    """FSDP2: stage 3 reshards after forward, stage 2 does not; stage 0 is plain data parallelism.

    Raises:
        ExportError: stage 1, or an offload that FSDP does not have.
    """
    reader = ConfigReader(source, "Accelerate's FSDP section")
    if reader.peek("zero_stage") == 0:
        return _data_parallel(reader)
    stage = _fsdp_stage(reader)
    section = {"fsdp_version": 2, "fsdp_reshard_after_forward": stage == 3, **_fsdp_section(reader)}
    return _file(reader, {"distributed_type": "FSDP", "fsdp_config": section, **_common(reader)},
                 "accelerate_fsdp.yaml")


def write_accelerate_fsdp1(source: Source) -> ExportedFile:
    """FSDP1, for older set-ups: FULL_SHARD, SHARD_GRAD_OP and NO_SHARD stand for stages 3, 2 and 0.

    Raises:
        ExportError: stage 1, or an offload that FSDP does not have.
    """
    reader = ConfigReader(source, "Accelerate's FSDP section")
    stage = 0 if reader.peek("zero_stage") == 0 else _fsdp_stage(reader)
    reader.take("zero_stage")
    section = {
        "fsdp_version": 1,
        "fsdp_reshard_after_forward": {3: "FULL_SHARD", 2: "SHARD_GRAD_OP", 0: "NO_SHARD"}[stage],
        "fsdp_use_orig_params": True,
        "fsdp_backward_prefetch": "BACKWARD_PRE" if reader.take("overlap_comm") else "NO_PREFETCH",
        "fsdp_sync_module_states": True,
        **_fsdp_section(reader),
    }
    return _file(reader, {"distributed_type": "FSDP", "fsdp_config": section, **_common(reader)},
                 "accelerate_fsdp1.yaml")


def _fsdp_stage(reader: ConfigReader) -> int:
    stage: int = reader.take("zero_stage")
    if stage == 1:
        raise reader.refuse("zero_stage", "FSDP shards gradients whenever it shards optimizer states",
                            "use one of deepspeed, deepspeed-hf, accelerate and engine, or tune with zero_stage 2")
    return stage


def _fsdp_section(reader: ConfigReader) -> dict[str, Any]:
    checkpointing = reader.take("activation_checkpointing")
    if checkpointing == "selective":
        reader.note("activation_checkpointing selective is written as full, the only one Accelerate has: less memory, "
                    f"slower steps than {reader.known}")
    _note_optimizer(reader)
    return {
        **_wrapping(reader),
        "fsdp_offload_params": fsdp_offload(reader),
        "fsdp_activation_checkpointing": checkpointing != "none",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
    }


def fsdp_offload(reader: ConfigReader) -> bool:
    """FSDP moves parameters, gradients and optimizer states to the host together, or nothing.

    Raises:
        ExportError: only a part of them was offloaded.
    """
    ratio, parameters = reader.take("offload_optimizer_ratio"), reader.take("offload_param")
    if (ratio, parameters) == (0, False):
        return False
    if (ratio, parameters) == (1, True):
        return True
    name = "offload_optimizer_ratio" if ratio > 0 else "offload_param"
    raise reader.refuse(name, "FSDP offloads parameters and optimizer states together and entirely, or not at all",
                        "use deepspeed, accelerate or engine, or tune with offload_param and offload_optimizer_ratio "
                        "both on or both off")


def _wrapping(reader: ConfigReader) -> dict[str, Any]:
    """By the class of the blocks that the model really repeats; never a guess."""
    model = reader.source.model_profile
    if model.block_class is not None:
        return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": model.block_class}
    reader.note("no block repeats in this model, so modules are wrapped by size")
    return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": max(model.parameters // 8, 1)}


def _data_parallel(reader: ConfigReader) -> ExportedFile:
    """Stage 0: DistributedDataParallel, which FSDP2 has no word for."""
    reader.take("zero_stage")
    if reader.peek("offload_optimizer_ratio") > 0:
        raise reader.refuse("offload_optimizer_ratio", "data parallelism without sharding has no offload",
                            "use the engine format")
    kind = "NO" if reader.world_size == 1 else "MULTI_CPU" if reader.on_cpu else "MULTI_GPU"
    reader.note(f"stage 0 shards nothing, which FSDP2 has no word for: written as {kind}, plain data parallelism")
    if reader.world_size > 1:
        bucket_bytes = reader.take("reduce_bucket_size") * (4 if reader.peek("precision") == "fp32" else 2)
        reader.note("reduce_bucket_size is a setting of your script: DistributedDataParallelKwargs(bucket_cap_mb="
                    f"{max(round(bucket_bytes / 2**20), 1)})")
    _note_optimizer(reader)
    return _file(reader, {"distributed_type": kind, **_common(reader)}, "accelerate_ddp.yaml")


def _common(reader: ConfigReader) -> dict[str, Any]:
    precision = reader.take("precision")
    mixed = _MIXED[precision]
    if reader.take("optimizer_precision") == "compute" and precision != "fp32":
        mixed = "no"
        reader.note(f"optimizer_precision compute: load the model in {precision} (dtype=torch.bfloat16) and leave "
                    "mixed_precision at 'no'; parameters and optimizer states then stay in it")
    common: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": mixed,
        "num_processes": reader.world_size,
        "num_machines": reader.nodes,
        "machine_rank": 0,
        "use_cpu": reader.on_cpu,
    }
    if reader.nodes > 1:
        reader.note("on each machine set machine_rank, and main_process_ip and main_process_port to those of the first")
    if reader.take("compile"):
        common["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    return common


def _note_optimizer(reader: ConfigReader) -> None:
    optimizer = reader.source.request.training.optimizer
    reader.note(f"the optimizer is made by your script; {reader.chosen} with {optimizer.name}, lr {optimizer.lr}")


def _file(reader: ConfigReader, content: dict[str, Any], filename: str) -> ExportedFile:
    notes = reader.notes()
    comments = "".join(f"# - {note}\n" for note in notes)
    return ExportedFile(filename=filename, media_type="application/yaml", notes=notes,
                        text=f"# For accelerate launch --config_file {filename}\n{comments}"
                             f"{yaml.safe_dump(content, sort_keys=False)}")
