"""Whatever blocks do inside, checkpointing them changes no number."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from engine import OptimizerConfig, TrainConfig
from tests.engine.training import (
    FEATURES,
    RanksOf,
    Setup,
    Weights,
    assert_same_weights,
    loss_of,
    over_shared_memory,
    reference,
    samples,
    stages,
    start,
    train,
)

WIDTH = 16

SGD = OptimizerConfig(name="sgd", lr=0.1)

Kind = Callable[[], nn.Module]


class Ladder(nn.Module):
    """Blocks of one kind, called as `call` says."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.leave(x)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class _Of:
    """Builds a ladder of blocks of a kind; pickles."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def __call__(self) -> nn.Module:
        return Ladder(self._kind)

    @property
    def __name__(self) -> str:
        return self._kind.__name__


class Products(nn.Module):
    """Two products with something between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(self.norm(x))))

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class InPlace(Products):
    def between(self, x: Tensor) -> Tensor:
        return x.relu_()


class Nested(Products):
    def between(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(y @ self.up.weight @ self.up.weight.t()), x, use_reentrant=False)


class Convolved(Products):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def between(self, x: Tensor) -> Tensor:
        return functional.gelu(self.convolution(x.unsqueeze(1)).squeeze(1))


class Attends(Products):
    """Attention over four positions of six features, then dropout: what is kept must not shift random numbers."""

    dropout = 0.0

    def between(self, x: Tensor) -> Tensor:
        q = x.view(-1, 1, 4, 6)
        mixed = functional.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout if self.training else 0.0)
        return functional.dropout(mixed.reshape(x.shape), 0.3, self.training)


class AttendsDropping(Attends):
    dropout = 0.5


class Keywords(nn.Module):
    """Takes keywords, one of which `torch.utils.checkpoint` has too, and returns a tuple and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Products()

    def forward(self, x: Tensor, *, bias: Tensor | None = None, debug: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        assert bias is not None
        x = self.inner(x + bias) * debug
        return x, {"next": bias * 2}


class CallsWithKeywords(Ladder):
    def __init__(self) -> None:
        super().__init__(Keywords)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        x, extra = block(x, bias=self.enter.bias, debug=-1.0)
        return x + extra["next"]


class CallsTwice(Ladder):
    def __init__(self) -> None:
        super().__init__(Products)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(block(block(x)))


class Autocast(Ladder):
    def __init__(self) -> None:
        super().__init__(Products)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


EXACT = [_Of(InPlace), _Of(Convolved), CallsWithKeywords, CallsTwice]
RANDOM_OR_ROUNDED = [_Of(Attends), _Of(AttendsDropping), Autocast]


def _config(stage: int, choice: str) -> TrainConfig:
    return TrainConfig.model_validate({"zero_stage": stage, "activation_checkpointing": choice})


@pytest.mark.parametrize("choice", ["selective", "full"])
@pytest.mark.parametrize("build", EXACT)
@pytest.mark.parametrize("stage", [0, 3])
def test_checkpointed_blocks_equal_plain_training(ranks: RanksOf, stage: int, build: Kind, choice: str) -> None:
    setup = Setup(build, _config(stage, choice), SGD, steps=3)
    assert_same_weights(ranks(2).run(train, setup), reference(setup))


@stages
@pytest.mark.parametrize("choice", ["selective", "full"])
def test_blocks_that_checkpoint_a_part_by_themselves(ranks: RanksOf, stage: int, choice: str) -> None:
    setup = Setup(_Of(Nested), _config(stage, choice), SGD, steps=3)
    assert_same_weights(ranks(2).run(train, setup), reference(setup))


@pytest.mark.parametrize("choice", ["selective", "full"])
@pytest.mark.parametrize("build", RANDOM_OR_ROUNDED)
@pytest.mark.parametrize("stage", [0, 3])
def test_checkpointed_blocks_repeat_what_is_random_or_rounded(ranks: RanksOf, stage: int, build: Kind,
                                                              choice: str) -> None:
    plain, ours = (ranks(2).run(train, Setup(build, _config(stage, each), SGD, steps=3)) for each in ("none", choice))
    assert_same_weights(ours, plain[0], atol=0, rtol=0)


def _train_on_two_losses(setup: Setup) -> list[Weights]:
    trainer = start(setup)
    history = []
    for step in range(setup.steps):
        inputs, target = (tensor[trainer.rank::2] for tensor in samples(step))
        output = trainer(inputs)
        trainer.backward(loss_of(output, target) / 4, retain_graph=True)
        trainer.backward(loss_of(output, target) * 3 / 4)
        trainer.step()
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


@stages
@pytest.mark.parametrize("choice", ["selective", "full"])
def test_a_checkpointed_graph_may_be_retained(ranks: RanksOf, stage: int, choice: str) -> None:
    setup = Setup(_Of(Products), _config(stage, choice), SGD, steps=3)
    assert_same_weights(ranks(2).run(_train_on_two_losses, setup), reference(setup))


class _Calls(TorchDispatchMode):
    """How often operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _calls(stage: int, choice: str) -> Counter[str]:
    trainer = start(Setup(_Of(Attends), _config(stage, choice)))
    inputs, target = samples(0)
    with _Calls() as calls:
        trainer.backward(loss_of(trainer(inputs), target))
    trainer.step()
    trainer.close()
    return calls.counts


@over_shared_memory
@pytest.mark.parametrize("stage", [0, 3])
def test_selective_checkpointing_repeats_no_product_and_no_fused_attention(ranks: RanksOf, stage: int) -> None:
    none, selective, full = (ranks(2).run(_calls, stage, choice)[0] for choice in ("none", "selective", "full"))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (none[attention], none["native_layer_norm"]) == (3, 3)
    for operator in ("addmm", "mm", attention):
        assert selective[operator] == none[operator]
    assert selective["native_layer_norm"] == full["native_layer_norm"] == 6
    assert full[attention] == 6
    assert full["addmm"] == none["addmm"] + 3  # the second product's result is in no block's graph


def _evaluates(stage: int, choice: str) -> tuple[Tensor, Tensor, Tensor]:
    trainer = start(Setup(_Of(AttendsDropping), _config(stage, choice)))
    inputs, _ = samples(0)
    trainer.eval()
    with torch.no_grad():
        without_graph = trainer(inputs)
    with torch.inference_mode():
        inference = trainer(inputs)
    with_graph = trainer(inputs)
    trainer.backward(with_graph.mean())
    trainer.step()
    trainer.close()
    return without_graph, inference.clone(), with_graph.detach()


@pytest.mark.parametrize("choice", ["selective", "full"])
@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_of_checkpointed_blocks(ranks: RanksOf, stage: int, choice: str) -> None:
    expected = ranks(2).run(_evaluates, stage, "none")[0][0]
    for outputs in ranks(2).run(_evaluates, stage, choice):
        assert all(torch.equal(output, expected) for output in outputs)
