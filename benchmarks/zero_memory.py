"""Bytes of model state that a rank holds, against the table of the ZeRO paper (arXiv 1910.02054, figure 1).

    python -m benchmarks.zero_memory [--json FILE]

Real ranks train a GPT for two steps at every stage and precision. Held is what the trainer counts, padding included,
of the rank that holds most: parameters; gradients, the most at once between two steps; optimizer states with fp32
masters. Allowed are the table's bytes and 3 % for padding, and for gradients two buckets, which are whole while they
are reduced. Ends with 1 where more is held. With ENGINE_SOCKETS=1 the ranks do as those of several hosts, and share no
memory.
"""

import sys
from dataclasses import dataclass
from itertools import product

from benchmarks import report
from benchmarks.ranks import on_ranks, training_loop
from engine.config import TrainConfig
from engine.values import BYTES_PER_ELEMENT, Precision

BUCKET = 50_000
"""Elements; a bucket is never smaller than the largest parameter."""

RANKS = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
PADDING = 0.03


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def theory(stage: int, *, ranks: int, parameters: int, precision: Precision) -> States:
    """The paper's table for Adam: two moments in fp32 and, beside 16-bit parameters, the fp32 parameters."""
    width = BYTES_PER_ELEMENT[precision]
    moments_and_master = 8 if precision == "fp32" else 12
    return States(parameters=width * parameters / (ranks if stage >= 3 else 1),
                  gradients=width * parameters / (ranks if stage >= 2 else 1),
                  optimizer=moments_and_master * parameters / (ranks if stage >= 1 else 1))


def allowed(expected: States, *, bucket_bytes: int) -> States:
    """What may be held of each where the table says `expected`."""
    return States(parameters=expected.parameters * (1 + PADDING),
                  gradients=expected.gradients * (1 + PADDING) + 2 * bucket_bytes,
                  optimizer=expected.optimizer * (1 + PADDING))


def over(held: States, limit: States) -> str:
    """Names of the kinds of which more is held than allowed."""
    return " ".join(kind for kind in ("parameters", "gradients", "optimizer")
                    if getattr(held, kind) > getattr(limit, kind))


def measure() -> tuple[dict[tuple[Precision, int], States], int, int]:
    """On one rank: what it holds by precision and stage; the model's parameters, and its largest one."""
    held, sizes = {}, [0]
    for precision, stage in product(PRECISIONS, STAGES):
        loop = training_loop(TrainConfig(zero_stage=stage, precision=precision, reduce_bucket_size=BUCKET))
        for step in range(2):
            loop.step(step)
        bytes_ = loop.trainer.state_bytes()
        held[precision, stage] = States(parameters=bytes_.parameters, gradients=bytes_.gradients,
                                        optimizer=bytes_.optimizer)
        sizes = [parameter.numel() for parameter in loop.trainer.module.parameters()]
        loop.close()
    return held, sum(sizes), max(sizes)


def rows_of(ranks: int) -> list[report.Row]:
    """All stages and precisions on so many ranks."""
    results = on_ranks(ranks, measure)
    _, parameters, largest = results[0]
    rows: list[report.Row] = []
    for precision, stage in product(PRECISIONS, STAGES):
        held = max((result[0][precision, stage] for result in results), key=lambda states: states.total)
        expected = theory(stage, ranks=ranks, parameters=parameters, precision=precision)
        limit = allowed(expected, bucket_bytes=max(BUCKET, largest) * BYTES_PER_ELEMENT[precision])
        rows.append({
            "precision": precision, "ranks": ranks, "stage": stage,
            "parameters MiB": report.mib(held.parameters), "gradients MiB": report.mib(held.gradients),
            "optimizer MiB": report.mib(held.optimizer), "held MiB": report.mib(held.total),
            "theory MiB": report.mib(expected.total), "allowed MiB": report.mib(limit.total),
            "held / theory": held.total / expected.total, "over": over(held, limit)})
    return rows


def main() -> int:
    options = report.parser(__doc__).parse_args()
    rows = [row for ranks in RANKS for row in rows_of(ranks)]
    print(report.table(rows))
    report.write(rows, options.json)
    return int(any(row["over"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
