"""Stage 3 (being written)."""

from typing import ClassVar

from engine.stages.optimizer_sharded import OptimizerSharded


class ParameterSharded(OptimizerSharded):
    reduces_every_micro_batch: ClassVar[bool] = True
