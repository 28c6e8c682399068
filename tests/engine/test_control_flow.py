"""Graphs that differ between ranks or steps, and training loops that are not the plain one."""

import inspect

import pytest
import torch
from torch import Tensor, nn

from engine import OptimizerConfig, TrainConfig
from engine.trainer import initialize
from tests.engine.replicas import gathered_bytes
from tests.engine.training import (
    FEATURES,
    Block,
    RanksOf,
    Setup,
    Tower,
    Weights,
    assert_same_weights,
    built,
    loss_of,
    micro_batches,
    over_sockets,
    perceptron,
    plain_optimizer,
    reference,
    run_step,
    samples,
    stages,
    start,
    train,
    worlds,
)
from tests.support.ranks import RankPool


class Experts(nn.Module):
    """Three experts, of which a forward uses one or none, whatever the others do."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, FEATURES)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.leave = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        x = torch.tanh(self.enter(x))
        for number in order:
            x = torch.tanh(self.experts[number](x))
        return self.leave(x)


ROUTES = [[(0,), (1,)], [(1, 0), (0, 1)], [(0,), ()], [(1, 0), (1,)]]
"""For every step, the experts that rank 0 and rank 1 use; the third is never used."""


def _route(stage: int, buckets: int) -> list[Weights]:
    setup = Setup(Experts, TrainConfig(zero_stage=stage, reduce_bucket_size=buckets, prefetch_bucket_size=1),
                  OptimizerConfig(lr=0.05, weight_decay=0.5))
    trainer = start(setup)
    history = []
    for step, routes in enumerate(ROUTES):
        (inputs, target), = micro_batches(step, accumulation=1)
        trainer.backward(loss_of(trainer(inputs, routes[trainer.rank % 2]), target))
        trainer.step()
        history.append(trainer.consolidated_state_dict())
        assert gathered_bytes(trainer) == 0
    trainer.close()
    return history


def _route_reference() -> list[Weights]:
    model = built(Experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    history = []
    for step, routes in enumerate(ROUTES):
        optimizer.zero_grad()
        inputs, target = samples(step)
        for rank, route in enumerate(routes):
            rows = slice(rank * 6, rank * 6 + 6)
            (loss_of(model(inputs[rows], route), target[rows]) / 2).backward()
        optimizer.step()
        history.append({name: value.clone() for name, value in model.state_dict().items()})
    return history


@stages
@pytest.mark.parametrize("buckets", [50, 10_000])
def test_ranks_that_use_different_experts_neither_hang_nor_differ(ranks: RanksOf, stage: int, buckets: int) -> None:
    histories = ranks(2).run(_route, stage, buckets, timeout=30)
    assert_same_weights(histories, _route_reference())
    unused = built(Experts).state_dict()["experts.2.weight"]
    assert torch.equal(histories[0][-1]["experts.2.weight"], unused)


def _unused_then_used(stage: int) -> list[Weights]:
    """Expert 1 is used for the first time at the third step, with momentum."""
    trainer = start(Setup(Experts, TrainConfig(zero_stage=stage), OptimizerConfig(name="sgd", lr=0.1, momentum=0.9)))
    history = []
    for step, route in enumerate([(0,), (0,), (0, 1), (1,)]):
        (inputs, target), = micro_batches(step, accumulation=1)
        trainer.backward(loss_of(trainer(inputs, route), target))
        trainer.step()
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


@stages
def test_parameter_first_used_late_starts_its_momentum_then(ranks: RanksOf, stage: int) -> None:
    model = built(Experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step, route in enumerate([(0,), (0,), (0, 1), (1,)]):
        optimizer.zero_grad()
        inputs, target = samples(step)
        loss_of(model(inputs, route), target).backward()
        optimizer.step()
        expected.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same_weights(ranks(2).run(_unused_then_used, stage), expected)


def _two_backwards(stage: int) -> list[Weights]:
    trainer = start(Setup(Tower, TrainConfig(zero_stage=stage, reduce_bucket_size=100)))
    history = []
    for step in range(3):
        (inputs, target), = micro_batches(step, accumulation=1)
        output = trainer(inputs)
        trainer.backward(loss_of(output, target), retain_graph=True)
        trainer.backward(output.abs().mean())
        trainer.step()
        history.append(trainer.consolidated_state_dict())
    assert gathered_bytes(trainer) == 0
    trainer.close()
    return history


@stages
@worlds
def test_two_backward_calls_through_one_graph_add_up(ranks: RanksOf, stage: int, world_size: int) -> None:
    model = built(Tower)
    optimizer = plain_optimizer(OptimizerConfig(lr=0.01, weight_decay=0.1), list(model.parameters()))
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        inputs, target = samples(step)
        output = model(inputs)
        (loss_of(output, target) + output.abs().mean()).backward()
        optimizer.step()
        expected.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same_weights(ranks(world_size).run(_two_backwards, stage), expected)


def _several_forwards(stage: int) -> list[Weights]:
    trainer = start(Setup(Tower, TrainConfig(zero_stage=stage)))
    history = []
    for step in range(3):
        (inputs, target), = micro_batches(step, accumulation=1)
        halves = [loss_of(trainer(inputs[rows]), target[rows]) for rows in (slice(0, 3), slice(3, 6))]
        trainer.backward((halves[0] + halves[1]) / 2)
        trainer.step()
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


@stages
def test_several_forwards_before_one_backward(ranks: RanksOf, stage: int) -> None:
    assert_same_weights(ranks(2).run(_several_forwards, stage), reference(Setup(Tower, steps=3)))


def _loop_with_no_sync(stage: int, style: str) -> list[Weights]:
    """The first micro-batches inside of no_sync, the last outside."""
    trainer = start(Setup(Tower, TrainConfig(zero_stage=stage, gradient_accumulation_steps=3)))
    history = []
    for step in range(3):
        *inside, last = micro_batches(step, accumulation=3)
        if style == "one block":
            with trainer.no_sync():
                for inputs, target in inside:
                    trainer.backward(loss_of(trainer(inputs), target))
        else:
            for inputs, target in inside:
                with trainer.no_sync():
                    trainer.backward(loss_of(trainer(inputs), target))
                if style == "step each":
                    assert not trainer.step().boundary
        trainer.backward(loss_of(trainer(last[0]), last[1]))
        assert trainer.step().boundary
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


@stages
@pytest.mark.parametrize("style", ["one block", "block each", "step each"])
def test_no_sync_around_all_but_the_last_micro_batch(ranks: RanksOf, stage: int, style: str) -> None:
    assert_same_weights(ranks(2).run(_loop_with_no_sync, stage, style), reference(Setup(Tower, steps=3)))


def _everything_in_no_sync(stage: int) -> list[Weights]:
    trainer = start(Setup(Tower, TrainConfig(zero_stage=stage, gradient_accumulation_steps=2), steps=2))
    history = []
    for step in range(2):
        with trainer.no_sync():
            run_step(trainer, step)
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


@stages
def test_step_reduces_what_no_sync_kept_back(ranks: RanksOf, stage: int) -> None:
    assert_same_weights(ranks(2).run(_everything_in_no_sync, stage), reference(Setup(Tower, steps=2)))


class Repeats(nn.Module):
    """Its first block runs twice in odd forwards and three times in even ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(FEATURES) for _ in range(3))
        self.leave = nn.Linear(FEATURES, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.blocks[1](self.blocks[0](x))
        for _ in range(1 if self.calls % 2 else 2):
            x = self.blocks[0](x)
        return self.leave(self.blocks[2](x))


def _train_and_look(setup: Setup) -> tuple[list[Weights], list[int]]:
    trainer = start(setup)
    history, gathered = [], []
    for step in range(setup.steps):
        run_step(trainer, step)
        gathered.append(gathered_bytes(trainer))
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history, gathered


@stages
@worlds
@pytest.mark.parametrize("prefetch", [1, 10_000])
def test_block_called_a_different_number_of_times_each_step(ranks: RanksOf, stage: int, world_size: int,
                                                            prefetch: int) -> None:
    setup = Setup(Repeats, TrainConfig(zero_stage=stage, reduce_bucket_size=60, prefetch_bucket_size=prefetch), steps=6)
    results = ranks(world_size).run(_train_and_look, setup)
    assert_same_weights([history for history, _ in results], reference(setup))
    assert all(gathered == [0] * 6 for _, gathered in results)


def _evaluates_between(stage: int) -> tuple[list[Weights], float]:
    trainer = start(Setup(Tower, TrainConfig(zero_stage=stage, gradient_accumulation_steps=2), steps=4))
    history, evaluation = [], 0.0
    for step in range(4):
        for inputs, target in micro_batches(step, accumulation=2):
            trainer.backward(loss_of(trainer(inputs), target))
            trainer.eval()
            with torch.no_grad():
                evaluation = float(loss_of(trainer(samples(99)[0]), samples(99)[1]))
            trainer.train()
            trainer.step()
        history.append(trainer.consolidated_state_dict())
    assert gathered_bytes(trainer) == 0
    trainer.close()
    return history, evaluation


@stages
def test_evaluation_in_the_middle_of_a_step_changes_nothing(ranks: RanksOf, stage: int) -> None:
    expected = reference(Setup(Tower, steps=4))
    results = ranks(2).run(_evaluates_between, stage)
    assert_same_weights([history for history, _ in results], expected)
    model = built(Tower)
    model.load_state_dict(expected[2])  # the last evaluation comes before the last step
    inputs, target = samples(99)
    assert results[0][1] == pytest.approx(float(loss_of(model(inputs), target).detach()), rel=1e-5)


class Encoder(Tower):
    """A method of its own that runs a part of it, as contrastive models have."""

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.enter(x))


def _trains_by_another_method(stage: int) -> list[Weights]:
    setup = Setup(Encoder, TrainConfig(zero_stage=stage))
    trainer = start(setup)
    assert isinstance(trainer.module, Encoder)
    history = []
    for step in range(setup.steps):
        (inputs, target), = micro_batches(step, accumulation=1)
        trainer.backward(loss_of(trainer.module.encode(inputs).mean(1, keepdim=True), target))
        trainer.step()
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


class Encoding(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).mean(1, keepdim=True)


@stages
def test_training_by_another_method_than_forward(ranks: RanksOf, stage: int) -> None:
    assert_same_weights(ranks(2).run(_trains_by_another_method, stage), reference(Setup(Encoding)))


@stages
def test_forward_keeps_its_signature(stage: int) -> None:
    """Which libraries read to know what a model takes: `generate` of transformers, for one."""
    trainer = initialize(built(Tower), config=TrainConfig(zero_stage=stage))
    for module in trainer.module.modules():
        plain = inspect.signature(type(module).forward.__get__(module))
        assert inspect.signature(module.forward) == plain
    trainer.close()


@stages
def test_a_step_needs_a_backward(stage: int) -> None:
    trainer = initialize(perceptron(), config=TrainConfig(zero_stage=stage, gradient_accumulation_steps=2))
    with pytest.raises(RuntimeError, match=r"call trainer\.backward"):
        trainer.step()
    trainer.backward(trainer(samples(0)[0]).sum())
    trainer.step()
    with pytest.raises(RuntimeError, match=r"call trainer\.backward"):
        trainer.step()
    trainer.close()


def _different_loss(stage: int) -> tuple[float, float]:
    trainer = start(Setup(perceptron, TrainConfig(zero_stage=stage)))
    output = trainer(samples(0)[0])
    with pytest.raises(ValueError, match="scalar"):
        trainer.backward(output)
    trainer.close()
    return 0.0, 0.0


def test_loss_must_be_a_scalar(ranks: RanksOf) -> None:
    ranks(1).run(_different_loss, 2)


def _collectives(stage: int, accumulation: int, bucket: int) -> list[dict[str, int]]:
    trainer = start(Setup(Tower, TrainConfig(zero_stage=stage, gradient_accumulation_steps=accumulation,
                                             reduce_bucket_size=bucket)))
    counts, before = [], trainer.collective_counts
    for step in range(5):
        run_step(trainer, step)
        after = trainer.collective_counts
        counts.append({kind: after[kind] - before.get(kind, 0) for kind in after})
        before = after
    trainer.close()
    return counts


@over_sockets
@pytest.mark.parametrize(("stage", "reductions_per_bucket"), [(0, 1), (1, 1), (2, 3), (3, 3)])
def test_stages_0_and_1_reduce_once_per_step_2_and_3_once_per_micro_batch(ranks: RanksOf, stage: int,
                                                                          reductions_per_bucket: int) -> None:
    counts = ranks(2).run(_collectives, stage, 3, 10**9)[0]
    buckets = 1 if stage < 3 else 5  # stage 3 has one for each of the 4 blocks and one for the rest
    kind = "reduce_scatter" if stage else "all_reduce"
    assert [step[kind] for step in counts] == [buckets * reductions_per_bucket] * 5


@stages
def test_collectives_fall_as_buckets_grow_and_stay_the_same_over_steps(ranks: RanksOf, stage: int) -> None:
    kind = "reduce_scatter" if stage else "all_reduce"
    totals = []
    for bucket in (1, 300, 10**9):
        counts = ranks(2).run(_collectives, stage, 1, bucket)[0]
        assert counts[0][kind] == counts[4][kind]
        totals.append(counts[4][kind])
    assert totals[0] == 20  # parameters: 4 blocks of 4, two layers of 2
    assert totals[0] > totals[1] > totals[2]


def _sent(stage: int) -> tuple[int, int]:
    trainer = start(Setup(Tower, TrainConfig(zero_stage=stage)))
    run_step(trainer, 0)
    before = trainer.communicated_bytes
    run_step(trainer, 1)
    sent = trainer.communicated_bytes - before
    padded = sum(bucket.size for bucket in trainer._stage.buckets)
    trainer.close()
    return sent, padded


@over_sockets
@stages
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_moves_what_theory_says(ranks: RanksOf, stage: int, world_size: int) -> None:
    volumes = 3 if stage == 3 else 2
    for sent, padded in ranks(world_size).run(_sent, stage):
        assert sent == volumes * padded * 4 * (world_size - 1) // world_size


def _schedule(stage: int) -> list[float]:
    trainer = start(Setup(perceptron, TrainConfig(zero_stage=stage), OptimizerConfig(name="sgd", lr=0.1)))
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, step_size=1, gamma=0.5)
    rates = []
    for step in range(4):
        before = trainer.consolidated_state_dict()["0.weight"]
        run_step(trainer, step)
        scheduler.step()
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        del before
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    weights = trainer.consolidated_state_dict()
    run_step(trainer, 4)
    after = trainer.consolidated_state_dict()
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    trainer.close()
    return rates


@stages
def test_learning_rate_schedulers_and_changes_by_hand_take_effect(ranks: RanksOf, stage: int) -> None:
    assert ranks(2).run(_schedule, stage)[0] == pytest.approx([0.05, 0.025, 0.0125, 0.00625])


def _close_restores() -> tuple[bool, int, list[str]]:
    model = built(Tower)
    setup = Setup(Tower, TrainConfig(zero_stage=2))
    before = set(vars(model.blocks[0]))
    trainer = start(setup)
    run_step(trainer, 0)
    module = trainer.module
    trainer.close()
    trainer.close()
    hooks = sum(len(inner._forward_pre_hooks) + len(inner._forward_hooks) for inner in module.modules())
    (inputs, target), = micro_batches(0, accumulation=1)
    loss_of(module(inputs), target).backward()  # trains on as a plain module
    has_gradient = all(p.grad is not None for p in module.parameters())
    return has_gradient, hooks, sorted(set(vars(module.blocks[0])) - before)  # type: ignore[arg-type]


def test_close_leaves_a_plain_module_behind(ranks: RanksOf) -> None:
    assert ranks(2).run(_close_restores) == [(True, 0, [])] * 2


@stages
def test_training_twice_in_one_process_gives_the_same(ranks: RanksOf, stage: int) -> None:
    setup = Setup(Tower, TrainConfig(zero_stage=stage))
    first, second = ranks(2).run(train, setup), ranks(2).run(train, setup)
    for ours, theirs in zip(first[0], second[0], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _fails_midway(stage: int) -> str:
    """One rank's backward fails while the other's reductions wait for it; closing must not."""
    trainer = start(Setup(perceptron, TrainConfig(zero_stage=stage, reduce_bucket_size=10)))
    (inputs, target), = micro_batches(0, accumulation=1)
    loss = loss_of(trainer(inputs), target)
    if trainer.rank == 0:
        trainer.close()
        return "failed"
    states = trainer._stage.gradients
    states.begin_pass(reduce=True)
    states.launch(states.states[0])
    del loss
    trainer.close()
    return "closed"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_closing_does_not_wait_for_a_rank_that_failed(stage: int) -> None:
    pool = RankPool()
    try:
        assert pool.run(2, _fails_midway, stage, timeout=30) == ["failed", "closed"]
    finally:
        pool.close()
