"""One file per ZeRO stage behind the protocol in `base`."""

from engine.stages.base import Stage, StageContext
from engine.stages.gradient_sharded import GradientSharded
from engine.stages.optimizer_sharded import OptimizerSharded
from engine.stages.parameter_sharded import ParameterSharded
from engine.stages.parameter_shared import ParameterShared
from engine.stages.replicated import Replicated

_STAGES: dict[int, type[Replicated] | type[OptimizerSharded] | type[GradientSharded] | type[ParameterSharded]] = {
    0: Replicated, 1: OptimizerSharded, 2: GradientSharded, 3: ParameterSharded}


def make_stage(context: StageContext) -> Stage:
    """The strategy that the configuration's `zero_stage` names."""
    if context.config.zero_stage == 3 and context.ranks.shares_memory and not context.config.offload_param:
        return ParameterShared(context)
    return _STAGES[context.config.zero_stage](context)


__all__ = ["Stage", "StageContext", "make_stage"]
