"""What a parameter tensor costs: the time of a step against the number of tensors, beside DDP.

    python -m benchmarks.overhead [--json FILE]

Models of 100, 300 and 1000 small tensors do the same arithmetic on 2 ranks, so that what grows with the number of
tensors is what Python and the framework spend on each, autograd's own part included. All engines are alive at once and
take turns; a round gives each the same few steps. Times are medians over the rounds, ratios to DDP medians of the
ratios within a round; of a rank, with all of its threads. Wall time that is not CPU time is waiting for the other rank.
With ENGINE_SOCKETS=1 the engine's ranks talk through sockets, as DDP's do.
"""

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.ranks import on_ranks
from benchmarks.turns import Seconds, mean_over_ranks, middle, ratio, take_turns
from engine import OptimizerConfig, TrainConfig, initialize

TENSORS = (100, 300, 1000)
ENGINES = ("ddp", "stage 0", "stage 1", "stage 2", "stage 3")
RANKS = 2
BLOCK_TENSORS = 10
WEIGHTS = 128_000
BATCH = 8
ROUNDS = 15
STEPS_PER_TURN = 3


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
    return take_turns(steps, rounds=ROUNDS, steps_per_turn=STEPS_PER_TURN)


def rows_of(tensors: int) -> list[report.Row]:
    """All engines on a model of so many tensors."""
    rounds = mean_over_ranks(on_ranks(RANKS, measure, tensors))
    rows: list[report.Row] = []
    for name, mine in rounds.items():
        step, to_ddp = middle(mine), ratio(mine, rounds["ddp"])
        rows.append({
            "tensors": tensors, "engine": name, "step ms": 1e3 * step.wall, "CPU ms": 1e3 * step.cpu,
            "us / tensor": 1e6 * step.wall / tensors, "CPU us / tensor": 1e6 * step.cpu / tensors,
            "step / ddp": to_ddp.wall, "CPU / ddp": to_ddp.cpu})
    return rows


def main() -> int:
    options = report.parser(__doc__).parse_args()
    rows = [row for tensors in TENSORS for row in rows_of(tensors)]
    print(report.table(rows))
    report.write(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
