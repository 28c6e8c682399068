"""The training engine: ZeRO 0-3, mixed precision, offload, activation checkpointing; CPU (gloo) and CUDA (NCCL).

`initialize` gives a `Trainer`. Its `save_checkpoint` and `load_checkpoint` are for going on; its `save_model`, and
`load_model` here, for the trained model itself. `import engine` loads no torch: the first use of one of these does.

To read it, begin with `trainer`: `initialize` lays the model out, `Trainer.backward` and `Trainer.step` are the main
path. From there: `stages` say who keeps what (`stages.base` is their protocol), `gradients` goes from autograd to
summed shards, `update` runs the optimizer on what this rank has `owned`, through `chunks` and `offload`; `collectives`
and `transports` move bytes. `checkpoint`, `consolidate` and `model_file` save. `worker`, `trial`, `loop` and `memory`
measure; `probe` and `calibrate` make profiles.
"""

from importlib import import_module
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
    from engine.model_file import load_model
    from engine.trainer import StepResult, Trainer, initialize

_NEEDS_TORCH = {"StepResult": "engine.trainer", "Trainer": "engine.trainer", "initialize": "engine.trainer",
                "load_model": "engine.model_file"}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
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
    "load_model",
]
