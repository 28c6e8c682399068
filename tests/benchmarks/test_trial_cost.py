"""Seconds outside of the measured steps, warm and fresh."""

import asyncio

import pytest

from benchmarks.trial_cost import POLICY, cost, summary
from engine.config import TrainConfig
from engine.spec import GptSpec

TINY = GptSpec(kind="gpt", layers=1, hidden=32, heads=1, vocab=64, sequence_length=16)


def test_a_group_of_its_own_costs_more_than_a_warm_one() -> None:
    policy = POLICY.model_copy(update={"max_warmup_steps": 1, "min_steps": 2, "max_steps": 2})
    (row,) = asyncio.run(cost(configs=[TrainConfig(zero_stage=1)], rounds=1, model=TINY, policy=policy))
    assert (row["round"], row["stage"], row["precision"]) == (0, 1, "fp32")
    assert 0 < float(row["warm s"] or 0) < float(row["fresh s"] or 0)
    assert float(row["warm s"] or 0) < float(row["relaunched s"] or 0)
    assert row["fresh / warm"] == pytest.approx(float(row["fresh s"] or 0) / float(row["warm s"] or 1))
    assert row["relaunched / warm"] == pytest.approx(float(row["relaunched s"] or 0) / float(row["warm s"] or 1))


def test_the_summary_is_of_medians() -> None:
    rows = [{"round": 0, "stage": 1, "warm s": warm, "fresh s": 10.0, "fresh / warm": 10.0 / warm}
            for warm in (1.0, 2.0, 50.0)]
    assert summary(rows) == {"warm s": 2.0, "fresh s": 10.0, "fresh / warm": 5.0}
