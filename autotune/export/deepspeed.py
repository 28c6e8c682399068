"""DeepSpeed's ds_config.json: plain, with every value written out; and for the Hugging Face integration, where the
optimizer's arguments are left to the trainer ("auto") and everything that was tuned is a number.

Keys are those of DeepSpeed 0.19 (deepspeed.ai/docs/config-json).
"""

import math
from typing import Any

from autotune.export.base import ConfigReader, ExportedFile, Source, strict_json

_TESTED = ("adam", "adamw", "adagrad")
_TYPES = {"adamw": "AdamW", "adam": "Adam", "adagrad": "Adagrad", "sgd": "SGD", "radam": "RAdam", "rmsprop": "RMSprop"}
"""DeepSpeed's own implementations for the first three; other names are looked up in torch.optim."""


def write_deepspeed(source: Source) -> ExportedFile:
    """Plain DeepSpeed: no "auto" anywhere.

    Raises:
        ExportError: see `deepspeed_config`.
    """
    reader = ConfigReader(source, "DeepSpeed")
    return _file(deepspeed_config(reader), reader, "ds_config.json")


def write_deepspeed_hf(source: Source) -> ExportedFile:
    """For the Hugging Face Trainer and Accelerate.

    The batch sizes and everything else that was tuned stay numbers, so that the trainer reports a mismatch with its own
    arguments instead of training on another global batch.

    Raises:
        ExportError: see `deepspeed_config`.
    """
    reader = ConfigReader(source, "DeepSpeed")
    content = deepspeed_config(reader)
    content["optimizer"]["params"] = {
        name: value if name == "adam_w_mode" else "auto" for name, value in content["optimizer"]["params"].items()}
    config, optimizer = source.config, source.request.training.optimizer
    flag = "" if config.precision == "fp32" else f" --{config.precision}"
    reader.note(f"run the trainer with --per_device_train_batch_size {config.micro_batch_size} "
                f"--gradient_accumulation_steps {config.gradient_accumulation_steps} --max_grad_norm "
                f"{config.gradient_clipping}{flag}: it refuses other values")
    reader.note(f"\"auto\" in the optimizer's block takes the trainer's arguments; {reader.chosen} with lr "
                f"{optimizer.lr}, weight_decay {optimizer.weight_decay}, betas {list(optimizer.betas)}, "
                f"eps {optimizer.eps}")
    return _file(content, reader, "ds_config_hf.json")


def _file(content: dict[str, Any], reader: ConfigReader, filename: str) -> ExportedFile:
    notes = reader.notes()
    return ExportedFile(filename=filename, media_type="application/json", notes=notes,
                        text=strict_json({"_comment": list(notes), **content}))


def deepspeed_config(reader: ConfigReader) -> dict[str, Any]:
    """The file's content, without comments.

    Raises:
        ExportError: stage 0 with offload, or optimizer states in 16 bit at stage 0, which DeepSpeed does not have.
    """
    micro, steps = reader.take("micro_batch_size"), reader.take("gradient_accumulation_steps")
    content: dict[str, Any] = {
        "train_batch_size": micro * steps * reader.world_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": reader.take("gradient_clipping"),
        "communication_data_type": reader.take("reduce_dtype"),
        "zero_optimization": _zero(reader),
        **_precision(reader),
        "optimizer": _optimizer(reader),
    }
    if reader.source.request.training.optimizer.name not in _TESTED:
        content["zero_allow_untested_optimizer"] = True
        reader.note("zero_allow_untested_optimizer is set: DeepSpeed has not tested ZeRO with this optimizer")
    if reader.peek("offload_optimizer_ratio") > 0:
        content["zero_force_ds_cpu_optimizer"] = False
        reader.note("with the optimizer block DeepSpeed uses its own CPU optimizer where it has one (Adam, AdamW, "
                    "Adagrad); zero_force_ds_cpu_optimizer is false so that an optimizer of your own works as well")
    if reader.peek("activation_checkpointing") != "none":
        reader.note("DeepSpeed's activation_checkpointing block only concerns models that call its own checkpoint "
                    "function, so none is written")
    return content


def _zero(reader: ConfigReader) -> dict[str, Any]:
    stage = reader.take("zero_stage")
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": reader.take("reduce_bucket_size"),
        "overlap_comm": reader.take("overlap_comm"),
        "contiguous_gradients": True,
    }
    if stage == 0:
        reader.note("at stage 0 DeepSpeed reduces gradients in buckets of its own size, whatever reduce_bucket_size")
    if stage in (1, 2):
        zero["allgather_partitions"] = True
        zero["allgather_bucket_size"] = reader.take("allgather_bucket_size")
        zero["reduce_scatter"] = True
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = reader.take("prefetch_bucket_size")
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {**zero, **_offload(reader, stage)}


def _offload(reader: ConfigReader, stage: int) -> dict[str, Any]:
    offload: dict[str, Any] = {}
    ratio = reader.take("offload_optimizer_ratio")
    pinned = not reader.on_cpu
    if ratio > 0 and stage == 0:
        raise reader.refuse("offload_optimizer_ratio", "DeepSpeed offloads the optimizer from stage 1 on, not at stage "
                            "0", "use the engine format, or tune with zero_stage 1")
    if ratio > 0:
        offload["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
        if stage == 3:
            offload["offload_optimizer"]["ratio"] = ratio
        elif ratio < 1:
            reader.note(f"offload_optimizer_ratio {ratio}: DeepSpeed offloads a part (Twin-Flow) only at stage 3, so "
                        f"the whole optimizer is offloaded: less device memory, slower steps than {reader.known}")
    if reader.take("offload_param"):
        offload["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    return offload


def _precision(reader: ConfigReader) -> dict[str, Any]:
    precision = reader.take("precision")
    blocks: dict[str, Any] = {"bf16": {"enabled": precision == "bf16"}, "fp16": {"enabled": precision == "fp16"}}
    if precision == "fp16":
        floor = reader.take("min_loss_scale")
        if floor != int(floor):
            reader.note(f"min_loss_scale {floor} is written as {math.ceil(floor)}: DeepSpeed takes whole numbers")
        blocks["fp16"] |= {
            "loss_scale": reader.take("loss_scale"), "initial_scale_power": reader.take("initial_scale_power"),
            "loss_scale_window": reader.take("loss_scale_window"), "hysteresis": reader.take("hysteresis"),
            "min_loss_scale": math.ceil(floor)}
    if reader.take("optimizer_precision") == "compute" and precision == "bf16":
        if reader.peek("zero_stage") == 0:
            raise reader.refuse("optimizer_precision", "DeepSpeed keeps optimizer states in bf16 from stage 1 on, not "
                                "at stage 0", "use the engine format, or tune with zero_stage 1")
        blocks["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        reader.note("bf16_master_weights_and_grads and bf16_optimizer_states need DeepSpeed 0.18.3 or newer")
    return blocks


def _optimizer(reader: ConfigReader) -> dict[str, Any]:
    optimizer = reader.source.request.training.optimizer
    params: dict[str, Any] = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.name in ("adam", "adamw", "radam"):
        params |= {"betas": list(optimizer.betas), "eps": optimizer.eps}
    elif optimizer.name in ("adagrad", "rmsprop"):
        params |= {"eps": optimizer.eps}
    if optimizer.name in ("sgd", "rmsprop"):
        params |= {"momentum": optimizer.momentum}
    if optimizer.name == "adam":
        params["adam_w_mode"] = False  # else DeepSpeed makes AdamW of it
    return {"type": _TYPES[optimizer.name], "params": params}
