"""What is refused in words, and what a rank or a host does not have."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

import engine.tasks
from engine import TrainConfig, process, shared_memory
from engine.collectives import Ranks
from engine.errors import ConfigurationError, TaskError
from engine.precision import cast_floating
from engine.probe import probe
from engine.report import MeasurePolicy, Outcome
from engine.run import main
from engine.run_file import RunFile
from engine.shared_memory import SharedMemory
from engine.spec import ModelSpec
from engine.tasks.base import checked_batch, checked_loss, move_batch
from engine.trainer import initialize
from tests.engine.training import RanksOf, over_shared_memory
from tests.support.tasks import ToyTask
from tests.support.trials import TINY_GPT

CPU = torch.device("cpu")


@pytest.mark.parametrize(("wrong", "message"), [
    ({"kind": "gpt", "layers": 1, "hidden": 10, "heads": 3, "vocab": 8, "sequence_length": 4},
     "hidden 10 is not divisible by heads 3"),
    ({"kind": "vit", "layers": 1, "hidden": 10, "heads": 4, "image_size": 8, "patch_size": 4, "classes": 2},
     "hidden 10 is not divisible by heads 4"),
    ({"kind": "vit", "layers": 1, "hidden": 8, "heads": 4, "image_size": 9, "patch_size": 4, "classes": 2},
     "image_size 9 is not divisible by patch_size 4"),
    ({"kind": "huggingface", "config": {}, "sequence_length": 4}, "config needs model_type"),
])
def test_a_model_that_cannot_be_built_is_refused(wrong: dict[str, Any], message: str) -> None:
    adapter: TypeAdapter[ModelSpec] = TypeAdapter(ModelSpec)
    with pytest.raises(ValidationError, match=message):
        adapter.validate_python(wrong)


@pytest.mark.parametrize("field", ["max_steps", "target_relative_interval"])
def test_true_is_no_number(field: str) -> None:
    with pytest.raises(ValidationError, match="give a number, not true/false"):
        MeasurePolicy.model_validate({field: True})


class _Odd(ToyTask):
    def __init__(self, batch: Any = None) -> None:
        super().__init__()
        self._given = batch

    def batch(self, indices: Sequence[int]) -> Any:
        return self._given

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        return super().loss(model, batch).detach()


@pytest.mark.parametrize("batch", [[], (), {}, {"x": 1}, (torch.ones(1), "y"), "text", None])
def test_a_batch_that_is_no_tuple_or_dict_of_tensors_is_refused(batch: Any) -> None:
    with pytest.raises(TaskError, match=r"_Odd\.batch must return a tuple or dict of tensors"):
        checked_batch(_Odd(batch), [0])


def test_a_batch_may_be_a_list_or_a_mapping() -> None:
    first, second = torch.ones(1), torch.zeros(1)
    assert checked_batch(_Odd([first, second]), [0]) == (first, second)
    named = checked_batch(_Odd({"x": first}), [0])
    assert move_batch(named, CPU) == {"x": first}


def test_a_loss_that_nothing_can_be_learned_from_is_refused() -> None:
    task = _Odd()
    with pytest.raises(TaskError, match="does not depend on any trainable parameter"):
        checked_loss(task, task.build_model(), ToyTask().batch([0]))


def test_a_namedtuple_is_cast_to_one() -> None:
    class Pair(NamedTuple):
        values: Tensor
        count: int

    cast = cast_floating(Pair(torch.ones(2), 3), torch.bfloat16)
    assert isinstance(cast, Pair)
    assert (cast.values.dtype, cast.count) == (torch.bfloat16, 3)


def test_an_unknown_name_and_an_unmeasured_choice_are_told() -> None:
    with pytest.raises(AttributeError, match=r"'engine\.tasks' has no attribute 'nothing'"):
        engine.tasks.nothing  # noqa: B018
    profile = probe(TINY_GPT, precisions=("fp32",))
    assert profile.activation("none", "fp32").precision == "fp32"
    with pytest.raises(KeyError, match="no activation profile for checkpointing none, precision bf16"):
        profile.activation("none", "bf16")
    assert [outcome for outcome in Outcome if outcome.is_out_of_memory] == [Outcome.OOM_DEVICE, Outcome.OOM_HOST]


# --- what the operating system has not ------------------------------------------------------------------------------


@pytest.fixture
def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    return ended.pid


def test_a_process_that_is_gone_has_no_memory_and_is_not_alive(gone: int) -> None:
    with pytest.raises(ProcessLookupError, match=f"no process {gone}"):
        process.resident_memory(gone)
    members = [(os.getpid(), 0), (gone, 0)]
    memory = SharedMemory(lambda value: members, rank=0)
    assert [memory.is_alive(rank) for rank in (0, 1)] == [True, False]


def test_a_host_without_proc_is_measured_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, *arguments: Any, **keywords: Any) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert process.cpu_name() == os.uname().machine
    assert process.available_memory_bytes() is None
    assert process.cpu_times(0).core_busy is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert set(process.resident_memory()) == {0}
    process.die_with_parent(parent_pid=-1)  # who has no such parent would end here


def test_files_of_proc_without_the_wanted_line_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, *arguments, **keywords: "other: 1\n")
    assert process.cpu_name() == os.uname().machine
    assert process.available_memory_bytes() is None
    assert process.cpu_times(0).core_busy is None


def test_memory_that_the_host_does_not_give_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    memory = SharedMemory(lambda value: [value if isinstance(value, (str, int, type(None))) else (os.getpid(), 0)],
                          rank=0)
    monkeypatch.setattr(shared_memory.os, "ftruncate", refuse)
    with pytest.raises(RuntimeError, match=r"cannot map 4096 bytes that ranks share: rank 0: .*No space left"):
        memory.mirrored(4096)


def _sum_of_odd() -> None:
    Ranks(dist.group.WORLD, device=CPU).all_reduce(torch.ones(3), dtype=torch.float32)


@over_shared_memory
def test_what_cannot_be_divided_among_the_ranks_is_not_summed(ranks: RanksOf) -> None:
    try:
        with pytest.raises(AssertionError, match="3 elements cannot be divided among 2 ranks"):
            ranks(2).run(_sum_of_odd)
    finally:
        ranks(2).restart()


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_dtype_that_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("angles", torch.ones(2, dtype=torch.complex128))
    trainer = initialize(model, config=TrainConfig())
    with pytest.raises(ConfigurationError, match=r"safetensors files hold no torch\.complex128"):
        trainer.save_model(tmp_path / "model.safetensors")
    trainer.close()


def test_a_run_saves_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    run_file = RunFile.model_validate({
        "model": TINY_GPT.model_dump(), "optimizer": {"name": "adamw"}, "config": {"micro_batch_size": 2},
        "global_batch_size": 2, "world_size": 1, "seed": 7})
    path = tmp_path / "run.json"
    path.write_text(run_file.model_dump_json())
    assert main([str(path), "--steps", "2", "--device", "cpu", "--checkpoint", str(tmp_path / "saved")]) == 0
    trainer = initialize(engine.tasks.build_task(run_file.model, seed=0).build_model(), config=run_file.config)
    trainer.load_checkpoint(tmp_path / "saved")
    assert trainer.steps == 2
    trainer.close()
