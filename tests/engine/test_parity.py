"""Every stage trains as one plain PyTorch process with the whole global batch does."""

from collections.abc import Callable, Iterable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from engine import OptimizerConfig, TrainConfig
from tests.engine.training import (
    FEATURES,
    Awkward,
    RanksOf,
    Setup,
    Tower,
    assert_same_weights,
    micro_batches,
    perceptron,
    reference,
    samples,
    stages,
    start,
    train,
    worlds,
)

ADAMW = OptimizerConfig(lr=0.01, weight_decay=0.1)
MOMENTUM = OptimizerConfig(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.01)



@stages
@worlds
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize(("accumulation", "clipping"), [(1, 0.0), (2, 0.3)], ids=["plain", "accumulated-clipped"])
def test_awkward_model_trains_as_one_process(ranks: RanksOf, stage: int, world_size: int, optimizer: OptimizerConfig,
                                             accumulation: int, clipping: float) -> None:
    config = TrainConfig(zero_stage=stage, gradient_accumulation_steps=accumulation, gradient_clipping=clipping,
                         reduce_bucket_size=150, allgather_bucket_size=400, prefetch_bucket_size=200)
    setup = Setup(Awkward, config, optimizer)
    assert_same_weights(ranks(world_size).run(train, setup), reference(setup))


@stages
@pytest.mark.parametrize("accumulation", [1, 4])
def test_default_buckets_without_overlap(ranks: RanksOf, stage: int, accumulation: int) -> None:
    config = TrainConfig(zero_stage=stage, gradient_accumulation_steps=accumulation, overlap_comm=False)
    if accumulation == 4:  # 12 samples, 4 micro-batches: 3 ranks with one sample each
        setup = Setup(Tower, config, steps=6)
        assert_same_weights(ranks(3).run(train, setup), reference(setup))
    else:
        setup = Setup(Tower, config)
        assert_same_weights(ranks(2).run(train, setup), reference(setup))


@pytest.mark.parametrize("name", ["adam", "adagrad", "radam", "rmsprop"])
@pytest.mark.parametrize("stage", [1, 3])
def test_every_stock_optimizer(ranks: RanksOf, name: str, stage: int) -> None:
    setup = Setup(Awkward, TrainConfig(zero_stage=stage), OptimizerConfig(name=name, lr=0.01, weight_decay=0.01))
    assert_same_weights(ranks(2).run(train, setup), reference(setup), atol=2e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_do_not_depend_on_bucket_sizes(ranks: RanksOf, stage: int, world_size: int) -> None:
    first = None
    for size in (1, 100, 10_000, 500_000_000):
        config = TrainConfig(zero_stage=stage, reduce_bucket_size=size, allgather_bucket_size=size,
                             prefetch_bucket_size=size)
        history = ranks(world_size).run(train, Setup(Awkward, config))[0]
        first = first or history
        for ours, theirs in zip(history, first, strict=True):
            assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_stage_0_weights_do_not_depend_on_bucket_sizes_at_two_ranks(ranks: RanksOf) -> None:
    histories = [ranks(2).run(train, Setup(Awkward, TrainConfig(reduce_bucket_size=size)))[0]
                 for size in (1, 300, 10**7)]
    for history in histories[1:]:
        for ours, theirs in zip(history, histories[0], strict=True):
            assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@stages
def test_ranks_hold_bitwise_equal_weights(ranks: RanksOf, stage: int) -> None:
    first, second, third = ranks(3).run(train, Setup(Awkward, TrainConfig(zero_stage=stage)))
    for one, two, three in zip(first, second, third, strict=True):
        assert all(torch.equal(one[name], two[name]) and torch.equal(one[name], three[name]) for name in one)


class ReusedLayer(nn.Module):
    """The last layer reuses the first one's weight and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.middle = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, FEATURES)
        self.last.weight, self.last.bias = self.first.weight, self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))).mean(1, keepdim=True)


@stages
@pytest.mark.parametrize("overlap", [True, False])
def test_layer_that_reuses_anothers_parameters(ranks: RanksOf, stage: int, overlap: bool) -> None:
    setup = Setup(ReusedLayer, TrainConfig(zero_stage=stage, overlap_comm=overlap, reduce_bucket_size=70),
                  OptimizerConfig(name="sgd", lr=0.1))
    assert_same_weights(ranks(2).run(train, setup), reference(setup))


class TiedBlocks(nn.Module):
    """Two blocks share a weight, and the head shares one with the entry."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, FEATURES, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return nn.functional.linear(x, self.enter.weight).mean(1, keepdim=True)


@stages
@worlds
def test_blocks_that_share_a_weight(ranks: RanksOf, stage: int, world_size: int) -> None:
    setup = Setup(TiedBlocks, TrainConfig(zero_stage=stage, reduce_bucket_size=60, prefetch_bucket_size=1))
    assert_same_weights(ranks(world_size).run(train, setup), reference(setup))


def _split_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """A group with a single element, one without decay, and the rest."""
    every = list(parameters)
    single = [p for p in every if p.numel() == 1]
    vectors = [p for p in every if p.dim() <= 1 and p.numel() > 1]
    matrices = [p for p in every if p.dim() > 1]
    return torch.optim.AdamW([{"params": single, "lr": 0.003}, {"params": vectors, "weight_decay": 0.0},
                              {"params": matrices}], lr=0.01, weight_decay=0.2)


def _split_groups_momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.SGD([{"params": every[-1:], "lr": 0.003}, {"params": every[:-1]}], lr=0.05, momentum=0.9,
                           nesterov=True)


@pytest.mark.parametrize("factory", [_split_groups, _split_groups_momentum])
@stages
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameter_groups_of_a_factory(ranks: RanksOf, stage: int, world_size: int,
                                       factory: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> None:
    setup = Setup(Awkward, TrainConfig(zero_stage=stage, gradient_clipping=0.5), factory)
    assert_same_weights(ranks(world_size).run(train, setup), reference(setup))


def _first_step_gradients_are_means(stage: int) -> float:
    """The largest change by one plain SGD step, over the learning rate: the gradient's largest element."""
    setup = Setup(perceptron, TrainConfig(zero_stage=stage), OptimizerConfig(name="sgd", lr=0.1), steps=1)
    torch.manual_seed(7)
    before = perceptron().state_dict()
    after = train(setup)[0]
    return max(float((before[name] - after[name]).abs().max()) / 0.1 for name in before)


@stages
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_never_scaled_by_the_number_of_ranks(ranks: RanksOf, stage: int, world_size: int) -> None:
    torch.manual_seed(7)
    model = perceptron()
    inputs, target = samples(0)
    (model(inputs) - target).square().mean().backward()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for measured in ranks(world_size).run(_first_step_gradients_are_means, stage):
        assert measured == pytest.approx(largest, rel=1e-4)


def _norms(stage: int, accumulation: int) -> list[float | None]:
    config = TrainConfig(zero_stage=stage, gradient_clipping=1.0, gradient_accumulation_steps=accumulation,
                         reduce_bucket_size=10)
    trainer = start(Setup(_lopsided, config, OptimizerConfig(name="sgd", lr=0.1)))
    norms = []
    for inputs, target in micro_batches(0, accumulation=accumulation):
        trainer.backward((trainer(inputs) - target).square().mean())
        result = trainer.step()
        norms.append(result.grad_norm)
    trainer.close()
    return norms


def _lopsided() -> nn.Module:
    """Gradients of one layer are about 100 times those of the other."""
    model = nn.Sequential(nn.Linear(FEATURES, 6), nn.Linear(6, 1))
    with torch.no_grad():
        model[0].weight.mul_(100)
    return model


@pytest.mark.parametrize(("stage", "accumulation"), list(product([0, 1, 2, 3], [1, 2])))
def test_one_gradient_norm_on_all_ranks_as_torch_computes_it(ranks: RanksOf, stage: int, accumulation: int) -> None:
    torch.manual_seed(7)
    model = _lopsided()
    inputs, target = samples(0)
    (model(inputs) - target).square().mean().backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    first, second = ranks(2).run(_norms, stage, accumulation)
    assert first == second
    assert first[-1] == pytest.approx(expected, rel=1e-5)
    assert all(norm is None for norm in first[:-1])
    setup = Setup(_lopsided, TrainConfig(zero_stage=stage, gradient_clipping=1.0), OptimizerConfig(name="sgd", lr=0.1))
    assert_same_weights(ranks(2).run(train, setup), reference(setup), rtol=1e-4)
