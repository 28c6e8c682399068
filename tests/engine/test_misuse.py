"""What users do that no loop in a textbook does: it works, or they are told."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine import ConfigurationError, OptimizerConfig, TrainConfig, load_model
from engine.collectives import Ranks as EngineRanks
from engine.collectives import _leave_gloo
from engine.trainer import Trainer, initialize
from tests.engine.training import (
    RanksOf,
    Setup,
    Tower,
    built,
    loss_of,
    micro_batches,
    over_shared_memory,
    run_step,
    stages,
    start,
)

SGD = OptimizerConfig(name="sgd", lr=0.1)


def _clamp(trainer: Trainer) -> None:
    with torch.no_grad():
        for parameter in trainer.module.parameters():
            parameter.clamp_(-0.01, 0.01)


def _give_other_memory(trainer: Trainer) -> None:
    for parameter in trainer.module.parameters():
        parameter.data = torch.full_like(parameter, 0.01)


def _largest_after_a_change(config: TrainConfig, change: Callable[[Trainer], None]) -> tuple[float, float, float]:
    """The largest weight (saved at once, in the module after a step, in the saved one then)."""
    trainer = start(Setup(Tower, config, SGD.model_copy(update={"lr": 1e-4})))
    run_step(trainer, 0)
    change(trainer)
    at_once = max(float(value.abs().max()) for value in trainer.consolidated_state_dict().values())
    run_step(trainer, 1)
    module = max(float(parameter.detach().abs().max()) for parameter in trainer.module.parameters())
    saved = max(float(value.abs().max()) for value in trainer.consolidated_state_dict().values())
    trainer.close()
    return at_once, module, saved


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("change", [_clamp, _give_other_memory])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"precision": "bf16", "offload_optimizer_ratio": 0.5}])
def test_what_is_changed_in_place_is_taken_over(ranks: RanksOf, stage: int, change: Callable[[Trainer], None],
                                                options: dict[str, Any]) -> None:
    config = TrainConfig.model_validate({"zero_stage": stage, "reduce_bucket_size": 100, **options})
    for values in ranks(2).run(_largest_after_a_change, config, change):
        assert all(value == pytest.approx(0.01, abs=2e-3) for value in values)


@torch.no_grad()
def _swap_and_back(module: nn.Module) -> None:
    for parameter in module.parameters():
        backup = parameter.clone()
        parameter.mul_(0.5)
        parameter.copy_(backup)


def _weights_around_a_swap() -> bool:
    """Averages of weights swapped in and out between steps change nothing, in no bit of the masters."""
    config = TrainConfig(precision="bf16", zero_stage=1)
    results = []
    for swaps in (True, False):
        trainer = start(Setup(Tower, config))
        for step in range(3):
            run_step(trainer, step)
            if swaps:
                _swap_and_back(trainer.module)
        results.append(trainer.consolidated_state_dict())
        trainer.close()
    return all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_a_swap_and_back_loses_no_bit(ranks: RanksOf) -> None:
    assert ranks(2).run(_weights_around_a_swap) == [True, True]


class _Stop(KeyboardInterrupt):
    pass


def _after_an_interrupt(stage: int) -> bool:
    config = TrainConfig(zero_stage=stage, reduce_bucket_size=50)
    results = []
    for interrupted in (True, False):
        trainer = start(Setup(Tower, config, SGD))
        if interrupted:
            ((inputs, target),) = micro_batches(0, accumulation=1)
            output = trainer(inputs)
            output.register_hook(_interrupt)
            with pytest.raises(_Stop):
                trainer.backward(loss_of(output, target))
        run_step(trainer, 1)
        results.append(trainer.consolidated_state_dict())
        trainer.close()
    return all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def _interrupt(_: Tensor) -> None:
    raise _Stop


@stages
def test_gradients_of_an_interrupted_backward_do_not_count(ranks: RanksOf, stage: int) -> None:
    assert ranks(2).run(_after_an_interrupt, stage) == [True, True]


class Normalised(torch.optim.Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [(group["lr"], p, p.grad) for group in self.param_groups for p in group["params"]
                     if p.grad is not None]
        norm = torch.stack([gradient.norm() for _, _, gradient in gradients]).norm()
        with torch.no_grad():
            for rate, parameter, gradient in gradients:
                parameter.sub_(rate * gradient / norm)


def test_an_optimizer_with_a_number_over_all_parameters_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="by itself"):
        initialize(built(Tower), config=TrainConfig(zero_stage=1), optimizer=Normalised)


def test_a_model_in_training_a_closed_trainer_and_new_groups_are_refused() -> None:
    trainer = initialize(built(Tower), config=TrainConfig())
    with pytest.raises(ConfigurationError, match="in training by another trainer"):
        initialize(trainer.module, config=TrainConfig())
    with pytest.raises(RuntimeError, match="groups are made by the factory"):
        trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    trainer.close()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.step()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.backward(torch.zeros((), requires_grad=True))
    initialize(trainer.module, config=TrainConfig()).close()


def test_a_model_is_saved_to_no_device_or_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    trainer = initialize(built(Tower), config=TrainConfig())
    with pytest.raises(ConfigurationError, match="no regular file"):
        trainer.save_model(pipe)
    assert pipe.is_fifo()
    trainer.close()


def _do_different_things() -> str:
    ranks = EngineRanks(dist.group.WORLD, device=torch.device("cpu"))
    ranks.reserve([4096, 4096])
    with pytest.raises(RuntimeError) as failure:
        ranks.sum_small(torch.zeros(3 + ranks.rank))
    ranks.close()
    return str(failure.value)


@over_shared_memory
def test_ranks_in_different_collectives_are_told(ranks: RanksOf) -> None:
    first, second = ranks(2).run(_do_different_things)
    assert first.startswith("rank 1 sent 16 bytes where rank 0 expected 12: the ranks do different things")
    assert second.startswith("rank 0 sent 12 bytes where rank 1 expected 16: the ranks do different things")


def _train_on_after_a_forked_child_has_left() -> bool:
    trainer = start(Setup(Tower, TrainConfig(zero_stage=1)))
    run_step(trainer, 0)
    child = os.fork()
    if child == 0:
        _leave_gloo(os.getppid())  # as the interpreter's end would call it
        os._exit(0)
    os.waitpid(child, 0)
    run_step(trainer, 1)
    trainer.close()
    return True


@over_shared_memory
def test_a_forked_child_does_not_leave_in_its_parents_name(ranks: RanksOf) -> None:
    assert ranks(2).run(_train_on_after_a_forked_child_has_left) == [True, True]


def test_another_default_dtype_is_none_of_the_engines_business() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        trainer = initialize(built(Tower), config=TrainConfig(gradient_accumulation_steps=2))
        for _ in range(2):
            trainer.backward(trainer(torch.ones(2, 8)).float().mean())
            applied = trainer.step().applied
    finally:
        torch.set_default_dtype(torch.float32)
    assert applied
    trainer.close()


def test_what_other_engines_take_is_named() -> None:
    model = built(Tower)
    with pytest.raises(ConfigurationError, match=r"give a factory, lambda every: AdamW\(every"):
        initialize(model, config=TrainConfig(), optimizer=torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"must be an engine\.TrainConfig, not dict"):
        initialize(model, config={"zero_stage": 1})  # type: ignore[arg-type]


class Counting(nn.Module):
    """Keeps a note beside its parameters, and a buffer that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.seen = {"samples": 0}
        shared = torch.ones(1)
        for layer in self.layers:
            layer.register_buffer("scale", shared)

    def forward(self, x: Tensor) -> Tensor:
        self.seen["samples"] += len(x)
        for layer in self.layers:
            x = layer(x) * layer.scale
        return x

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = dict(state)


def test_extra_state_is_in_the_state_dict_and_a_shared_buffer_stays_shared(tmp_path: Path) -> None:
    trainer = initialize(Counting(), config=TrainConfig(precision="bf16"))
    trainer.backward(trainer(torch.ones(3, 8)).float().mean())
    trainer.step()
    trainer.module.layers[0].scale.fill_(2)
    assert float(trainer.module.layers[1].scale) == 2
    plain = Counting()
    plain.load_state_dict(trainer.consolidated_state_dict(), strict=True)
    assert plain.seen == {"samples": 3}
    trainer.save_model(tmp_path / "model.safetensors")
    trainer.close()
    other = Counting()
    load_model(other, tmp_path / "model.safetensors")
    assert other.seen == {"samples": 0}
    assert torch.equal(other.layers[0].weight, plain.layers[0].weight)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(self.enter(x).float()).to(x.dtype))


def _saved_plainly(stage: int, path: str) -> bool:
    trainer = start(Setup(Normed, TrainConfig(zero_stage=stage, precision="bf16")))
    run_step(trainer, 0)
    file = f"{path}.{trainer.rank}"
    torch.save(trainer.module.state_dict(), file)
    loaded = torch.load(file)
    same = all(torch.equal(loaded[name], value) for name, value in trainer.module.state_dict().items())
    trainer.close()
    return same


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_modules_own_state_dict_can_be_saved(ranks: RanksOf, stage: int, tmp_path: Path) -> None:
    assert ranks(2).run(_saved_plainly, stage, str(tmp_path / "weights")) == [True, True]
