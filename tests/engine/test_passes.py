"""What stage 3 among hosts gathers, when, and how its ranks keep together."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import OptimizerConfig, TrainConfig
from engine.collectives import connect
from engine.stages.agreement import Agreement, Point
from engine.stages.parameter_sharded import ParameterSharded
from engine.stages.units import Unit
from engine.trainer import Trainer, initialize
from engine.transports.base import Pending
from tests.engine.replicas import SMALL_BUCKETS, Batch, Case, Training, assert_trains_as_replicas, plain
from tests.engine.test_offload_order import Timeline, timeline  # noqa: F401 - a fixture
from tests.engine.training import (
    FEATURES,
    Awkward,
    Block,
    RanksOf,
    Setup,
    Tower,
    built,
    loss_of,
    micro_batches,
    over_shared_memory,
    over_sockets,
    run_step,
    samples,
    start,
)

BLOCKS = 4


def gathering_stage(trainer: Trainer) -> ParameterSharded:
    assert isinstance(trainer._stage, ParameterSharded)
    return trainer._stage


class Twice(nn.Module):
    """Goes through all of its blocks and then through them again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.leave = nn.ModuleList(Block(FEATURES) for _ in range(BLOCKS)), nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.leave(x)


def _counts(build: Callable[[], nn.Module], steps: int) -> list[dict[str, int]]:
    """Collectives of each step; every unit is one bucket."""
    trainer = start(Setup(build, TrainConfig(zero_stage=3, prefetch_bucket_size=150)))
    counts, before = [], trainer.collective_counts
    for step in range(steps):
        run_step(trainer, step)
        after = trainer.collective_counts
        counts.append({kind: after[kind] - before.get(kind, 0) for kind in after})
        before = after
    trainer.close()
    return counts


@over_sockets
def test_what_all_ranks_do_alike_is_soon_done_without_asking(ranks: RanksOf) -> None:
    first, *later = ranks(2).run(_counts, Twice, 3)[0]
    once = ranks(2).run(_counts, Tower, 2)[0][1]
    assert first["small"] > once["small"]
    for counts in later:
        # Forward and backward: the root, and each block twice. One less: backward keeps the one used before the last.
        assert counts["all_gather"] == 2 * (1 + 2 * BLOCKS) - 1
    assert later[-1]["small"] == once["small"] == 4  # before forward, backward and step, and what of all was used


class Gated(nn.Module):
    """Uses the blocks asked for; notes how much is gathered in each, and when its gradient comes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.leave = nn.ModuleList(Block(FEATURES) for _ in range(8)), nn.Linear(FEATURES, 1)
        self.note: Callable[[Any], None] = lambda _: None

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for number in order:
            x = self.blocks[number](x)
            self.note(x)
            x.register_hook(self.note)
        return self.leave(x)


def _peaks(orders: list[tuple[int, ...]]) -> tuple[int, int]:
    """The most bytes gathered at once, and what a block has."""
    trainer = start(Setup(Gated, TrainConfig(zero_stage=3, prefetch_bucket_size=200), OptimizerConfig(lr=0.01)))
    stage, peak = gathering_stage(trainer), 0

    def note(_: Any) -> None:
        nonlocal peak
        peak = max(peak, stage.gathered_bytes())

    trainer.module.note = note
    block = stage._units[1].size * 4
    for step in range(3):
        (inputs, target), = micro_batches(step, accumulation=1)
        trainer.backward(loss_of(trainer(inputs, orders[(step + trainer.rank) % len(orders)]), target))
        assert stage.gathered_bytes() == 0
        trainer.step()
    trainer.close()
    return peak, block


@over_sockets
@pytest.mark.parametrize("orders", [[tuple(range(8))], [tuple(range(8)), (7,)], [(7, 0, 3), (3, 0, 0, 5)]],
                         ids=["all", "skips on a rank", "any order"])
def test_no_more_is_gathered_than_what_is_used_and_comes_next(ranks: RanksOf, orders: list[tuple[int, ...]]) -> None:
    for peak, block in ranks(2).run(_peaks, orders):
        assert block <= peak <= 4 * block  # the root, less than one; one used, one before it in backward, one ahead


def _on_one_rank(training: Training, batch: Batch) -> None:
    """Evaluates, and looks at a weight, on one rank alone."""
    if batch.rank == 0:
        with torch.no_grad():
            training.module(batch.inputs)
        assert training.module.blocks[1].up.weight.norm() > 0
    plain(training, batch)


def _out_of_step(training: Training, batch: Batch) -> None:
    """A forward more on one rank, of which the gradients count."""
    outputs = [training.module(batch.inputs) for _ in range(1 + batch.rank)]
    training.backward(loss_of(torch.stack(outputs).mean(0), batch.target))


@over_sockets
@pytest.mark.parametrize("loop", [_on_one_rank, _out_of_step])
def test_ranks_wait_for_one_that_does_more(ranks: RanksOf, loop: Callable[[Training, Batch], None]) -> None:
    assert_trains_as_replicas(ranks, Case(Tower, loop), stage=3, world_size=2)


def _do_different_things() -> str:
    trainer = start(Setup(Tower, TrainConfig(zero_stage=3)))
    (inputs, target), = micro_batches(0, accumulation=1)
    loss = loss_of(trainer(inputs), target)
    trainer.backward(loss, retain_graph=True)
    go_on = trainer.step if trainer.rank == 0 else partial(trainer.backward, loss)
    with pytest.raises(RuntimeError) as error:
        go_on()
    trainer.close()
    return str(error.value)


@over_sockets
def test_ranks_that_do_different_things_are_told_so(ranks: RanksOf) -> None:
    for message in ranks(3).run(_do_different_things):
        assert "of 3 ranks, 2 in backward and 1 in step" in message


def _look_without_values() -> tuple[bool, list[bool]]:
    trainer = start(Setup(Tower, TrainConfig(zero_stage=3)))
    weight = trainer.module.get_parameter("blocks.2.up.weight")
    before = trainer.collective_counts
    assert (weight.shape, weight.dtype, weight.numel()) == ((19, 16), torch.float32, 19 * 16)
    assert weight.grad is None
    assert weight.requires_grad
    assert sum(len(p) for p in trainer.module.parameters() if p.dim()) > 0
    quiet = trainer.collective_counts == before
    weights = trainer.consolidated_state_dict()
    same = [torch.equal(value, weights[name]) for name, value in trainer.module.named_parameters()]
    average = deepcopy(weight)
    with torch.no_grad():
        average.lerp_(weight, 0.5).mul_(2)
    same.append(torch.equal(average, 2 * weights["blocks.2.up.weight"]))
    trainer.close()
    return quiet, same


@over_sockets
def test_only_values_are_gathered_for(ranks: RanksOf) -> None:
    for quiet, same in ranks(2).run(_look_without_values):
        assert quiet
        assert same
        assert all(same)


@pytest.mark.parametrize("change", [Tensor.zero_, nn.init.ones_, lambda p: setattr(p, "data", p + 1),
                                    lambda p: p.__setitem__(0, 1.0)])
def test_a_parameter_is_not_changed_in_vain(change: Callable[[Tensor], object]) -> None:
    trainer = initialize(built(Tower), config=TrainConfig(zero_stage=3))
    with torch.no_grad(), pytest.raises(RuntimeError, match="before initialize"):
        change(trainer.module.get_parameter("leave.weight"))
    trainer.close()


def _change_and_step(path: str) -> tuple[str, bool]:
    trainer = start(Setup(Tower, TrainConfig(zero_stage=3)))
    run_step(trainer, 0)
    trainer.save_checkpoint(path)
    with torch.no_grad():
        trainer.module.get_parameter("leave.weight").mul_(2)
    with pytest.raises(RuntimeError) as failure:
        run_step(trainer, 1)
    trainer.load_checkpoint(path)
    run_step(trainer, 1)
    ours = trainer.consolidated_state_dict()
    trainer.load_checkpoint(path)
    run_step(trainer, 1)
    same = all(torch.equal(ours[name], value) for name, value in trainer.consolidated_state_dict().items())
    trainer.close()
    return str(failure.value), same


@over_shared_memory
def test_a_parameter_in_common_memory_is_not_changed_by_every_rank(ranks: RanksOf, tmp_path: Path) -> None:
    for message, same in ranks(2).run(_change_and_step, str(tmp_path / "checkpoint")):
        assert message.startswith("leave.weight: changed in place at zero_stage 3")
        assert same, "a checkpoint puts it right"


def _vote_apart() -> tuple[list[int], list[int], list[bool], bool]:
    ranks = connect(torch.device("cpu"))
    ranks.has_host_transport = False  # stands for NCCL
    agreement = Agreement(ranks, units=3, flags=2)
    points = agreement.vote(Point.STEP, flags=[False, ranks.rank == 1]).points
    votes = agreement.vote(Point.END) if ranks.rank else agreement.vote(2, is_unit=True)
    raised = agreement.vote(Point.STEP, flags=[False, ranks.rank == 1]).flags
    same = agreement.is_same(ranks.rank)
    agreement.close()
    return points, votes.asked, raised, same


@over_sockets
def test_ranks_without_host_transport_vote_through_one_of_their_own(ranks: RanksOf) -> None:
    for _ in range(2):  # a second trainer makes its own again
        assert ranks(2).run(_vote_apart) == [([0, 0, 2, 0], [2], [False, True], False)] * 2


@pytest.mark.parametrize("optimizer_ratio", [0.0, 1.0])
def test_parameters_come_from_the_host_beside_the_computation(
        timeline: Timeline, optimizer_ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    config = SMALL_BUCKETS.model_copy(update={"zero_stage": 3, "offload_param": True,
                                              "offload_optimizer_ratio": optimizer_ratio})
    trainer = initialize(built(Awkward), config=config, optimizer=OptimizerConfig(lr=0.01))
    gathering = gathering_stage(trainer)._gathering
    gathering._uploads = uploads = timeline.new_stream()  # type: ignore[assignment]
    fill = gathering._fill

    def fill_on_device(unit: Unit, fulls: dict[int, Tensor]) -> list[Pending]:
        timeline.unplaced.difference_update(full.untyped_storage().data_ptr() for full in fulls.values())
        return fill(unit, fulls)

    monkeypatch.setattr(gathering, "_fill", fill_on_device)
    for number in range(2):
        inputs, target = samples(number)
        known = timeline.host.seen[uploads.name]
        with timeline:
            trainer.backward(loss_of(trainer(inputs), target))
            assert timeline.host.seen[uploads.name] == known  # nothing made the host wait
            trainer.step()
    assert uploads.seen[uploads.name] >= 2 * 2 * len(trainer._stage.buckets)
    assert timeline.races == []
    trainer.close()
