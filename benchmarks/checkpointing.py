"""What activation checkpointing saves and costs, on the benchmark GPT and one CPU rank.

    python -m benchmarks.checkpointing [--json FILE]

Steps are timed in turns with all choices alive, their ratios to no checkpointing are medians of the ratios within a
round; peak bytes are those of a trial of each, as a study measures them, model states included. Kept are the bytes of
the blocks' activations from forward to backward, counted as live storages. While backward is in a block, it holds as
much as the block keeps without checkpointing, so that with `full` the most at once is the blocks' inputs plus one
block. Ends with 1 where it is more.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import torch
from torch import nn

from autotune.scheduler.launcher.local import LocalLauncher
from benchmarks import report
from benchmarks.ranks import on_ranks, training_loop
from benchmarks.trials import reports, trial
from benchmarks.turns import Seconds, middle, ratio, take_turns
from engine.checkpointing import wrap_inside, wrap_outside
from engine.config import Checkpointing, TrainConfig
from engine.loop import TrainingLoop
from engine.probe import StorageTracker
from engine.report import MeasurePolicy, TrialReport
from engine.spec import GptSpec
from engine.tasks.transformer import TransformerBlock

MODEL = GptSpec(kind="gpt", layers=6, hidden=512, heads=8, vocab=8192, sequence_length=256)
MICRO_BATCH = 2
CHOICES: tuple[Checkpointing, ...] = ("none", "selective", "full")
ROUNDS = 9
PEAK = MeasurePolicy(max_warmup_steps=1, max_steps=2)
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


def times() -> dict[str, list[Seconds]]:
    """On one rank: every choice's seconds, by round."""
    steps = {str(choice): next_step(training_loop(config_of(choice), MODEL)) for choice in CHOICES}
    return take_turns(steps, rounds=ROUNDS, steps_per_turn=1)


def next_step(loop: TrainingLoop) -> Callable[[], object]:
    """A loop's steps, one at a call."""
    numbers = count()
    return lambda: loop.step(next(numbers))


async def peaks() -> dict[Checkpointing, int]:
    """Peak bytes of a trial of each choice."""
    requests = [trial(MODEL, config_of(choice), PEAK) for choice in CHOICES]
    measured = []
    async for found in reports(LocalLauncher(device_type="cpu"), requests):
        assert isinstance(found, TrialReport)
        if found.measurement is None:
            raise RuntimeError(f"{found.outcome}: {found.detail}")
        measured.append(found.measurement.peak_device_bytes)
    return dict(zip(CHOICES, measured, strict=True))


def rows_of(rounds: Mapping[str, Sequence[Seconds]], peak: Mapping[Checkpointing, int],
            kept: Mapping[Checkpointing, int], one_block: int) -> list[report.Row]:
    """A row for each choice."""
    rows: list[report.Row] = []
    for choice in CHOICES:
        step, to_none = middle(rounds[choice]), ratio(rounds[choice], rounds["none"])
        rows.append({
            "checkpointing": choice, "step ms": 1e3 * step.wall, "CPU ms": 1e3 * step.cpu, "step / none": to_none.wall,
            "CPU / none": to_none.cpu, "peak MiB": report.mib(peak[choice]),
            "peak / none": peak[choice] / peak["none"], "kept MiB": report.mib(kept[choice]),
            "most MiB": report.mib(kept[choice] + one_block) if choice == "full" else None,
            "inputs + one block MiB": report.mib(inputs_bytes() + one_block) if choice == "full" else None})
    return rows


def main() -> int:
    options = report.parser(__doc__).parse_args()
    kept = {choice: kept_bytes(choice, layers=MODEL.layers) for choice in CHOICES}
    rounds, = on_ranks(1, times)
    rows = rows_of(rounds, asyncio.run(peaks()), kept, kept_bytes("none", layers=1))
    print(report.table(rows))
    report.write(rows, options.json)
    return int(kept["full"] > inputs_bytes() * (1 + SMALL))


if __name__ == "__main__":
    sys.exit(main())
