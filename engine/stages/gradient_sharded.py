"""Stage 2: as stage 1, with gradients reduced to shards after every micro-batch, so that no full ones are kept."""

from typing import ClassVar

from engine.stages.optimizer_sharded import OptimizerSharded


class GradientSharded(OptimizerSharded):
    reduces_every_micro_batch: ClassVar[bool] = True
