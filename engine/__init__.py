"""The training engine: ZeRO 0-3, mixed precision, offload, activation checkpointing; CPU (gloo) and CUDA (NCCL).

`import engine` loads no torch: the first use of `engine.initialize` does.
"""

from typing import TYPE_CHECKING, Any

from engine.config import OptimizerConfig, TrainConfig
from engine.errors import (
    BatchSizeError,
    ConfigurationError,
    EngineError,
    MemoryLimitError,
    RankFailedError,
    TaskError,
)

if TYPE_CHECKING:
    from engine.trainer import StepResult, Trainer, initialize

_NEEDS_TORCH = ("StepResult", "Trainer", "initialize")


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        from engine import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")


__all__ = [
    "BatchSizeError",
    "ConfigurationError",
    "EngineError",
    "MemoryLimitError",
    "OptimizerConfig",
    "RankFailedError",
    "StepResult",
    "TaskError",
    "TrainConfig",
    "Trainer",
    "initialize",
]
