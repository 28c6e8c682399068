"""A plain training loop, and the same loop on the engine: the five marked lines are all that changes.

    python examples/train.py --plain
    python examples/train.py
    python -m torch.distributed.run --nproc-per-node 2 examples/train.py --zero-stage 3

All print the same losses: the global batch stays 8, whatever the number of ranks and the stage.
"""

import argparse
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine

GLOBAL_BATCH = 8


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def make_batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """This rank's share of a step's global batch: x (B, 16), y (B, 1)."""
    x = torch.randn(GLOBAL_BATCH, 16, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
    return x, x.square().mean(dim=1, keepdim=True)


def train_plain(steps: int) -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(steps):
        x, y = make_batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_on_engine(steps: int, zero_stage: int) -> list[float]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = engine.TrainConfig(zero_stage=zero_stage, micro_batch_size=GLOBAL_BATCH // ranks)
    model = engine.initialize(make_model(), config=config,                            # 1: instead of the model
                              optimizer=engine.OptimizerConfig(name="adamw", lr=1e-2))  # 2: and the optimizer
    losses = []
    for step in range(steps):
        x, y = make_batch(step, model.rank, model.data_parallel_size)                 # 3: this rank's samples
        loss = F.mse_loss(model(x), y)
        model.backward(loss)                                                          # 4
        model.step()                                                                  # 5: zero_grad is included
        losses.append(mean_over_ranks(loss))
    model.close()
    return losses


def mean_over_ranks(loss: Tensor) -> float:
    mean = loss.detach().clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(mean)
        mean /= torch.distributed.get_world_size()
    return mean.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without the engine")
    parser.add_argument("--zero-stage", type=int, default=1, choices=range(4))
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    losses = train_plain(options.steps) if options.plain else train_on_engine(options.steps, options.zero_stage)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(f"step {step}: loss {loss:.6f}" for step, loss in enumerate(losses)))


if __name__ == "__main__":
    main()
