"""What activation checkpointing saves and costs, on the benchmark GPT and one CPU rank.

    python -m benchmarks.checkpointing [--json FILE]

Step time and peak bytes are measured as a study measures them, in trials that take turns; ratios to no checkpointing
are medians of the ratios within a round. Kept are the bytes of the blocks' activations from forward to backward,
counted as live storages. While backward is in a block, it holds as much as the block keeps without checkpointing, so
that with `full` the most at once is the blocks' inputs plus one block. Ends with 1 where it is more.
"""

import asyncio
import sys
from collections.abc import Mapping
from statistics import median

import torch
from torch import nn

from autotune.scheduler.launcher.local import LocalLauncher
from benchmarks import report
from benchmarks.trials import reports, trial
from engine.checkpointing import wrap_inside, wrap_outside
from engine.config import Checkpointing, TrainConfig
from engine.probe import StorageTracker
from engine.report import Measurement, MeasurePolicy, TrialReport
from engine.spec import GptSpec
from engine.tasks.transformer import TransformerBlock

MODEL = GptSpec(kind="gpt", layers=6, hidden=512, heads=8, vocab=8192, sequence_length=256)
MICRO_BATCH = 2
CHOICES: tuple[Checkpointing, ...] = ("none", "selective", "full")
ROUNDS = 5
TURN = MeasurePolicy(max_warmup_steps=3, min_steps=2, max_steps=2)
SMALL = 0.01
"""Share of activations that random states and the like may come to."""


def config_of(choice: Checkpointing) -> TrainConfig:
    return TrainConfig(micro_batch_size=MICRO_BATCH, activation_checkpointing=choice)


def kept_bytes(choice: Checkpointing, *, layers: int) -> int:
    """Bytes that so many blocks keep from forward to backward, their first input counted and their output not."""
    blocks = nn.Sequential(*(TransformerBlock(MODEL.hidden, MODEL.heads, causal=True) for _ in range(layers)))
    inputs = torch.zeros(MICRO_BATCH, MODEL.sequence_length, MODEL.hidden, requires_grad=True)
    wrap_inside(list(blocks), config_of(choice))
    wrap_outside(list(blocks), config_of(choice))
    tracker = StorageTracker([*blocks.parameters()])
    with tracker:
        output = blocks(inputs)
    kept: int = tracker.bytes - output.nbytes + inputs.nbytes
    return kept


def inputs_bytes() -> int:
    """Bytes of the blocks' inputs, (B, L, H) in fp32 each."""
    return MODEL.layers * MICRO_BATCH * MODEL.sequence_length * MODEL.hidden * 4


async def measure() -> list[dict[Checkpointing, Measurement]]:
    """Every choice's trial, round by round."""
    requests = [trial(MODEL, config_of(choice), TURN) for _ in range(ROUNDS) for choice in CHOICES]
    measured = []
    async for found in reports(LocalLauncher(device_type="cpu"), requests):
        assert isinstance(found, TrialReport)
        if found.measurement is None:
            raise RuntimeError(f"{found.outcome}: {found.detail}")
        measured.append(found.measurement)
    return [dict(zip(CHOICES, measured[first:first + len(CHOICES)], strict=True))
            for first in range(0, len(measured), len(CHOICES))]


def rows_of(rounds: list[dict[Checkpointing, Measurement]], kept: Mapping[Checkpointing, int],
            one_block: int) -> list[report.Row]:
    """A row for each choice."""
    return [{
        "checkpointing": choice,
        "step ms": 1e3 * median(median(each[choice].step_seconds) for each in rounds),
        "step / none": median(median(each[choice].step_seconds) / median(each["none"].step_seconds)
                              for each in rounds),
        "peak MiB": report.mib(median(each[choice].peak_device_bytes for each in rounds)),
        "peak / none": median(each[choice].peak_device_bytes / each["none"].peak_device_bytes for each in rounds),
        "kept MiB": report.mib(kept[choice]),
        "most MiB": report.mib(kept[choice] + one_block) if choice == "full" else None,
        "inputs + one block MiB": report.mib(inputs_bytes() + one_block) if choice == "full" else None,
        "undisturbed rounds": sum(not each[choice].contended for each in rounds),
    } for choice in CHOICES]


def main() -> int:
    options = report.parser(__doc__).parse_args()
    kept = {choice: kept_bytes(choice, layers=MODEL.layers) for choice in CHOICES}
    rows = rows_of(asyncio.run(measure()), kept, kept_bytes("none", layers=1))
    print(report.table(rows))
    report.write(rows, options.json)
    return int(kept["full"] > inputs_bytes() * (1 + SMALL))


if __name__ == "__main__":
    sys.exit(main())
