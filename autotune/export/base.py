"""What every format shares: the file it yields, and a reader that never lets a setting get lost."""

import json
from collections.abc import Mapping
from typing import Any

from autotune.domain.errors import ExportError
from autotune.domain.study import BestConfig
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

    def __init__(self, best: BestConfig, tool: str) -> None:
        self.best = best
        self.tool = tool
        self._read: set[str] = set()
        self._notes: list[str] = []

    def take(self, name: str) -> Any:
        """The field's value; the caller expresses it."""
        self._read.add(name)
        return getattr(self.best.config, name)

    def peek(self, name: str) -> Any:
        """The field's value, which something else expresses."""
        return getattr(self.best.config, name)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def refuse(self, name: str, why: str, instead: str) -> ExportError:
        """What to raise for a field that the tool cannot express."""
        return ExportError(f"{name} {_plain(self.peek(name))}: {why}; {instead}")

    @property
    def world_size(self) -> int:
        return self.best.hardware_profile.world_size

    @property
    def on_cpu(self) -> bool:
        return self.best.hardware_profile.device_type == "cpu"

    def notes(self) -> tuple[str, ...]:
        """All that the user must know, in the order of importance."""
        ranks = self.world_size
        batch = self.best.request.training.global_batch_size
        processes = "1 process" if ranks == 1 else f"{ranks} processes"
        return (f"tuned on {processes} with a global batch of {batch}: with another number of processes, change "
                f"gradient_accumulation_steps so that micro-batch x accumulation x processes stays {batch}",
                *self._notes, *self._left_out())

    def _left_out(self) -> list[str]:
        config = self.best.config
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
