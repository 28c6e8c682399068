"""What `initialize` refuses, and what it makes equal."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from engine import ConfigurationError, OptimizerConfig, TrainConfig
from engine.trainer import initialize
from tests.engine.training import (
    FEATURES,
    RanksOf,
    Setup,
    Tower,
    Weights,
    built,
    loss_of,
    perceptron,
    run_step,
    samples,
    start,
)
from tests.support.ranks import RankError, RankPool


def _frozen() -> nn.Module:
    return perceptron().requires_grad_(False)


def _complex() -> nn.Module:
    model = nn.Linear(2, 2)
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return model


def _sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 2, sparse=True))


def _renormalized() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(4, 2, max_norm=1.0), nn.Linear(2, 2))


def _renormalized_frozen() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 2, max_norm=1.0).requires_grad_(False), nn.Linear(2, 2))


def _lazy_parameter() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))


def _lazy_buffer() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))


def _on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def _aliased() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


@pytest.mark.parametrize(("build", "message"), [
    (_frozen, "leave at least one trainable"), (_complex, "phase is torch.complex64"), (_sparse, "sparse=False"),
    (_aliased, r"0\.weight and 1\.weight share memory"), (_renormalized, "0 has max_norm.*max_norm=None"),
    (_renormalized_frozen, "0 has max_norm.*max_norm=None"), (_lazy_parameter, r"1\.weight has no shape yet; run"),
    (_lazy_buffer, r"1\.running_mean has no shape yet; run"), (_on_meta, r"1\.weight is on the meta device.*to_empty"),
])
def test_models_that_cannot_be_laid_out_are_refused(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        initialize(build(), config=TrainConfig())
    assert caught.value.fields == ("model",)


def test_a_precision_that_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError('"addmm_impl_cpu_" not implemented for \'Half\'')

    monkeypatch.setattr(nn.functional, "linear", fail)
    with pytest.raises(ConfigurationError, match="fp16 does not run on cpu") as caught:
        initialize(perceptron(), config=TrainConfig(precision="fp16"))
    assert caught.value.fields == ("precision",)


def _different_models() -> str:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 1 + dist.get_rank())
    with pytest.raises(ConfigurationError) as caught:
        initialize(model, config=TrainConfig())
    return str(caught.value)


def _different_configurations() -> str:
    with pytest.raises(ConfigurationError) as caught:
        initialize(perceptron(), config=TrainConfig(reduce_bucket_size=1 + dist.get_rank()))
    return str(caught.value)


def test_ranks_that_disagree_are_told_instead_of_hanging(ranks: RanksOf) -> None:
    assert all("rank 1 has other parameters" in text for text in ranks(2).run(_different_models))
    assert all("rank 1 has another configuration" in text for text in ranks(2).run(_different_configurations))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.register_buffer("offset", torch.full((1,), float(dist.get_rank())))
        self.table = nn.Parameter(torch.full((3,), dist.get_rank()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.offset


def _start_apart(stage: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    trainer = initialize(Buffered(), config=TrainConfig(zero_stage=stage))
    weights = trainer.consolidated_state_dict()
    trainer.close()
    return weights


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_starts_from_the_first_ones_values(ranks: RanksOf, stage: int) -> None:
    first, second = ranks(2).run(_start_apart, stage)
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(0)
    assert torch.equal(first["layer.weight"], nn.Linear(FEATURES, 1).weight)
    assert first["offset"].item() == 0
    assert first["table"].tolist() == [0, 0, 0]
    assert first["table"].dtype == torch.int64


class OddBuffers(nn.Module):
    """Buffers whose memory is not what their shape says, and a dtype that gloo does not know."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("expanded", torch.arange(first, first + 4).expand(100, 4))
        self.register_buffer("transposed", torch.arange(first, first + 6).view(2, 3).t())
        self.register_buffer("short", torch.tensor(first, dtype=torch.int16))


def _start_with_odd_buffers() -> dict[str, list[int]]:
    trainer = initialize(OddBuffers(10 * dist.get_rank()), config=TrainConfig())
    values = {name: buffer.flatten().tolist() for name, buffer in trainer.module.named_buffers()}
    trainer.close()
    return values


def test_buffers_of_any_layout_and_dtype_are_the_first_ranks(ranks: RanksOf) -> None:
    expected = {name: buffer.flatten().tolist() for name, buffer in OddBuffers(0).named_buffers()}
    assert ranks(2).run(_start_with_odd_buffers) == [expected] * 2


def test_close_gives_modules_back_the_forward_they_had(ranks: RanksOf) -> None:
    assert ranks(1).run(_forwards_after_close) == [(True, True, False)]


def _forwards_after_close() -> tuple[bool, bool, bool]:
    model = built(Tower)
    head = model.leave
    model.blocks[0].forward = instance = model.blocks[0].forward  # in the instance from now on
    head.forward = kept = head.forward
    config = TrainConfig(zero_stage=3, activation_checkpointing="full")
    trainer = initialize(model, config=config)
    run_step(trainer, 0)
    trainer.close()
    return (model.blocks[0].forward is instance, model.leave.forward is kept,
            any("forward" in module.__dict__ for module in model.modules() if module not in (model.blocks[0], head)))


def _first_step_after_gradients_of_before(precision: str) -> tuple[Weights, Weights]:
    results = []
    for before in (False, True):
        model = built(Tower)
        if before:
            loss_of(model(samples(9)[0]), samples(9)[1]).backward()
        config = TrainConfig.model_validate({"precision": precision})
        trainer = initialize(model, config=config, optimizer=OptimizerConfig(name="sgd", lr=0.1))
        run_step(trainer, 0)
        results.append(trainer.consolidated_state_dict())
        trainer.close()
    return results[0], results[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_from_before_do_not_count(ranks: RanksOf, precision: str) -> None:
    (without, after), = ranks(1).run(_first_step_after_gradients_of_before, precision)
    assert all(torch.equal(without[name], after[name]) for name in without)


def _from_environment(store: str) -> tuple[int, int]:
    """The process group made from torchrun's variables, and ended with the last trainer."""
    import os

    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=store)
    try:
        trainer = start(Setup(perceptron, TrainConfig(zero_stage=2)))
        run_step(trainer, 0)
        found = trainer.rank, trainer.data_parallel_size
        other = start(Setup(perceptron))
        trainer.close()
        run_step(other, 0)
        assert other.consolidated_state_dict().keys() == perceptron().state_dict().keys()
        other.close()
        assert not dist.is_initialized()
    finally:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    return found


def test_torchruns_variables_make_the_process_group(free_port: int) -> None:
    pool = RankPool()
    try:
        assert pool.run(2, _from_environment, str(free_port)) == [(0, 2), (1, 2)]
    finally:
        pool.close()


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("boom")
    dist.all_reduce(torch.zeros(1))
    return 0


def _size() -> int:
    return dist.get_world_size()


def _exit() -> None:
    import os

    os._exit(3)


def test_pool_reports_the_failing_rank_and_works_on(ranks: RanksOf) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2:\n(.|\n)*boom"):
        ranks(2).run(_fail_on, 1)
    assert ranks(2).run(_size) == [2, 2]
    with pytest.raises(RankError, match="died"):
        ranks(1).run(_exit)
    assert ranks(3).run(_size) == [3, 3, 3]
    assert ranks(1).run(_size) == [1]
