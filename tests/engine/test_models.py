"""Models of every build train as plain replicas do, at every stage."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from engine import OptimizerConfig, TrainConfig
from tests.engine.replicas import SMALL_BUCKETS, Batch, Case, Training, assert_trains_as_replicas, each_world, ways
from tests.engine.training import FEATURES, Awkward, Block, RanksOf, Tower, loss_of, perceptron

FULL = SMALL_BUCKETS.model_copy(update={"activation_checkpointing": "full"})
SELECTIVE = SMALL_BUCKETS.model_copy(update={"activation_checkpointing": "selective"})
CLIPPED = SMALL_BUCKETS.model_copy(update={"gradient_clipping": 0.05})
UNEVEN = (2, 3)
"""Numbers of ranks where it matters what divides by them."""

SGD = OptimizerConfig(name="sgd", lr=0.05, momentum=0.9)
"""For gradients that are nothing but rounding, which Adam would blow up to whole steps."""


class Stack(nn.Module):
    """Equal layers of FEATURES between two projections."""

    def __init__(self, layer: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(layer() for _ in range(count))
        self.leave = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.leave(x)


class Inside(nn.Module):
    """A layer one level below its block."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = layer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def square() -> nn.Linear:
    return nn.Linear(FEATURES, FEATURES)


# Parameters


class Odd(nn.Module):
    """Empty parameters first, in between and last; scalars; strided, transposed ones; one larger than all buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, FEATURES))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.tensor([0.3]))
        self.flat_nothing = nn.Parameter(torch.zeros(4, 0, 2))
        self.large = nn.Parameter(torch.randn(50, FEATURES) * 0.3)
        self.transposed = nn.Parameter(torch.randn(5, FEATURES).t())
        self.strided = nn.Parameter(torch.randn(7, 2 * FEATURES)[:, ::2])
        self.expanded = nn.Parameter(torch.randn(FEATURES).expand(3, FEATURES), requires_grad=False)
        self.last = nn.Parameter(torch.zeros(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.large.t()).mean(1, keepdim=True) * self.scalar + self.single
        y = y + (x @ self.transposed).mean(1, keepdim=True) + (x @ self.strided.t()).mean(1, keepdim=True)
        y = y + (x @ self.expanded.t()).mean(1, keepdim=True)
        return y + (x @ self.nothing.t()).sum() + (y @ self.last.t()).sum() + self.flat_nothing.sum()


class SparseLookup(nn.Module):
    """Looks its own parameter up with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, FEATURES))
        self.leave = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        places = (x[:, :3].abs() * 5).long() % len(self.table)
        return self.leave(functional.embedding(places, self.table, sparse=True).mean(1))


class OnlyScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x.mean(1, keepdim=True)


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.linear(x, self.nothing).sum()


class NotReal(nn.Module):
    """Frozen parameters of dtypes that cannot train."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(FEATURES, 1)
        self.phase = nn.Parameter(torch.randn(FEATURES, dtype=torch.complex64), requires_grad=False)
        self.places = nn.Parameter(torch.arange(FEATURES), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(FEATURES) > 2, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.fft.ifft(torch.fft.fft(x) * self.phase).real + self.places * self.mask)


PARAMETERS = {
    "odd": Case(Odd, optimizer=SGD, worlds=UNEVEN),
    "only_a_scalar": Case(OnlyScalar, worlds=UNEVEN),
    "blocks_of_nothing": Case(partial(Stack, Nothing)),
    "not_real": Case(NotReal),
    "awkward_clipped": Case(Awkward, config=CLIPPED, worlds=UNEVEN),
}


# Layers that torch brings


class Buffered(nn.Module):
    """Running statistics, a counter, averages written in place and put anew, a buffer that is not saved, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = square(), nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(FEATURES))
        self.register_buffer("anew", torch.ones(FEATURES))
        self.register_buffer("shaped", torch.Tensor([3]).view(1, -1, 1, 1))
        self.register_buffer("unsaved", torch.ones(FEATURES), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(self.enter(x))
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
        self.anew = self.anew * 0.9
        return self.leave(torch.tanh(x) * self.unsaved + self.anew + self.average) + 0.01 * self.shaped.view(1, 1)


class Embeddings(nn.Module):
    """A table that is the output layer's weight too, with padding; a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(11, FEATURES, padding_idx=0), nn.EmbeddingBag(7, FEATURES)
        self.words, self.leave = nn.Linear(FEATURES, 11, bias=False), nn.Linear(11, 1)
        self.words.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :3].abs() * 5).long() % 11
        return self.leave(self.words(self.table(tokens).mean(1) + self.bag(tokens % 7) + x))


class Convolutions(nn.Module):
    """Weights whose memory is channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm, self.leave = nn.GroupNorm(2, 4), nn.Linear(4 * FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.second(torch.relu(self.first(x.view(-1, 1, 2, 4))))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.core = kind(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.leave = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.core(x.view(-1, 2, 4))[0][:, -1])


class Attends(nn.Module):
    """The output projection's weight is read by a function, its module never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True, add_bias_kv=True)
        self.norm = nn.LayerNorm(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        sequence = torch.stack([x, x.flip(1), x * 2], 1)
        return self.norm(x + self.attention(sequence, sequence, sequence)[0].mean(1))


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(FEATURES, 2, 12, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.leave = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.encoder(torch.stack([x, x.flip(1)], 1)).mean(1))


def _evaluates_first(training: Training, batch: Batch) -> None:
    """By the fast path of torch, which reads weights without calling the modules that they belong to."""
    training.module.eval()
    with torch.no_grad():
        training.module(batch.inputs)
    training.module.train()
    training.backward(loss_of(training.module(batch.inputs), batch.target))


LAYERS = {
    "buffers": Case(Buffered, optimizer=SGD),
    "embeddings": Case(Embeddings),
    "sparse_lookup": Case(SparseLookup, optimizer=SGD),
    "convolutions": Case(Convolutions),
    "lstm": Case(partial(Recurrent, nn.LSTM)),
    "gru": Case(partial(Recurrent, nn.GRU)),
    "attention": Case(partial(Stack, Attends), optimizer=SGD),
    "transformer": Case(Encodes, _evaluates_first, SGD),
}


# Weights computed from parameters


def _weight_norm() -> nn.Module:
    return parametrizations.weight_norm(square())


def _spectral_norm() -> nn.Module:
    return parametrizations.spectral_norm(square())


def _orthogonal() -> nn.Module:
    return parametrizations.orthogonal(square())


def _pruned() -> nn.Module:
    return prune.l1_unstructured(square(), "weight", amount=0.5)  # type: ignore[no-untyped-call, no-any-return]


def _hooked_spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(square())


COMPUTED = {
    "weight_norm": Case(partial(Stack, _weight_norm)),
    "weight_norm_inside": Case(partial(Stack, partial(Inside, _weight_norm))),
    "spectral_norm": Case(partial(Stack, _spectral_norm)),
    "orthogonal": Case(partial(Stack, _orthogonal)),
    "pruned_inside": Case(partial(Stack, partial(Inside, _pruned))),
    "hooked_spectral_norm_inside": Case(partial(Stack, partial(Inside, _hooked_spectral_norm))),
}


# Containers


class Collections(nn.Module):
    """Parameters in lists and dicts, lists of lists: modules that are never called themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.randn(FEATURES, FEATURES) * 0.3 for _ in range(3)])
        self.named = nn.ParameterDict({"shift": torch.randn(FEATURES), "gain": torch.tensor(0.7)})
        self.pairs = nn.ModuleList(nn.ModuleList([square(), square()]) for _ in range(2))
        self.parts = nn.ModuleList(nn.ModuleDict({"a": square(), "b": square()}) for _ in range(2))
        self.raw = nn.ModuleList(nn.ParameterList([torch.randn(FEATURES)]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        x = (x + self.named["shift"]) * self.named["gain"]
        for first, second in self.pairs:  # type: ignore[misc]
            x = torch.tanh(first(x)) + second(x)
        for parts in self.parts:
            x = torch.tanh(parts["a"](x)) + parts["b"](x)  # type: ignore[index]
        for (offset,) in self.raw:  # type: ignore[misc]
            x = x + offset
        return x.mean(1, keepdim=True)


def only_blocks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(2)), nn.Linear(FEATURES, FEATURES))


def _first_frozen() -> nn.Module:
    model = only_blocks()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def _mean(training: Training, batch: Batch) -> None:
    training.backward(loss_of(training.module(batch.inputs).mean(1, keepdim=True), batch.target))


def one_layer() -> nn.Module:
    return nn.Linear(FEATURES, 1)


CONTAINERS = {
    "collections": Case(Collections),
    "only_blocks": Case(only_blocks, _mean, worlds=UNEVEN),
    "only_blocks_first_frozen": Case(_first_frozen, _mean),
    "one_layer": Case(one_layer, worlds=UNEVEN),
}


# Frozen parameters


class LowRank(nn.Module):
    """A frozen layer with a small trainable one beside it, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = square().requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, FEATURES, bias=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + self.up(self.down(self.drop(x)))


class Adapted(nn.Module):
    """Nothing outside of the blocks trains, and of one block nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = square().requires_grad_(False), nn.Linear(FEATURES, 1).requires_grad_(False)
        self.blocks = nn.ModuleList(LowRank() for _ in range(4))
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.leave(x)


FROZEN = {f"adapted_{config.activation_checkpointing}": Case(Adapted, config=config, worlds=UNEVEN)
          for config in (SMALL_BUCKETS, FULL, SELECTIVE)}


# Sharing


class Albert(nn.Module):
    """One block at several places of a list, beside others."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block(FEATURES)
        self.blocks = nn.ModuleList([shared, Block(FEATURES), shared, Block(FEATURES), shared])
        self.leave = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Web(nn.Module):
    """Blocks of two lists that share parameters and a module with each other and with the root."""

    def __init__(self) -> None:
        super().__init__()
        self.table, common = nn.Linear(FEATURES, FEATURES, bias=False), square()
        self.encoder = nn.ModuleList(_Entangled(common) for _ in range(3))
        self.decoder = nn.ModuleList(_Entangled(common) for _ in range(2))
        self.decoder[1].own.weight = self.encoder[0].own.weight  # type: ignore[union-attr]
        self.decoder[0].gain = self.encoder[2].gain
        for block in (*self.encoder, *self.decoder):
            block.table = self.table.weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.table(x)
        for block in self.encoder:
            x = block(x, self.table.weight)
        for block in self.decoder:
            y = block(x + y, self.table.weight)
        return functional.linear(y, self.table.weight).mean(1, keepdim=True)


class _Entangled(nn.Module):
    def __init__(self, common: nn.Module) -> None:
        super().__init__()
        self.common, self.own, self.gain = common, square(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        table = self.get_parameter("table")
        return torch.tanh(self.common(x) + self.gain * self.own(x) + functional.linear(x, table) + x @ given)


class Regularized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x) + 0.01 * sum(parameter.square().sum() for parameter in self.parameters())


SHARING = {
    **{f"albert_{config.activation_checkpointing}": Case(Albert, config=config) for config in (SMALL_BUCKETS, FULL)},
    "web": Case(Web, worlds=UNEVEN),
    "web_checkpointed": Case(Web, config=FULL),
    "regularized": Case(Regularized),
}


# Optimizers


def _a_group_each(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [parameter], "lr": 0.005 * (number + 1), "weight_decay": 0.1 * (number % 2)}
                              for number, parameter in enumerate(parameters)])


def _some_only(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Trainable parameters that no group has stay as they are; a group may be empty."""
    every = list(parameters)
    return torch.optim.AdamW([{"params": every[:2], "lr": 0.01}, {"params": every[3:5]}, {"params": []}], lr=0.02)


def _mixed_momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.SGD([{"params": every[:1]}, {"params": every[1:], "momentum": 0.9, "dampening": 0.1}], lr=0.02)


def _other(kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any],
           parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return kind(parameters, **options)


def _lopsided() -> nn.Module:
    """Shards of the gradient differ in size by a million."""
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.Linear(6, 1))
    with torch.no_grad():
        model[0].weight.mul_(1000)
        model[1].weight.mul_(0.001)
    return model


OPTIMIZERS = {
    "a_group_each": Case(partial(Tower, 2, FEATURES), optimizer=_a_group_each, worlds=UNEVEN),
    "some_only": Case(partial(Tower, 2, FEATURES), optimizer=_some_only, config=CLIPPED, worlds=UNEVEN),
    "mixed_momentum": Case(perceptron, optimizer=_mixed_momentum),
    **{f"{kind.__name__.lower()}": Case(perceptron, optimizer=partial(_other, kind, options)) for kind, options in [
        (torch.optim.AdamW, {"lr": 0.02, "amsgrad": True, "maximize": True}), (torch.optim.Adamax, {"lr": 0.02}),
        (torch.optim.NAdam, {"lr": 0.02}), (torch.optim.ASGD, {"lr": 0.02}), (torch.optim.Rprop, {"lr": 0.02}),
        (torch.optim.Adadelta, {"lr": 0.2}), (torch.optim.RMSprop, {"lr": 0.02, "centered": True, "momentum": 0.5})]},
    **{f"lopsided_clipped_at_{limit}": Case(_lopsided, optimizer=OptimizerConfig(name="sgd", lr=0.1), worlds=UNEVEN,
                                            config=TrainConfig(reduce_bucket_size=20, gradient_clipping=limit))
       for limit in (0.001, 1.0)},
}


CASES = {**PARAMETERS, **LAYERS, **COMPUTED, **CONTAINERS, **FROZEN, **SHARING, **OPTIMIZERS}


@ways
@each_world(CASES)
def test_model_trains_as_replicas(ranks: RanksOf, stage: int, name: str, world_size: int) -> None:
    assert_trains_as_replicas(ranks, CASES[name], stage=stage, world_size=world_size)
