"""Keyword values for `torch.distributed.fsdp.fully_shard`, as JSON, with what belongs around the call."""

from typing import Any

from autotune.export.accelerate import fsdp_offload
from autotune.export.base import ConfigReader, ExportedFile, Source, strict_json

_TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def write_fsdp(source: Source) -> ExportedFile:
    """Values for each block and then for the whole model, in this order.

    Raises:
        ExportError: stages 0 and 1, and offloads of a part.
    """
    reader = ConfigReader(source, "fully_shard")
    stage = reader.take("zero_stage")
    if stage < 2:
        why = "fully_shard always shards" if stage == 0 else "fully_shard shards gradients as well as optimizer states"
        raise reader.refuse("zero_stage", why, "use DistributedDataParallel or the accelerate-fsdp format for stage 0, "
                            "deepspeed or engine for any stage, or tune with zero_stage 2 or 3")
    offload = fsdp_offload(reader)
    content: dict[str, Any] = {
        "fully_shard": {
            "reshard_after_forward": stage == 3,
            "mp_policy": _mixed_precision(reader),
            "offload_policy": {"class": "CPUOffloadPolicy", "pin_memory": not reader.on_cpu} if offload else None,
        },
        "apply_to": _apply_to(reader),
        "world_size": reader.world_size,
        "training": {
            "global_batch_size": source.request.training.global_batch_size,
            "micro_batch_size": reader.take("micro_batch_size"),
            "gradient_accumulation_steps": reader.take("gradient_accumulation_steps"),
            "gradient_clipping": reader.take("gradient_clipping"),
            "activation_checkpointing": reader.take("activation_checkpointing"),
            "compile_blocks": reader.take("compile"),
            "optimizer": source.request.training.optimizer.model_dump(mode="json"),
        },
    }
    if content["training"]["activation_checkpointing"] != "none":
        reader.note("fully_shard has no activation checkpointing: apply torch.utils.checkpoint to each block before it")
    if reader.peek("precision") == "fp16":
        _add_loss_scaling(reader, content)
    if not reader.take("overlap_comm"):
        reader.note("overlap_comm false: fully_shard always overlaps; memory and time may differ from those "
                    f"{reader.known}")
    notes = reader.notes()
    return ExportedFile(filename="fully_shard.json", media_type="application/json", notes=notes,
                        text=strict_json({"notes": list(notes), **content}))


def _mixed_precision(reader: ConfigReader) -> dict[str, Any] | None:
    """Keywords of MixedPrecisionPolicy; None for its default, everything in the parameters' own dtype."""
    precision, reduce = reader.take("precision"), reader.take("reduce_dtype")
    if reader.take("optimizer_precision") == "compute" and precision != "fp32":
        reader.note(f"optimizer_precision compute: build the model in {_TORCH_DTYPES[precision]}; parameters, "
                    "gradients and optimizer states then stay in it")
        return {"reduce_dtype": _TORCH_DTYPES[reduce]} if reduce != precision else None
    if precision == "fp32":
        return {"reduce_dtype": _TORCH_DTYPES[reduce]} if reduce != "fp32" else None
    reader.note("build the model in float32: fully_shard keeps these as master weights")
    return {"param_dtype": _TORCH_DTYPES[precision], "reduce_dtype": _TORCH_DTYPES[reduce]}


def _apply_to(reader: ConfigReader) -> list[str]:
    block = reader.source.model_profile.block_class
    if block is None:
        reader.note("no block repeats in this model: fully_shard it as one")
        return ["model"]
    return [f"each {block}", "model"]


def _add_loss_scaling(reader: ConfigReader, content: dict[str, Any]) -> None:
    static = reader.take("loss_scale")
    content["training"]["loss_scaling"] = {
        "loss_scale": static, "initial_scale_power": reader.take("initial_scale_power"),
        "loss_scale_window": reader.take("loss_scale_window"), "hysteresis": reader.take("hysteresis"),
        "min_loss_scale": reader.take("min_loss_scale")}
    reader.note("fp16 needs loss scaling around fully_shard, torch.amp.GradScaler for example, whose hysteresis is 1 "
                "and which has no smallest scale")
