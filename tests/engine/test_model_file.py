"""The trained model as a file: what is in it, who can read it, and that it appears whole or not at all."""

import json
import os
import struct
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import engine
from engine import ConfigurationError, TrainConfig
from tests.engine.training import FEATURES, Awkward, RanksOf, Setup, Weights, perceptron, run_step, stages, start, wide


def _save(setup: Setup, path: Path, arguments: dict[str, Any] | None = None) -> Weights:
    trainer = start(setup)
    run_step(trainer, 0)
    weights = trainer.consolidated_state_dict()
    trainer.save_model(path, **(arguments or {}))
    if trainer.config.zero_stage == 3:
        with pytest.raises(RuntimeError, match="consolidated_state_dict"):
            trainer.module.state_dict()
    trainer.close()
    return weights


@stages
@pytest.mark.parametrize("world_size", [1, 3])
def test_both_loaders_read_the_masters_into_the_plain_model(ranks: RanksOf, tmp_path: Path, stage: int,
                                                            world_size: int) -> None:
    config = TrainConfig(zero_stage=stage, precision="bf16", reduce_dtype="fp32", reduce_bucket_size=90)
    weights = ranks(world_size).run(_save, Setup(Awkward, config), tmp_path / "new" / "model.safetensors")[0]
    ours, theirs = Awkward(), Awkward()
    engine.load_model(ours, tmp_path / "new" / "model.safetensors")
    assert safetensors.torch.load_model(theirs, tmp_path / "new" / "model.safetensors", strict=True) == (set(), [])
    for model in (ours, theirs):
        loaded = model.state_dict()
        for name, value in weights.items():
            assert torch.equal(loaded[name], value.to(loaded[name].dtype)), name
        assert model.again.weight is model.mix.weight
    assert os.listdir(tmp_path / "new") == ["model.safetensors"]


def _contents(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not iterable


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16),
                                                  ("fp16", torch.float16)])
def test_parameters_have_the_chosen_dtype_and_tied_ones_one_copy(ranks: RanksOf, tmp_path: Path, precision: str,
                                                                 dtype: torch.dtype) -> None:
    weights = ranks(2).run(_save, Setup(Awkward), tmp_path / "m", {"precision": precision})[0]
    metadata, values = _contents(tmp_path / "m")
    assert metadata == {"format": "pt", "again.weight": "mix.weight"}
    assert {*values, "again.weight"} == set(weights)
    parameters = {name for name, _ in Awkward().named_parameters()}
    for name, value in values.items():
        assert value.dtype == (dtype if name in parameters else weights[name].dtype)
        assert value.shape == weights[name].shape
        assert torch.equal(value, weights[name].to(value.dtype))


def test_the_file_is_as_large_as_its_parameters(ranks: RanksOf, tmp_path: Path) -> None:
    ranks(2).run(_save, Setup(wide, TrainConfig(zero_stage=3)), tmp_path / "m")
    parameters = sum(parameter.nbytes for parameter in wide().parameters())
    assert parameters < (tmp_path / "m").stat().st_size < 1.05 * parameters


class _ManyDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.layer = nn.Linear(FEATURES, 3)
        self.table = nn.Parameter(torch.arange(5, dtype=torch.int64), requires_grad=False)
        self.phase = nn.Parameter(torch.tensor([1 + 2j]), requires_grad=False)
        self.register_buffer("codes", torch.tensor([[1, 2, 3]], dtype=torch.uint8))
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("passing", torch.zeros(7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum(dim=1, keepdim=True)


def test_what_is_no_float_keeps_its_dtype_and_everything_is_aligned(ranks: RanksOf, tmp_path: Path) -> None:
    ranks(2).run(_save, Setup(_ManyDtypes, TrainConfig(zero_stage=1)), tmp_path / "m", {"precision": "fp16"})
    _, values = _contents(tmp_path / "m")
    plain = _ManyDtypes()
    for name in ("flags", "table", "phase", "codes"):
        assert torch.equal(values[name], getattr(plain, name))
        assert values[name].dtype == getattr(plain, name).dtype
    assert "passing" not in values
    content = (tmp_path / "m").read_bytes()
    length, = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + length])
    assert length % 8 == 0
    for name, value in values.items():
        assert header[name]["data_offsets"][0] % value.itemsize == 0


def _save_refused(path: Path) -> str:
    trainer = start(Setup(perceptron, TrainConfig(zero_stage=3)))
    with pytest.raises(ConfigurationError) as caught:
        trainer.save_model(path)
    assert caught.value.fields == ("path",)
    run_step(trainer, 0)  # ranks still agree on what comes next
    trainer.close()
    return str(caught.value)


def test_a_file_that_cannot_be_written_is_told_on_every_rank(ranks: RanksOf, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    told = ranks(2).run(_save_refused, tmp_path)
    assert told[0] == told[1]
    assert str(tmp_path / "model.safetensors") in told[0]
    told = ranks(2).run(_save_refused, tmp_path / "file" / "model")
    assert told[0] == told[1]
    assert "file" in told[0]
    assert os.listdir(tmp_path) == ["file"]


def _save_on_a_full_disk(path: Path) -> str:
    """As far as a limit on the size of files goes."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = start(Setup(wide, TrainConfig(zero_stage=2, reduce_bucket_size=5000)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(ConfigurationError, match="File too large") as caught:
            trainer.save_model(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    trainer.save_model(path.with_name("other"))
    trainer.close()
    return str(caught.value)


def test_a_write_that_fails_leaves_the_earlier_file(ranks: RanksOf, tmp_path: Path) -> None:
    (tmp_path / "m").write_text("earlier")
    told = ranks(2).run(_save_on_a_full_disk, tmp_path / "m")
    assert told[0] == told[1]
    assert (tmp_path / "m").read_text() == "earlier"
    assert sorted(os.listdir(tmp_path)) == ["m", "other"]


def _other() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 13), nn.Tanh(), nn.Linear(13, 6), nn.Tanh(), nn.Linear(6, 1))


@pytest.mark.parametrize(("damage", "build", "message"), [
    (os.remove, perceptron, "no model that can be read"),
    (lambda file: os.truncate(file, file.stat().st_size - 4), perceptron, "no model that can be read"),
    (lambda file: file.write_text("{}"), perceptron, "no model that can be read"),
    (lambda file: None, _other, "2.bias is (5,) there and (6,) here"),
    (lambda file: None, Awkward, "0.bias is (13,) there and not here"),
])
def test_files_that_do_not_fit_are_refused(ranks: RanksOf, tmp_path: Path, damage: Callable[[Path], None],
                                           build: Callable[[], nn.Module], message: str) -> None:
    ranks(1).run(_save, Setup(perceptron), tmp_path / "m")
    damage(tmp_path / "m")
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigurationError) as caught:
        engine.load_model(model, tmp_path / "m")
    assert caught.value.fields == ("path",)
    assert message in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _towers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2**20, 1, bias=False) for _ in range(16)))


def _bytes_to_save(path: Path) -> int:
    trainer = engine.initialize(_towers(), config=TrainConfig(zero_stage=3, reduce_bucket_size=2**20))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as allocations:
        trainer.save_model(path)
    trainer.close()
    changes = [event.nbytes() for event in allocations.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert any(changes)
    return max(accumulate(changes))


def test_no_rank_holds_the_whole_model_to_save_it(ranks: RanksOf, tmp_path: Path) -> None:
    for size in ranks(2).run(_bytes_to_save, tmp_path / "m"):
        assert size <= 2 * (4 * 2**20)  # two of 16 such buckets
