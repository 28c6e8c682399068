"""What every format shares: the file it yields, and a reader that never lets a setting get lost."""

import json
from collections.abc import Mapping
from typing import Any

from autotune.domain.errors import ExportError
from autotune.domain.study import BestConfig, PlannedConfig
from autotune.domain.throughput import rate_unit
from engine.config import TrainConfig
from engine.values import Value

DEFAULTS = TrainConfig.model_validate({})
_FP16_FIELDS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_NOT_THERE: Mapping[str, str] = {
    "micro_batch_size": "set it in your script: the batch size of the data loader, or per_device_train_batch_size",
    "gradient_accumulation_steps": "set it in your script: Accelerator(gradient_accumulation_steps=...), or "
                                   "gradient_accumulation_steps of TrainingArguments",
    "gradient_clipping": "set it in your script: clip_grad_norm_, or max_grad_norm of TrainingArguments",
    "compile": "torch.compile each repeated block in your script",
    "activation_checkpointing": "turn it on in your script, for example model.gradient_checkpointing_enable()",
}
_ALWAYS_MATTERS = frozenset({"micro_batch_size", "gradient_accumulation_steps"})


Source = BestConfig | PlannedConfig
"""What can be written: a winner, or a row of a plan, which says so in the file."""


class ExportedFile(Value):
    """A configuration in another tool's words.

    Attributes:
        filename: of the format, never of the user: it goes into a header as it is.
        notes: what the format cannot say, or says differently: what the user still has to do. Also inside the file.
    """

    filename: str
    media_type: str
    text: str
    notes: tuple[str, ...]


class ConfigReader:
    """Reads a configuration field by field; what was not read and matters ends up in the notes.

    Args:
        tool: as users call it, for messages.
    """

    def __init__(self, source: Source, tool: str) -> None:
        self.source = source
        self.tool = tool
        self._read: set[str] = set()
        self._notes: list[str] = []

    def take(self, name: str) -> Any:
        """The field's value; the caller expresses it."""
        self._read.add(name)
        return getattr(self.source.config, name)

    def peek(self, name: str) -> Any:
        """The field's value, which something else expresses."""
        return getattr(self.source.config, name)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def refuse(self, name: str, why: str, instead: str) -> ExportError:
        """What to raise for a field that the tool cannot express."""
        return ExportError(f"{name} {_plain(self.peek(name))}: {why}; {instead}")

    @property
    def world_size(self) -> int:
        return self.source.hardware_profile.world_size

    @property
    def on_cpu(self) -> bool:
        return self.source.hardware_profile.device_type == "cpu"

    @property
    def nodes(self) -> int:
        """Machines that the ranks are on, as far as a description says."""
        links = self.source.hardware_profile.links
        return 1 if links is None else -(-self.world_size // links.devices_per_node)

    @property
    def known(self) -> str:
        """How time and memory are known, in one word."""
        return "predicted" if isinstance(self.source, PlannedConfig) else "measured"

    @property
    def chosen(self) -> str:
        """How the configuration was chosen, in one word."""
        return "planned" if isinstance(self.source, PlannedConfig) else "tuned"

    @property
    def evidence(self) -> str:
        """Where the configuration is from and how its time and memory are known; whether a winner is confirmed."""
        source, hardware = self.source, self.source.hardware_profile
        devices = f"{self.world_size} x {hardware.device_name or hardware.device_type}"
        if isinstance(source, BestConfig):
            per_second = source.tokens_per_second
            rate = f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.4g}"
            standing = ("confirmed: measured again beside the other finalists" if source.confirmed
                        else "NOT CONFIRMED: only one run counts")
            return (f"measured in study {source.study_id}, trial {source.trial_number}: {rate} "
                    f"{rate_unit(source).replace('tok/', 'tokens/')} on {devices}, runs beside other work left out; "
                    f"{standing}")
        seconds, peak = source.point.prediction.step_seconds, source.point.prediction.peak_device_bytes
        rate = "" if seconds is None else f"{seconds:.4g} s a step, {source.point.tokens_per_second:,.0f} tokens/s, "
        return (f"PREDICTED for {devices}, not measured: {rate}{peak / 2**30:.1f} GiB of device memory "
                f"(row {source.row} of a plan); `autotune tune` on these devices measures it")

    def notes(self) -> tuple[str, ...]:
        """All that the user must know, in the order of importance."""
        ranks, planned = self.world_size, isinstance(self.source, PlannedConfig)
        batch = self.source.request.training.global_batch_size
        processes = "1 process" if ranks == 1 else f"{ranks} processes"
        return (self.evidence,
                f"{self.chosen} {'for' if planned else 'on'} {processes} with a global batch of {batch}: with another "
                "number of processes, change gradient_accumulation_steps so that micro-batch x accumulation x "
                f"processes stays {batch}",
                *self._notes, *self._left_out())

    def _left_out(self) -> list[str]:
        config = self.source.config
        default_reduce_dtype = config.precision
        found = []
        for name in TrainConfig.model_fields:
            value = getattr(config, name)
            default = default_reduce_dtype if name == "reduce_dtype" else getattr(DEFAULTS, name)
            if name in self._read or (value == default and name not in _ALWAYS_MATTERS):
                continue
            if name in _FP16_FIELDS and config.precision != "fp16":
                found.append(f"{name} {_plain(value)} is left out: it has no effect in {config.precision}")
            else:
                found.append(f"{name} {_plain(value)} is left out: "
                             f"{_NOT_THERE.get(name, f'{self.tool} has no such setting')}")
        return found


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def strict_json(content: Mapping[str, Any]) -> str:
    """Indented JSON without NaN and infinities."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
