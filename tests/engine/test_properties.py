"""Whatever the model and layout: trained as in one process, resumed as if uninterrupted, as small as the table says."""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from engine.buckets import ALIGNMENT
from engine.report import StateBytes
from engine.trainer import Trainer
from tests.engine.drawn import Drawn, Layout, layouts, models, reference, run_step, start
from tests.engine.training import Weights
from tests.support.ranks import RankPool

STEPS = 3

drawn_examples = settings(max_examples=60, derandomize=True, database=None, deadline=None,
                          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
"""The same examples in every run: what fails here fails everywhere."""


def _run(pool: RankPool, layout: Layout, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return pool.run(layout.world_size, function, *arguments, sockets=layout.sockets)


def _assert_equal(losses: list[list[float]], weights: list[Weights], expected: tuple[list[float], Weights]) -> None:
    """Of all ranks, their losses of each step and their weights at the end."""
    for ours, theirs in zip(zip(*losses, strict=True), expected[0], strict=True):
        assert sum(ours) / len(ours) == pytest.approx(theirs, abs=1e-6, rel=1e-5)
    for whole in weights:
        assert list(whole) == list(expected[1])
        for name, value in expected[1].items():
            torch.testing.assert_close(whole[name], value, atol=1e-6, rtol=1e-5,
                                       msg=lambda text, at=name: f"{at}: {text}")


def _train(trainer: Trainer, first: int, last: int) -> list[float]:
    return [sum(losses) / len(losses) for losses in (run_step(trainer, step) for step in range(first, last))]


def _trained(drawn: Drawn, layout: Layout) -> tuple[list[float], Weights]:
    trainer = start(drawn, layout.config)
    losses = _train(trainer, 0, STEPS)
    weights = trainer.consolidated_state_dict()
    trainer.close()
    return losses, weights


@given(drawn=models, layout=layouts())
@drawn_examples
def test_every_layout_trains_as_one_process_does(rank_pool: RankPool, drawn: Drawn, layout: Layout) -> None:
    losses, weights = zip(*_run(rank_pool, layout, _trained, drawn, layout), strict=True)
    _assert_equal(list(losses), list(weights), reference(drawn, layout, STEPS))


def _save_on_the_way(drawn: Drawn, layout: Layout, path: Path) -> list[float]:
    trainer = start(drawn, layout.config)
    losses = _train(trainer, 0, 1)
    trainer.save_checkpoint(path)
    trainer.close()
    return losses


def _resume(drawn: Drawn, layout: Layout, path: Path) -> tuple[list[float], Weights]:
    trainer = start(drawn, layout.config)
    with torch.no_grad():
        for part in trainer._update.parts:
            part.master.add_(3)
    trainer.load_checkpoint(path)
    assert trainer.steps == 1
    losses = _train(trainer, 1, STEPS)
    weights = trainer.consolidated_state_dict()
    trainer.close()
    return losses, weights


@given(data=st.data(), drawn=models, saved=layouts())
@drawn_examples
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(rank_pool: RankPool, tmp_path: Path, data: st.DataObject,
                                                         drawn: Drawn, saved: Layout) -> None:
    # What decides which samples meet, and how large a step is, stays.
    accumulation, clipping = saved.config.gradient_accumulation_steps, saved.config.gradient_clipping
    loaded = data.draw(layouts(gradient_accumulation_steps=st.just(accumulation), gradient_clipping=st.just(clipping)))
    drawn = replace(drawn, layers=tuple(replace(layer, gated=False) for layer in drawn.layers))
    path = tmp_path / "checkpoint"
    before = _run(rank_pool, saved, _save_on_the_way, drawn, saved, path)
    losses, weights = zip(*_run(rank_pool, loaded, _resume, drawn, loaded, path), strict=True)
    shutil.rmtree(path)
    expected, final = reference(drawn, loaded, STEPS)
    _assert_equal(before, [], (expected[:1], final))
    _assert_equal(list(losses), list(weights), (expected[1:], final))


def _held(drawn: Drawn, layout: Layout) -> StateBytes:
    trainer = start(drawn, layout.config)
    _train(trainer, 0, 1)
    held = trainer.state_bytes()
    trainer.close()
    return held


def _padded(parameters: Iterable[nn.Parameter], ranks: int) -> int:
    """Elements that parameters take where each has a bucket of its own."""
    shard = ALIGNMENT * ranks
    return sum(max(-(-parameter.numel() // shard), 1) * shard for parameter in parameters)


@given(drawn=models, layout=layouts(precision=st.sampled_from(["fp32", "bf16"])))
@drawn_examples
def test_no_layout_holds_more_than_the_table_says(rank_pool: RankPool, drawn: Drawn, layout: Layout) -> None:
    """The table of the ZeRO paper (arXiv 1910.02054), for parameters padded as they are laid out."""
    # What only some micro-batches use holds up the buckets after it until the end of a pass without it.
    drawn = replace(drawn, layers=tuple(replace(layer, gated=False) for layer in drawn.layers))
    config, ranks = layout.config, layout.world_size
    parameters = list(drawn.build().parameters())
    every = _padded(parameters, ranks)
    trainable = _padded((parameter for parameter in parameters if parameter.requires_grad), ranks)
    largest = max(_padded([parameter], ranks) for parameter in parameters)
    bucket = min(max(config.reduce_bucket_size + ALIGNMENT * ranks, largest), trainable)
    # Those being reduced; one being filled, or where each holds one parameter, those of one layer in any order.
    buckets = (2 if config.overlap_comm else 1) + 3
    width = {"fp32": 4, "bf16": 2}[config.precision]
    summed = 4 if config.gradient_accumulation_steps > 1 else width
    states = {"adamw": 8, "momentum": 4, "sgd": 0}[drawn.optimizer.name]
    masters = 4 if config.precision == "bf16" or config.offload_optimizer_ratio or config.offload_param else 0
    shards = [ranks if config.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    for held in _run(rank_pool, layout, _held, drawn, layout):
        assert held.parameters <= width * every / shards[0]
        assert held.gradients <= summed * (trainable / shards[1] + buckets * bucket)
        counts = 4 * len(parameters)  # of steps
        assert held.optimizer <= (states + masters) * trainable / shards[2] + counts
        assert held.host <= held.optimizer + held.parameters
