"""One file per ZeRO stage behind the protocol in `base`."""

from engine.stages.base import Stage, StageContext
from engine.stages.gradient_sharded import GradientSharded
from engine.stages.optimizer_sharded import OptimizerSharded
from engine.stages.parameter_sharded import ParameterSharded
from engine.stages.replicated import Replicated

_STAGES: tuple[type[Replicated], type[OptimizerSharded], type[GradientSharded], type[ParameterSharded]] = (
    Replicated, OptimizerSharded, GradientSharded, ParameterSharded)


def make_stage(context: StageContext) -> Stage:
    """The strategy that the configuration's `zero_stage` names."""
    return _STAGES[context.config.zero_stage](context)


__all__ = ["Stage", "StageContext", "make_stage"]
