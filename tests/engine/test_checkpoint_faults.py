"""Checkpoints when things go wrong: killed saves, damaged files, strange paths, other models; and memory of loading."""

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine import ConfigurationError, OptimizerConfig, TrainConfig, load_model
from engine.flat_shard import PIECE
from engine.process import reset_peak_resident, resident_memory
from engine.trainer import Trainer
from tests.engine.training import (
    FEATURES,
    Awkward,
    RanksOf,
    Setup,
    Weights,
    over_shared_memory,
    perceptron,
    run_step,
    start,
)
from tests.support.ranks import RankError

ZERO2 = Setup(perceptron, TrainConfig(zero_stage=2, reduce_bucket_size=100))


def _save(setup: Setup, path: Path, steps: int) -> Weights:
    trainer = start(setup)
    for step in range(steps):
        run_step(trainer, step)
    trainer.save_checkpoint(path)
    weights = trainer.consolidated_state_dict()
    trainer.close()
    return weights


def _loaded(setup: Setup, path: Path) -> tuple[int, Weights]:
    trainer = start(setup)
    trainer.load_checkpoint(path)
    found = trainer.steps, trainer.consolidated_state_dict()
    trainer.close()
    return found


def _same(ours: Weights, theirs: Weights) -> bool:
    return all(torch.equal(ours[name], value) for name, value in theirs.items())


# Killed


_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


def _die_before_change(number: int, folder: Path) -> list[str]:
    """From now on this process counts its changes to what is in a folder, and is killed just before one of them.

    Returns:
        The changes so far; it grows, until "end" is put there.
    """
    seen: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        creates = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if (event in _CHANGES or creates) and "end" not in seen and _is_in(folder, arguments):
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(event)

    sys.addaudithook(watch)
    return seen


def _is_in(folder: Path, arguments: tuple[Any, ...]) -> bool:
    """Of a changing event of the interpreter; with an open directory as its last argument, the path is relative."""
    path = Path(os.fsdecode(arguments[0]))
    if not path.is_absolute() and isinstance(arguments[-1], int) and arguments[-1] >= 0:
        path = Path(os.readlink(f"/proc/self/fd/{arguments[-1]}")) / path
    return path.is_relative_to(folder)


def _save_and_die(setup: Setup, path: Path, moment: int) -> list[str]:
    """A second save, in which the last rank is killed before a change; the changes that it made otherwise."""
    trainer = start(setup)
    trainer.load_checkpoint(path)
    run_step(trainer, 1)
    changes = _die_before_change(moment, path.parent) if trainer.rank == trainer.data_parallel_size - 1 else []
    began = time.monotonic()
    try:
        trainer.save_checkpoint(path)
    except RuntimeError as error:
        seconds = time.monotonic() - began
        (path.parent / f"error of rank {trainer.rank}").write_text(f"{seconds} {type(error).__name__}: {error}")
        raise
    changes.append("end")
    trainer.close()
    return changes


@over_shared_memory  # one rank sends nothing
def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(ranks: RanksOf, tmp_path: Path) -> None:
    first, second = (ranks(1).run(_save, ZERO2, tmp_path / name, steps)[0] for name, steps in (("a", 1), ("b", 2)))
    found: list[int] = []
    changes: list[str] = []
    while not changes:
        path = tmp_path / f"moment {len(found)}" / "checkpoint"
        shutil.copytree(tmp_path / "a", path)
        try:
            changes = ranks(1).run(_save_and_die, ZERO2, path, len(found))[0]
        except RankError:
            steps, weights = ranks(1).run(_loaded, ZERO2, path)[0]
            assert _same(weights, {1: first, 2: second}[steps])
            found.append(steps)
            ranks(1).run(_save, ZERO2, path, 1)  # the next save cleans up
        assert os.listdir(path.parent) == ["checkpoint"]
    assert len(found) == len(changes) - 1
    assert found == sorted(found)
    renames = [number for number, event in enumerate(changes) if event == "os.rename"]
    assert found.index(2) == renames[-1] + 1  # from the moment that the new directory has the name


def _save_on_a_full_disk(path: Path) -> str:
    """As far as a limit on the size of one rank's files goes."""
    trainer = start(ZERO2)
    trainer.load_checkpoint(path)
    run_step(trainer, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trainer.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ConfigurationError, match="File too large") as caught:
            trainer.save_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run_step(trainer, 2)
    trainer.close()
    return str(caught.value)


def test_a_save_that_cannot_be_written_is_told_on_every_rank(ranks: RanksOf, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    weights = ranks(2).run(_save, ZERO2, path, 1)[0]
    told = ranks(2).run(_save_on_a_full_disk, path)
    assert told[0] == told[1]
    assert "rank 1" in told[0]
    steps, found = ranks(2).run(_loaded, ZERO2, path)[0]
    assert steps == 1
    assert _same(found, weights)
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_ranks_are_told_when_another_is_killed_while_saving(ranks: RanksOf, tmp_path: Path) -> None:
    path = tmp_path / "saved" / "checkpoint"
    weights = ranks(2).run(_save, ZERO2, path, 1)[0]
    with pytest.raises(RankError):
        ranks(2).run(_save_and_die, ZERO2, path, 0)  # before it opens its file
    seconds = float((path.parent / "error of rank 0").read_text().split()[0])
    assert seconds < 2
    steps, found = ranks(2).run(_loaded, ZERO2, path)[0]
    assert steps == 1
    assert _same(found, weights)


# Damaged, in the way, of something else


def _refused(action: Callable[[Trainer], None], setup: Setup) -> str:
    """What a trainer raises, and that it goes on to train as if it had not been asked."""
    trainer, untouched = start(setup), start(setup)
    with pytest.raises(ConfigurationError) as caught:
        action(trainer)
    assert caught.value.fields == ("path",)
    run_step(trainer, 0)
    run_step(untouched, 0)
    assert _same(trainer.consolidated_state_dict(), untouched.consolidated_state_dict())
    trainer.close()
    untouched.close()
    return str(caught.value)


def _load_refused(setup: Setup, path: Path) -> str:
    return _refused(lambda trainer: trainer.load_checkpoint(path), setup)


def _save_refused(setup: Setup, path: Path) -> str:
    return _refused(lambda trainer: trainer.save_checkpoint(path), setup)


@pytest.mark.parametrize(("name", "damage", "message"), [
    ("__1_0.distcp", lambda file: os.truncate(file, file.stat().st_size - 1), "missing or cut short"),
    ("__0_0.distcp", os.remove, "missing or cut short"),
    (".metadata", lambda file: os.truncate(file, 100), "damaged"),
    (".metadata", lambda file: file.write_bytes(file.read_bytes().replace(b"model/", b"modem/")), "damaged"),
    ("progress.json", lambda file: os.truncate(file, 30), "damaged"),
    ("progress.json", lambda file: file.write_text(file.read_text().replace('"format": 1', '"format": 2')),
     "another release"),
    ("progress.json", os.remove, "no checkpoint"),
])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
        ranks: RanksOf, tmp_path: Path, name: str, damage: Callable[[Path], None], message: str) -> None:
    ranks(2).run(_save, ZERO2, tmp_path / "c", 1)
    damage(tmp_path / "c" / name)
    for told in ranks(2).run(_load_refused, ZERO2, tmp_path / "c"):
        assert message in told
        assert str(tmp_path / "c") in told


def test_a_checkpoint_that_is_not_there_is_named(ranks: RanksOf, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path / "file" / "checkpoint", tmp_path):
        assert str(path) in ranks(2).run(_load_refused, ZERO2, path)[1]


def _load_flipped(setup: Setup, path: Path) -> str:
    trainer = start(setup)
    with pytest.raises(ConfigurationError, match="is damaged") as caught:
        trainer.load_checkpoint(path)
    trainer.close()
    return str(caught.value)


def test_ranks_are_told_when_another_reads_damaged_contents(ranks: RanksOf, tmp_path: Path) -> None:
    ranks(2).run(_save, ZERO2, tmp_path / "c", 1)
    file = tmp_path / "c" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[:64] = bytes(64)
    file.write_bytes(content)
    told = ranks(2).run(_load_flipped, ZERO2, tmp_path / "c")
    assert told[0] == told[1]
    assert "rank 1" in told[0]


class _Taller(nn.Sequential):
    """As `perceptron`, with one matrix the other way round, where the same number of elements fits."""

    def __init__(self) -> None:
        super().__init__(*perceptron())
        self[2].weight = nn.Parameter(torch.zeros(13, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self[1](self[0](x)) @ self[2].weight + self[2].bias
        return self[4](self[3](hidden))


class _WithBuffer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*perceptron())
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("passing", torch.zeros(3), persistent=False)


def _shorter() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 13), nn.Tanh(), nn.Linear(13, 5))


@pytest.mark.parametrize(("build", "message"), [
    (Awkward, "another model"),
    (_shorter, "4.bias is (1,) there and not here"),
    (_Taller, "2.weight is (5, 13) there and (13, 5) here"),
    (_WithBuffer, "shift is not there and (3,) here"),
])
def test_another_models_checkpoint_is_refused(ranks: RanksOf, tmp_path: Path, build: Callable[[], nn.Module],
                                              message: str) -> None:
    ranks(1).run(_save, ZERO2, tmp_path / "c", 1)
    for told in ranks(2).run(_load_refused, Setup(build, TrainConfig(zero_stage=1)), tmp_path / "c"):
        assert message in told
        assert "passing" not in told


def _two_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others}])


@pytest.mark.parametrize(("optimizer", "message"), [(OptimizerConfig(name="sgd"), "SGD"), (_two_groups, "2")])
def test_another_optimizers_checkpoint_is_refused(ranks: RanksOf, tmp_path: Path, optimizer: Any,
                                                  message: str) -> None:
    ranks(1).run(_save, ZERO2, tmp_path / "c", 1)
    told = ranks(1).run(_load_refused, Setup(perceptron, TrainConfig(), optimizer), tmp_path / "c")[0]
    assert "AdamW with 1 parameter groups" in told
    assert message in told


def test_saving_replaces_nothing_but_a_checkpoint(ranks: RanksOf, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "data").write_text("mine")
    for name in ("file", "folder", "file/checkpoint"):
        for told in ranks(2).run(_save_refused, ZERO2, tmp_path / name):
            assert str((tmp_path / name).parent) in told
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "data").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_saving_makes_missing_folders_and_follows_links(ranks: RanksOf, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    for name in ("a/b/checkpoint", "empty", "link"):
        ranks(2).run(_save, ZERO2, tmp_path / name, 1)
        assert ranks(1).run(_loaded, ZERO2, tmp_path / name)[0][0] == 1
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "progress.json").exists()


def _save_under_own_name(setup: Setup, folder: Path) -> None:
    trainer = start(setup)
    trainer.save_checkpoint(folder / f"of rank {trainer.rank}")
    trainer.load_checkpoint(folder / f"of rank {trainer.rank}")
    trainer.close()


def test_the_first_ranks_path_is_every_ranks(ranks: RanksOf, tmp_path: Path) -> None:
    ranks(3).run(_save_under_own_name, ZERO2, tmp_path)
    assert os.listdir(tmp_path) == ["of rank 0"]


NO_NAMES = ("a\0b", "half \ud800", "/")


def _refused_by_name(setup: Setup, folder: Path, name: str) -> list[str]:
    """What each way to save or load says to a path; the first rank's counts."""
    trainer = start(setup)
    told = []
    path = os.path.join(folder, name) if trainer.rank == 0 else folder / "fine"
    for action in (trainer.save_checkpoint, trainer.load_checkpoint, trainer.save_model):
        with pytest.raises(ConfigurationError) as caught:
            action(path)
        assert caught.value.fields == ("path",)
        told.append(str(caught.value))
    run_step(trainer, 0)  # ranks still agree on what comes next
    trainer.close()
    return told


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_cannot_be_a_name_is_told_on_every_rank(ranks: RanksOf, tmp_path: Path, name: str) -> None:
    first, second = ranks(2).run(_refused_by_name, ZERO2, tmp_path, name)
    assert first == second
    assert all("cannot be a name" in text or "/ is the root folder" in text for text in first)
    with pytest.raises(ConfigurationError, match="path: ") as caught:
        load_model(nn.Linear(1, 1), tmp_path / name)
    assert caught.value.fields == ("path",)
    assert os.listdir(tmp_path) == []


# Memory


MATRIX = 12 * 2**20


def _big() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 1), nn.Linear(1, MATRIX, bias=False))


def _bytes_beyond_state(setup: Setup, path: Path) -> int:
    """Resident bytes at the peak of a load, over what is resident once everything has its place."""
    trainer = start(setup)
    trainer.save_checkpoint(path)
    reset_peak_resident()
    before = resident_memory()
    trainer.load_checkpoint(path)
    after = resident_memory()
    trainer.close()
    return after.peak - max(before.now, after.now)


@pytest.mark.parametrize("stage", [0, 2])
def test_loading_takes_the_memory_of_three_pieces(ranks: RanksOf, tmp_path: Path, stage: int) -> None:
    setup = Setup(_big, TrainConfig(zero_stage=stage), OptimizerConfig(name="sgd"))
    for size in ranks(2).run(_bytes_beyond_state, setup, tmp_path / "c"):
        assert size < 3 * 4 * PIECE * 1.1
