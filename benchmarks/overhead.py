"""What a parameter tensor costs: the time of a step against the number of tensors, beside DDP.

    python -m benchmarks.overhead [--json FILE]

Models of 100, 300 and 1000 small tensors do the same arithmetic on 2 ranks, so that what grows with the number of
tensors is what Python and the framework spend on each, autograd's own part included. All engines are alive at once and
take turns; a round gives each the same few steps. Times are medians over the rounds, ratios to DDP medians of the
ratios within a round. CPU time is user and system time of a rank with all of its threads; wall time that is not CPU
time is waiting for the other rank. With ENGINE_SOCKETS=1 the engine's ranks talk through sockets, as DDP's do.
"""

import math
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.ranks import on_ranks
from engine import OptimizerConfig, TrainConfig, initialize

TENSORS = (100, 300, 1000)
ENGINES = ("ddp", "stage 0", "stage 1", "stage 2", "stage 3")
RANKS = 2
BLOCK_TENSORS = 10
WEIGHTS = 128_000
BATCH = 8
ROUNDS = 15
STEPS = 3
"""Of a turn."""


class Seconds(NamedTuple):
    """Of a step, on one rank."""

    wall: float
    cpu: float


def make_model(tensors: int) -> nn.Module:
    """Blocks of ten tensors: square linear layers, as wide as makes `WEIGHTS` weights in all. (B, W) -> (B, W)."""
    layers = tensors // 2
    width = width_of(tensors)
    per_block = BLOCK_TENSORS // 2
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(width, width) for _ in range(per_block)))
                           for _ in range(layers // per_block)))


def width_of(tensors: int) -> int:
    return round(math.sqrt(WEIGHTS / (tensors / 2)))


def make_step(name: str, tensors: int) -> Callable[[], None]:
    """One optimizer step of an engine on a model of its own."""
    torch.manual_seed(0)
    model, inputs = make_model(tensors), torch.ones(BATCH, width_of(tensors))
    if name == "ddp":
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(parallel.parameters(), fused=True)

        def step() -> None:
            loss: Tensor = parallel(inputs).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    else:
        config = TrainConfig.model_validate({"zero_stage": int(name.removeprefix("stage "))})
        trainer = initialize(model, config=config, optimizer=OptimizerConfig())

        def step() -> None:
            trainer.backward(trainer(inputs).square().mean())
            trainer.step()
    return step


def measure(tensors: int) -> dict[str, list[Seconds]]:
    """On one rank: every engine's seconds, by round."""
    steps = {name: make_step(name, tensors) for name in ENGINES}
    for step in steps.values():
        step()
    seconds: dict[str, list[Seconds]] = {name: [] for name in ENGINES}
    for number in range(ROUNDS):
        first = number % len(ENGINES)
        for name in ENGINES[first:] + ENGINES[:first]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                steps[name]()
            seconds[name].append(Seconds((time.perf_counter() - wall) / STEPS, (time.process_time() - cpu) / STEPS))
    return seconds


def rows_of(tensors: int) -> list[report.Row]:
    """All engines on a model of so many tensors; a round's times are means over the ranks."""
    results = on_ranks(RANKS, measure, tensors)
    rounds = {name: [Seconds(*(sum(values) / RANKS for values in zip(*ranks, strict=True)))
                     for ranks in zip(*(result[name] for result in results), strict=True)] for name in ENGINES}
    return [{
        "tensors": tensors, "engine": name,
        "step ms": 1e3 * median(seconds.wall for seconds in mine),
        "CPU ms": 1e3 * median(seconds.cpu for seconds in mine),
        "us / tensor": 1e6 * median(seconds.wall for seconds in mine) / tensors,
        "CPU us / tensor": 1e6 * median(seconds.cpu for seconds in mine) / tensors,
        "step / ddp": median(ours.wall / ddp.wall for ours, ddp in zip(mine, rounds["ddp"], strict=True)),
        "CPU / ddp": median(ours.cpu / ddp.cpu for ours, ddp in zip(mine, rounds["ddp"], strict=True)),
    } for name, mine in rounds.items()]


def main() -> int:
    options = report.parser(__doc__).parse_args()
    rows = [row for tensors in TENSORS for row in rows_of(tensors)]
    print(report.table(rows))
    report.write(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
