"""Models and configurations drawn by hypothesis, and what plain PyTorch makes of the same."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from engine import TrainConfig
from engine.trainer import Trainer, initialize
from tests.engine.training import FEATURES, GLOBAL_BATCH, Weights, loss_of, samples


@dataclass(frozen=True)
class LayerSpec:
    """One layer.

    Attributes:
        width: of its output; 0 leaves the next layer nothing but its bias.
        gain: has a zero-dimensional parameter.
        spare: has a parameter that nothing uses.
        tied: has the weight of the last layer before it whose weight has the same shape, where there is one.
        gated: is passed over in some micro-batches, where its input and output have one width.
    """

    width: int
    bias: bool = False
    gain: bool = False
    spare: bool = False
    frozen: bool = False
    tied: bool = False
    gated: bool = False


@dataclass(frozen=True)
class Optimizer:
    """A factory of an optimizer with so many groups; the first parameter may be in none."""

    name: str
    groups: int = 1
    omits_first: bool = False

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        members = list(parameters)
        members = members[self.omits_first and len(members) > 1:]
        groups = [{"params": members[number::self.groups], "lr": 0.02 * (number + 1)} for number in range(self.groups)]
        match self.name:
            case "adamw":
                # A large eps: else an update by a gradient of rounding errors is as large as any other.
                return torch.optim.AdamW(groups, eps=1e-3, weight_decay=0.1)
            case "momentum":
                return torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01)
            case _:
                return torch.optim.SGD(groups)


@dataclass(frozen=True)
class Drawn:
    """A model and its optimizer.

    Attributes:
        blocks: so many of the first layers are blocks.
    """

    layers: tuple[LayerSpec, ...]
    blocks: int
    optimizer: Optimizer

    def build(self) -> "Model":
        torch.manual_seed(7)
        return Model(self.layers)


@dataclass(frozen=True)
class Layout:
    """How it is trained."""

    world_size: int
    sockets: bool
    config: TrainConfig


class Layer(nn.Module):
    def __init__(self, spec: LayerSpec, inputs: int, before: Iterable["Layer"]) -> None:
        super().__init__()
        self.gated = spec.gated and spec.width == inputs
        self.weight = nn.Parameter(torch.randn(spec.width, inputs) / max(inputs, 1) ** 0.5)
        self.bias = nn.Parameter(torch.randn(spec.width) / 4) if spec.bias else None
        self.gain = nn.Parameter(torch.tensor(0.8)) if spec.gain else None
        self.spare = nn.Parameter(torch.randn(5, 3)) if spec.spare else None
        self.requires_grad_(not spec.frozen)
        for other in before:
            if spec.tied and other.weight.shape == self.weight.shape:
                self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.weight, self.bias)
        return torch.tanh(x if self.gain is None else x * self.gain)


class Model(nn.Module):
    """The layers, and one that leads to a single output."""

    def __init__(self, specs: Iterable[LayerSpec]) -> None:
        super().__init__()
        layers: list[Layer] = []
        width = FEATURES
        for spec in (*specs, LayerSpec(1, bias=True)):
            layers.append(Layer(spec, width, layers))
            width = spec.width
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        hidden, skips = x, bool(x[0, 0] < 0)
        for layer in self.layers:
            if not (layer.gated and skips):
                hidden = layer(hidden)
        return hidden


def start(drawn: Drawn, config: TrainConfig) -> Trainer:
    model = drawn.build()
    blocks = list(model.layers)[:drawn.blocks]
    if not blocks:
        config = config.model_copy(update={"activation_checkpointing": "none"})
    return initialize(model, config=config, optimizer=drawn.optimizer, blocks=blocks)


def micro_batches(step: int, *, world_size: int, accumulation: int) -> list[tuple[Tensor, Tensor]]:
    """Of all ranks: those of the first micro-step in rank order, then those of the next."""
    inputs, targets = samples(step)
    size = GLOBAL_BATCH // (world_size * accumulation)
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def run_step(trainer: Trainer, step: int) -> list[float]:
    """One optimizer step; this rank's losses."""
    accumulation, ranks = trainer.config.gradient_accumulation_steps, trainer.data_parallel_size
    losses = []
    for inputs, target in micro_batches(step, world_size=ranks, accumulation=accumulation)[trainer.rank::ranks]:
        loss = loss_of(trainer(inputs), target)
        trainer.backward(loss)
        trainer.step()
        losses.append(loss.item())
    return losses


def reference(drawn: Drawn, layout: Layout, steps: int) -> tuple[list[float], Weights]:
    """In one process: mean loss of every step, and the weights at the end."""
    model, config = drawn.build(), layout.config
    optimizer = drawn.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    history = []
    for step in range(steps):
        model.zero_grad()
        batches = micro_batches(step, world_size=layout.world_size, accumulation=config.gradient_accumulation_steps)
        losses = [loss_of(model(inputs), target) for inputs, target in batches]
        torch.stack(losses).mean().backward()
        if config.gradient_clipping:
            nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clipping)
        optimizer.step()
        history.append(torch.stack(losses).mean().item())
    return history, {name: value.detach().clone() for name, value in model.state_dict().items()}


widths = st.sampled_from([1, 2, 8, 8, 13, 0, 16, 17, 33])
layer_specs = st.builds(LayerSpec, width=widths, bias=st.booleans(), gain=st.booleans(), spare=st.booleans(),
                        frozen=st.booleans(), tied=st.booleans(), gated=st.booleans())
optimizers = st.builds(Optimizer, name=st.sampled_from(["sgd", "momentum", "adamw"]), groups=st.integers(1, 3),
                       omits_first=st.booleans())
models = st.builds(Drawn, layers=st.lists(layer_specs, max_size=6).map(tuple), blocks=st.integers(0, 6),
                   optimizer=optimizers)
sizes = st.one_of(st.integers(1, 700), st.just(10_000_000))


@st.composite
def layouts(draw: st.DrawFn, **fixed: st.SearchStrategy[Any]) -> Layout:
    """Any layout on up to three ranks.

    Args:
        fixed: fields of the configuration that are drawn otherwise.
    """
    fields = {
        "zero_stage": st.integers(0, 3), "gradient_accumulation_steps": st.sampled_from([1, 2]),
        "reduce_bucket_size": sizes, "allgather_bucket_size": sizes, "prefetch_bucket_size": sizes,
        "overlap_comm": st.booleans(), "gradient_clipping": st.sampled_from([0.0, 0.05, 100.0]),
        "offload_optimizer_ratio": st.sampled_from([0.0, 1.0, 0.4]), "offload_param": st.booleans(),
        "activation_checkpointing": st.sampled_from(["none", "full"]), **fixed}
    values = {name: draw(strategy) for name, strategy in fields.items()}
    values["offload_param"] = values["offload_param"] and values["zero_stage"] == 3
    return Layout(draw(st.integers(1, 3)), draw(st.booleans()), TrainConfig.model_validate(values))
