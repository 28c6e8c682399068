"""Training the same thing twice: under the engine on some ranks, and in plain PyTorch with the whole global batch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine import OptimizerConfig, TrainConfig
from engine.trainer import Trainer, initialize
from tests.support.ranks import Ranks

GLOBAL_BATCH = 12
FEATURES = 8

RanksOf = Callable[[int], Ranks]
"""The `ranks` fixture."""

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])
over_sockets = pytest.mark.parametrize("transport", ["sockets"], indirect=True)
over_shared_memory = pytest.mark.parametrize("transport", ["shared"], indirect=True)
worlds = pytest.mark.parametrize("world_size", [1, 2, 3])

Weights = dict[str, Tensor]
Optimizer = OptimizerConfig | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


_PLAIN = TrainConfig()
_ADAMW = OptimizerConfig(lr=0.01, weight_decay=0.1)


@dataclass(frozen=True)
class Setup:
    """What is trained and how; micro-batch size follows from the number of ranks.

    Attributes:
        build: makes the model (from the seed that is set); its forward takes (n, FEATURES) and gives (n, any).
    """

    build: Callable[[], nn.Module]
    config: TrainConfig = _PLAIN
    optimizer: Optimizer = _ADAMW
    steps: int = 5


def samples(step: int) -> tuple[Tensor, Tensor]:
    """(GLOBAL_BATCH, FEATURES) inputs and (GLOBAL_BATCH, 1) targets of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return (torch.randn(GLOBAL_BATCH, FEATURES, generator=generator),
            torch.randn(GLOBAL_BATCH, 1, generator=generator))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build()


def start(setup: Setup) -> Trainer:
    return initialize(built(setup.build), config=setup.config, optimizer=setup.optimizer)


def micro_batches(step: int, *, accumulation: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's micro-batches of a step."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    inputs, targets = samples(step)
    size = GLOBAL_BATCH // (world_size * accumulation)
    firsts = [micro * size * world_size + rank * size for micro in range(accumulation)]
    return [(inputs[first:first + size], targets[first:first + size]) for first in firsts]


def run_step(trainer: Trainer, step: int) -> Tensor:
    """One optimizer step on the step's samples; the sum of this rank's losses."""
    total = torch.zeros(())
    for inputs, target in micro_batches(step, accumulation=trainer.config.gradient_accumulation_steps):
        loss = loss_of(trainer(inputs), target)
        trainer.backward(loss)
        trainer.step()
        total += loss.detach()
    return total


def train(setup: Setup) -> list[Weights]:
    """The weights after every step, under the engine; runs on a rank."""
    trainer = start(setup)
    history = []
    for step in range(setup.steps):
        run_step(trainer, step)
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


def plain_optimizer(choice: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The same optimizer as torch documents it, without fused kernels."""
    if not isinstance(choice, OptimizerConfig):
        return choice(parameters)
    lr, decay, eps = choice.lr, choice.weight_decay, choice.eps
    kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(parameters, lr=lr, betas=choice.betas, eps=eps, weight_decay=decay),
        "adam": lambda: torch.optim.Adam(parameters, lr=lr, betas=choice.betas, eps=eps, weight_decay=decay),
        "sgd": lambda: torch.optim.SGD(parameters, lr=lr, momentum=choice.momentum, weight_decay=decay),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=lr, eps=eps, weight_decay=decay),
        "radam": lambda: torch.optim.RAdam(parameters, lr=lr, betas=choice.betas, eps=eps, weight_decay=decay),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=lr, eps=eps, momentum=choice.momentum,
                                               weight_decay=decay),
    }
    return kinds[choice.name]()


def reference(setup: Setup) -> list[Weights]:
    """The weights after every step: one process, fp32, the whole global batch, plain PyTorch."""
    model = built(setup.build)
    optimizer = plain_optimizer(setup.optimizer, [p for p in model.parameters() if p.requires_grad])
    history = []
    for step in range(setup.steps):
        inputs, target = samples(step)
        optimizer.zero_grad()
        loss_of(model(inputs), target).backward()
        if setup.config.gradient_clipping:
            nn.utils.clip_grad_norm_(model.parameters(), setup.config.gradient_clipping)
        optimizer.step()
        history.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    return history


def assert_same_weights(histories: Sequence[Sequence[Weights]], expected: Sequence[Weights], *, atol: float = 1e-6,
                        rtol: float = 1e-5) -> None:
    """Every rank's weights after every step equal the reference's."""
    for rank, history in enumerate(histories):
        assert len(history) == len(expected)
        for step, (ours, theirs) in enumerate(zip(history, expected, strict=True)):
            assert list(ours) == list(theirs)
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, atol=atol, rtol=rtol, check_dtype=False,
                                           msg=lambda text, at=(rank, step, name): f"rank, step, name {at}: {text}")


class Block(nn.Module):
    """A residual block with odd sizes and a zero-dimensional parameter."""

    def __init__(self, width: int = 10, inner: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Awkward(nn.Module):
    """All that layouts stumble over: tied, frozen, zero-dimensional, empty, odd-sized, transposed parameters, buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 10)
        self.enter.weight = nn.Parameter(torch.randn(FEATURES, 10).t() * 0.3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mix = nn.Linear(10, 10)
        self.frozen = nn.Linear(10, 10)
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 10))
        self.again = nn.Linear(10, 10)
        self.again.weight = self.mix.weight
        self.leave = nn.Linear(10, 1)
        self.register_buffer("shift", torch.full((1, 10), 0.1))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = torch.tanh(self.mix(hidden)) + self.shift
        hidden = self.again(torch.tanh(self.frozen(hidden)))
        return self.leave(hidden) + nn.functional.linear(hidden, self.empty).sum()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 1))


class Tower(nn.Module):
    """Blocks between two projections."""

    def __init__(self, blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width, width + 3) for _ in range(blocks))
        self.leave = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(hidden)


def wide() -> nn.Module:
    """About 100,000 parameters in twenty equal blocks."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, 300), nn.Linear(300, FEATURES)) for _ in range(20))
    return nn.Sequential(*layers, nn.Linear(FEATURES, 1))
