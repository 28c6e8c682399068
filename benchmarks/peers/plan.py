"""What is compared: the engines, the scenarios, and which engines are alive together. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

RANKS = 2

WARM_UP_STEPS = 2
EQUAL_STEPS = 6
"""Every engine takes these many steps on the same samples before its turns: losses of all of them are compared, memory
is measured in those after the warm-up."""

MAX_LIVE = 7
"""Engines alive at once. Those that wait take no processor time, but their memory and threads are there."""

REFERENCE = "reference"
"""One process with every rank's samples, which fp32 losses are held against."""

BASE = "ddp"
"""Ratios are to this engine."""

ENGINES: dict[str, str] = {
    BASE: "DDP",
    "zero_redundancy": "ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "fsdp2_keep": "FSDP2, no reshard after forward",
    **{f"deepspeed{stage}": f"DeepSpeed stage {stage}" for stage in range(4)},
    **{f"engine{stage}": f"engine stage {stage}" for stage in range(4)},
}
"""Name on the command line -> name in the tables, in the tables' order."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How the benchmark's model is trained: one column of the table.

    Attributes:
        precision: bf16 computes and reduces in bf16 over fp32 master weights (DDP: autocast over fp32 parameters).
        micro_batch: samples per rank and forward pass.
        accumulation: forward passes per optimizer step.
        sequence_length: tokens per sample.
    """

    name: str
    title: str
    precision: Literal["fp32", "bf16"] = "fp32"
    micro_batch: int = 2
    accumulation: int = 1
    sequence_length: int = 256

    def samples(self, step: int, rank: int) -> list[range]:
        """Global indices of the samples of a rank's micro-batches in a step; the same for every engine."""
        shared = self.micro_batch * RANKS
        first = step * shared * self.accumulation + rank * self.micro_batch
        return [range(first + index * shared, first + index * shared + self.micro_batch)
                for index in range(self.accumulation)]


SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in (
    Scenario(name="fp32", title="fp32"),
    Scenario(name="fp32_accumulate", title="fp32, accumulate 4", micro_batch=1, accumulation=4),
    Scenario(name="fp32_short", title="fp32 short", micro_batch=1, sequence_length=64),
    Scenario(name="bf16", title="bf16", precision="bf16"),
    Scenario(name="bf16_short", title="bf16 short", precision="bf16", micro_batch=1, sequence_length=64),
)}
"""Short ones have little to compute for each gradient that is communicated."""


def groups(engines: Sequence[str]) -> list[list[str]]:
    """Engines that are alive together, each group with the base first; at most `MAX_LIVE` in one.

    Dealt out in turn, so that equal stages of the engine and of DeepSpeed, four apart in the order, tend to meet.
    """
    others = [name for name in engines if name != BASE]
    count = max(1, -(-len(others) // (MAX_LIVE - 1)))
    return [[BASE, *others[start::count]] for start in range(count)]
