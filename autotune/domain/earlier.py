"""What is kept of other studies for the next one to begin with."""

from enum import StrEnum

from autotune.domain.study import Trial
from engine.config import OptimizerConfig
from engine.profile import HardwareProfile, ModelProfile
from engine.values import Value


class Relation(StrEnum):
    """Of an earlier study to this one."""

    HERE = "the same model on this hardware"
    ELSEWHERE = "the same model on other hardware"
    FAMILY = "the same kind of model on this hardware"


class EarlierStudy(Value):
    """A study that has ended.

    Attributes:
        hardware: in words; empty where it is this study's own.
        trials: that were predicted and measured, by number.
    """

    study_id: str
    relation: Relation
    hardware: str = ""
    trials: tuple[Trial, ...]


class EarlierRecord(Value):
    """An earlier study as it was kept: its predictions are those of its time, which `autotune.search.earlier` makes
    anew from what they were made of."""

    study: EarlierStudy
    model: ModelProfile
    hardware: HardwareProfile
    optimizer: OptimizerConfig
