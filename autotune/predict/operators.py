"""Seconds of a micro-batch whose operators were counted: each class has its work and, on each device, its costs."""

from typing import NamedTuple

from engine.profile import OperatorClass, OperatorCost, PassWork


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


def operator_seconds(work: PassWork, samples: int, costs: dict[OperatorClass, OperatorCost]) -> ClassSeconds:
    """Of a micro-batch of so many samples."""
    seconds = {kind: samples * done.flops_per_sample * costs[kind].seconds_per_flop
               + (done.bytes_fixed + samples * done.bytes_per_sample) * costs[kind].seconds_per_byte
               for kind, done in work.operators.items()}
    return ClassSeconds(seconds["product"] + seconds["attention"], seconds["other"],
                        sum(done.kernels for done in work.operators.values()))
