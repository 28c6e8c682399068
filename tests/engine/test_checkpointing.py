"""Activation checkpointing and compilation by blocks."""

import os
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine import ConfigurationError, TrainConfig
from engine.blocks import find_blocks
from engine.probe import StorageTracker
from engine.stages.parameter_sharded import ParameterSharded
from engine.trainer import initialize
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
    over_shared_memory,
    over_sockets,
    reference,
    run_step,
    stages,
    start,
    train,
)
from tests.support.ranks import RankError


@stages
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpointed_blocks_train_the_same(ranks: RanksOf, stage: int, checkpointing: str, world_size: int) -> None:
    config = TrainConfig.model_validate({"zero_stage": stage, "activation_checkpointing": checkpointing,
                                         "prefetch_bucket_size": 1})
    setup = Setup(Tower, config)
    assert_same_weights(ranks(world_size).run(train, setup), reference(setup))


class ChecksItself(nn.Module):
    """Checkpoints of its own, around blocks and around a layer that lies in none."""

    def __init__(self) -> None:
        super().__init__()
        self.reentrant = False
        self.enter = nn.Linear(FEATURES, 10)
        self.outside = nn.Linear(10, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for part in (self.outside, *self.blocks):
            x = torch.tanh(checkpoint(part, x, use_reentrant=self.reentrant))
        return self.leave(x)


def _checks_itself_reentrantly() -> nn.Module:
    model = ChecksItself()
    model.reentrant = True
    return model


@stages
@pytest.mark.parametrize("build", [ChecksItself, _checks_itself_reentrantly])
def test_models_that_checkpoint_by_themselves(ranks: RanksOf, stage: int, build: Callable[[], nn.Module]) -> None:
    setup = Setup(build, TrainConfig(zero_stage=stage))
    assert_same_weights(ranks(2).run(train, setup), reference(setup))


class SharesCheckpointed(nn.Module):
    """One layer in several reentrant checkpoints: its gradients come once for each, after others were complete."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 10)
        self.shared = nn.Linear(10, 10)
        self.leave = nn.Linear(10, 1)
        self.checkpoints = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(3):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True) if self.checkpoints else self.shared(x))
        return self.leave(x)


def _after_a_refused_step(stage: int) -> bool:
    """Whether a step after it is that of a trainer that never saw it."""
    setup = Setup(SharesCheckpointed, TrainConfig(zero_stage=stage, reduce_bucket_size=16))
    weights = []
    for refused in (True, False):
        trainer = start(setup)
        if refused:
            with pytest.raises(RuntimeError, match="use_reentrant=True share"):
                run_step(trainer, 0)
        trainer.module.checkpoints = False
        run_step(trainer, 1)
        weights.append(trainer.consolidated_state_dict())
        trainer.close()
    return all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@over_shared_memory
@stages
def test_gradients_of_a_refused_step_do_not_count(ranks: RanksOf, stage: int) -> None:
    assert ranks(2).run(_after_a_refused_step, stage) == [True, True]


@over_shared_memory
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_after_their_reduction_are_refused(ranks: RanksOf, stage: int) -> None:
    with pytest.raises(RankError, match=r"shared\.weight.*use_reentrant=True share"):
        ranks(2).run(train, Setup(SharesCheckpointed, TrainConfig(zero_stage=stage, reduce_bucket_size=16)))


@over_sockets
def test_at_stage_3_gradients_after_their_reduction_count(ranks: RanksOf) -> None:
    setup = Setup(SharesCheckpointed, TrainConfig(zero_stage=3, reduce_bucket_size=16))
    assert_same_weights(ranks(2).run(train, setup), reference(setup))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(2))
        self.leave = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def test_recomputation_repeats_dropout(ranks: RanksOf) -> None:
    configs = [TrainConfig.model_validate({"activation_checkpointing": choice})
               for choice in ("none", "full", "selective")]
    kept = [ranks(2).run(train, Setup(Dropped, config, steps=2)) for config in configs]
    for history in kept[1:]:
        assert all(torch.equal(history[0][-1][name], value) for name, value in kept[0][0][-1].items())


class PartlyFrozen(nn.Module):
    """Blocks of a frozen layer, then a trainable one; the first one's input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES)) for _ in range(3))
        for block in self.blocks:
            block[0].requires_grad_(False)  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean(1, keepdim=True)


def _train_partly_frozen(setup: Setup) -> tuple[list[Weights], list[int]]:
    trainer = start(setup)
    stage = trainer._stage
    history, gathered = [], []
    for step in range(setup.steps):
        for inputs, target in micro_batches(step, accumulation=setup.config.gradient_accumulation_steps):
            trainer.backward(loss_of(trainer(inputs), target))
            trainer.step()
            gathered.append(stage.gathered_bytes() if isinstance(stage, ParameterSharded) else 0)
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history, gathered


@stages
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_frozen_layer_in_a_checkpointed_block(ranks: RanksOf, stage: int, checkpointing: str) -> None:
    config = TrainConfig.model_validate({"zero_stage": stage, "activation_checkpointing": checkpointing,
                                         "gradient_accumulation_steps": 2})
    setup = Setup(PartlyFrozen, config)
    results = ranks(2).run(_train_partly_frozen, setup)
    assert_same_weights([history for history, _ in results], reference(setup))
    assert all(gathered == [0] * 10 for _, gathered in results)


class Attention(nn.Module):
    """A residual block whose attention is one operator, or leaves its scores in memory."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norm = nn.LayerNorm(32)
        self.project = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v
        return x + functional.gelu(self.out(mixed.transpose(1, 2).reshape(x.shape)))


class Transformer(nn.Module):
    def __init__(self, blocks: int = 4, *, fused: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(fused) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


TENSOR = 4 * 64 * 32 * 4
"""Bytes between two blocks."""

SCORES = 4 * 2 * 64 * 64 * 4
"""Bytes of one block's attention scores."""

RANDOM_STATES = 4 * 6_000
"""Bytes of the random states that four checkpoints keep."""


def _activation_bytes(build: Callable[[], nn.Module], stage: int, checkpointing: str) -> tuple[int, int]:
    """What a forward pass leaves for backward, and the most there is in either, gradients and gathers apart."""
    trainer = start(Setup(build, TrainConfig.model_validate({
        "zero_stage": stage, "activation_checkpointing": checkpointing, "overlap_comm": False})))
    with StorageTracker([*trainer.module.parameters(), torch.zeros(1)]) as tracker:
        loss = trainer(torch.randn(4, 64, 32)).square().mean()
        saved = tracker.bytes
        trainer.backward(loss)
        peak = tracker.peak_bytes - trainer.state_bytes().gradients
    trainer.step()
    trainer.close()
    return saved, peak


def test_blocks_are_found() -> None:
    tower = built(Tower)
    assert find_blocks(tower) == list(tower.blocks)  # type: ignore[arg-type]
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Tanh())) == []
    assert find_blocks(nn.Sequential(nn.Tanh(), nn.Tanh())) == []


def test_outermost_repetition_counts_and_all_lists_of_its_class() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[0](x)

    model = nn.ModuleDict({"encoder": nn.ModuleList(Layer() for _ in range(2)), "adapters": nn.ModuleList(
        nn.Linear(2, 2) for _ in range(9)), "decoder": nn.ModuleList(Layer() for _ in range(3))})
    blocks = find_blocks(model)
    assert len(blocks) == 5
    assert all(isinstance(block, Layer) for block in blocks)


def _in_pairs() -> nn.Module:
    return nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(3))


def _in_dicts() -> nn.Module:
    return nn.ModuleList(nn.ModuleDict({"only": Block()}) for _ in range(3))


def _of_parameters() -> nn.Module:
    return nn.ModuleList(nn.ParameterList([torch.zeros(4)]) for _ in range(3))


@pytest.mark.parametrize(("build", "kind", "count"), [(_in_pairs, nn.Linear, 6), (_in_dicts, Block, 0),
                                                      (_of_parameters, nn.Module, 0)])
def test_containers_are_no_blocks(build: Callable[[], nn.Module], kind: type[nn.Module], count: int) -> None:
    """The model's forward calls what is in them, not them."""
    blocks = find_blocks(build())
    assert [type(block) for block in blocks] == [kind] * count


@pytest.mark.parametrize("change", [{"activation_checkpointing": "full"}, {"compile": True}])
def test_what_works_by_blocks_is_refused_without(change: dict[str, object]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with pytest.raises(ConfigurationError, match=next(iter(change))) as caught:
        initialize(model, config=TrainConfig.model_validate(change))
    assert caught.value.fields == (next(iter(change)),)


def test_blocks_given_by_hand_are_checked() -> None:
    model = built(Tower)
    with pytest.raises(ConfigurationError, match="not a submodule"):
        initialize(model, config=TrainConfig(), blocks=[nn.Linear(2, 2)])
    first = model.blocks[0]  # type: ignore[index]
    with pytest.raises(ConfigurationError, match="twice"):
        initialize(model, config=TrainConfig(), blocks=[first, first.up])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="ModuleList has no forward"):
        initialize(model, config=TrainConfig(), blocks=[model.blocks])  # type: ignore[list-item]


def _compiled(stage: int, checkpointing: str) -> tuple[list[Weights], int]:
    torch.compiler.reset()
    counters.clear()
    config = TrainConfig.model_validate({"zero_stage": stage, "compile": True,
                                         "activation_checkpointing": checkpointing})
    history = train(Setup(Tower, config, steps=3))
    return history, counters["stats"]["unique_graphs"]


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(("stage", "checkpointing"), [
    (0, "none"), (1, "selective"), (2, "full"), (3, "none"), (3, "selective"), (3, "full")])
def test_compiled_blocks_train_the_same(ranks: RanksOf, stage: int, checkpointing: str) -> None:
    results = ranks(2 if stage == 3 else 1).run(_compiled, stage, checkpointing, timeout=250)
    assert_same_weights([history for history, _ in results], reference(Setup(Tower, steps=3)), atol=1e-5)
    assert all(graphs == 1 for _, graphs in results)  # all blocks share one


@pytest.mark.parametrize("stage", [0, 3])
def test_checkpointing_keeps_less_the_more_it_recomputes(ranks: RanksOf, stage: int) -> None:
    none, selective, full = (ranks(2).run(_activation_bytes, Transformer, stage, choice)[0][0]
                             for choice in ("none", "selective", "full"))
    assert full < selective < none
    assert full <= 7 * TENSOR + RANDOM_STATES  # the inputs of four blocks, their sum, the output and its square


def _unfused() -> nn.Module:
    return Transformer(fused=False)


def test_selective_checkpointing_keeps_no_attention_scores(ranks: RanksOf) -> None:
    none, selective = (ranks(1).run(_activation_bytes, _unfused, 0, choice)[0][0] for choice in ("none", "selective"))
    assert selective <= none - 4 * SCORES
    fused = ranks(1).run(_activation_bytes, Transformer, 0, "selective")[0][0]
    assert selective <= fused + RANDOM_STATES


def _one_block() -> nn.Module:
    return Transformer(blocks=1)


@pytest.mark.parametrize("stage", [0, 3])
def test_full_checkpointing_peaks_at_one_block_beyond_the_inputs_of_all(ranks: RanksOf, stage: int) -> None:
    _, one = ranks(2).run(_activation_bytes, _one_block, stage, "none")[0]
    _, four = ranks(2).run(_activation_bytes, Transformer, stage, "full")[0]
    assert four <= one + 4 * TENSOR + RANDOM_STATES
    _, unchecked = ranks(2).run(_activation_bytes, Transformer, stage, "none")[0]
    assert four < unchecked / 2
