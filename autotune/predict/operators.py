"""Seconds of a micro-batch whose operators were counted: each class has its work and, on each device, its costs."""

from typing import NamedTuple

from engine.config import Checkpointing
from engine.profile import ModelProfile, OperatorClass, OperatorCost, PassWork
from engine.values import Precision


class ClassSeconds(NamedTuple):
    """Of forward and backward.

    Attributes:
        products: matrix products and attention.
        traffic: everything else.
        kernels: operators that were started.
    """

    products: float
    traffic: float
    kernels: float


def counted_work(model: ModelProfile, checkpointing: Checkpointing, precision: Precision) -> PassWork | None:
    """The entry for one choice, where operators were counted."""
    return next((work for work in model.work if (work.checkpointing, work.precision) == (checkpointing, precision)),
                None)


def operator_seconds(work: PassWork, samples: int, costs: dict[OperatorClass, OperatorCost]) -> ClassSeconds:
    """Of a micro-batch of so many samples."""
    seconds = {kind: samples * done.flops_per_sample * costs[kind].seconds_per_flop
               + (done.bytes_fixed + samples * done.bytes_per_sample) * costs[kind].seconds_per_byte
               for kind, done in work.operators.items()}
    return ClassSeconds(seconds["product"] + seconds["attention"], seconds["other"],
                        sum(done.kernels for done in work.operators.values()))
