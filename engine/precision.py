"""Dtypes of compute, gradients and optimizer, and the fp16 loss scale."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.buckets import ManagedParameter
from engine.config import TrainConfig
from engine.errors import ConfigurationError
from engine.values import Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

KEPT_BUFFERS = ("inv_freq", "original_inv_freq")
"""Rotary frequencies: models read them as fp32 and cast the result; rounded to 16 bit they give wrong positions."""


@dataclass(frozen=True)
class GradientDtypes:
    """Dtypes of gradients on their way to the optimizer.

    Attributes:
        local: collected in, on each rank.
        wire: reduced in.
        held: kept in after reduction, and summed over micro-batches in.
    """

    local: torch.dtype
    wire: torch.dtype
    held: torch.dtype

    @classmethod
    def of(cls, config: TrainConfig, *, accumulates_locally: bool) -> "GradientDtypes":
        """Sums over micro-batches are fp32: in 16 bit small contributions would vanish in large sums."""
        wire = DTYPES[config.reduce_dtype]
        held = torch.float32 if config.gradient_accumulation_steps > 1 else wire
        return cls(local=held if accumulates_locally else wire, wire=wire, held=held)


def compute_dtypes(model: nn.Module, compute: torch.dtype) -> dict[nn.Parameter, torch.dtype]:
    """The dtype each floating-point parameter computes in.

    Modules with running statistics (batch norm) stay in fp32 as a whole: their kernels take 16-bit inputs with fp32
    parameters, but not 16-bit parameters with fp32 statistics.
    """
    dtypes: dict[nn.Parameter, torch.dtype] = {}
    for module in model.modules():
        dtype = torch.float32 if _keeps_statistics(module) else compute
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                dtypes.setdefault(parameter, dtype)
    return dtypes


def place_rest(model: nn.Module, managed: Iterable[ManagedParameter], *, device: torch.device,
               compute: torch.dtype) -> None:
    """Move what no bucket holds to the device: buffers, and parameters that are not floating-point."""
    place_buffers(model, device=device, compute=compute)
    laid_out = {member.parameter for member in managed}
    for parameter in model.parameters():
        if parameter not in laid_out:
            parameter.data = parameter.data.to(device).contiguous()


def place_buffers(model: nn.Module, *, device: torch.device, compute: torch.dtype) -> None:
    """Move buffers to the device, each in contiguous memory of its own; floating-point ones become the compute dtype,
    except running statistics and rotary frequencies. One that modules share stays one."""
    placed: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer not in placed:
                keeps = not buffer.is_floating_point() or _keeps_statistics(module) or name in KEPT_BUFFERS
                placed[buffer] = buffer.to(device, buffer.dtype if keeps else compute).contiguous()
            module._buffers[name] = placed[buffer]


def rest_of(model: nn.Module, managed: Iterable[ManagedParameter]) -> list[Tensor]:
    """Buffers, and parameters that no bucket holds."""
    laid_out = {member.parameter for member in managed}
    return [*model.buffers(), *(parameter.data for parameter in model.parameters() if parameter not in laid_out)]


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module._buffers.get("running_mean"), Tensor)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """The same structure of tuples (named ones too), lists and dicts with floating-point tensors in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(cast_floating(item, dtype) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if type(value) is dict:
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    return value


def require_precision(config: TrainConfig, device: torch.device) -> None:
    """Check by running it that the device computes in this precision, and that its loss scale can fall.

    Raises:
        ConfigurationError: it does not, or cannot.
    """
    precision = config.precision
    if precision == "fp16" and config.loss_scale == 0 and config.min_loss_scale > 2.0 ** config.initial_scale_power:
        raise ConfigurationError(
            f"min_loss_scale {config.min_loss_scale} is above the first scale, 2 to the power "
            f"{config.initial_scale_power}: lower it, or raise initial_scale_power",
            fields=("min_loss_scale", "initial_scale_power"))
    if precision == "fp32":
        return
    try:
        layer = nn.Linear(8, 8).to(device, DTYPES[precision])
        layer(torch.ones(2, 8, device=device, dtype=DTYPES[precision])).sum().backward()
    except RuntimeError as error:
        raise ConfigurationError(f"precision {precision} does not run on {device}: {error}; choose another precision",
                                 fields=("precision",)) from error


_PATIENCE = 100
"""Overflows in a row, at a scale that cannot fall, after which training is given up. A bad batch or two pass sooner."""


class LossScale:
    """The factor that keeps small fp16 gradients above zero; 1 and constant in other precisions.

    The dynamic rule is DeepSpeed's: it doubles after `window` steps without overflow; an overflow uses up hysteresis
    first and halves it afterwards, down to the floor; hysteresis is refilled when it doubles.

    Attributes:
        value: the present scale.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._scales = config.precision == "fp16"
        self._dynamic = self._scales and config.loss_scale == 0
        self._window, self._hysteresis, self._minimum = (
            config.loss_scale_window, config.hysteresis, config.min_loss_scale)
        self.value = 2.0 ** config.initial_scale_power if self._dynamic else config.loss_scale if self._scales else 1.0
        self._step, self._last_overflow, self._hysteresis_left = 0, -1, config.hysteresis
        self._in_vain = 0  # overflows in a row at a scale that cannot fall

    @property
    def checks_overflow(self) -> bool:
        """Whether steps with non-finite gradients are to be skipped."""
        return self._scales

    def apply(self, loss: Tensor) -> Tensor:
        """The loss to differentiate; in fp32, because the scaled loss exceeds fp16's range."""
        return loss.float() * self.value if self._scales else loss

    def update(self, *, overflow: bool) -> None:
        """Adapt after a step.

        Raises:
            FloatingPointError: gradients keep overflowing, and a smaller scale is not to be had.
        """
        cannot_fall = not self._dynamic or self.value <= self._minimum
        self._in_vain = self._in_vain + 1 if overflow and cannot_fall else 0
        if self._in_vain == _PATIENCE:
            raise FloatingPointError(
                f"gradients were not finite in {_PATIENCE} steps in a row at loss scale {self.value:g}, which cannot "
                "fall: look for inf or nan in the loss, lower the learning rate, or use precision bf16")
        if self._dynamic:
            if overflow:
                if self._hysteresis_left == 1:
                    self.value = max(self.value / 2, self._minimum)
                else:
                    self._hysteresis_left -= 1
                self._last_overflow = self._step
            elif (self._step - self._last_overflow) % self._window == 0:
                self._hysteresis_left = self._hysteresis
                self.value *= 2
        self._step += 1

    def state(self) -> dict[str, float]:
        """What `load_state` needs; empty for a constant scale."""
        if not self._dynamic:
            return {}
        return {"value": self.value, "step": self._step, "last_overflow": self._last_overflow,
                "hysteresis_left": self._hysteresis_left}

    def load_state(self, state: dict[str, float]) -> None:
        """Go on where a dynamic scale was; a constant one has nothing to tell or to learn."""
        if self._dynamic and state:
            self.value = state["value"]
            self._step, self._last_overflow = int(state["step"]), int(state["last_overflow"])
            self._hysteresis_left = int(state["hysteresis_left"])
