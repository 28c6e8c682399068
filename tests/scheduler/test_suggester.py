"""Suggestions from the helper process."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.domain.earlier import EarlierStudy, Relation
from autotune.domain.request import SearchRequest
from autotune.domain.study import Trial, TrialRole, TrialState
from autotune.scheduler.suggester import HelperSuggester
from autotune.search.plan import Plan, make_plan
from autotune.search.space import parse_space
from autotune.search.suggest import suggest
from engine.report import Outcome
from tests.support.samples import (
    START,
    sample_hardware_profile,
    sample_measurement,
    sample_model_profile,
    sample_request,
)
from tests.support.scheduling import in_loop


@pytest.fixture
def plan() -> Plan:
    request = sample_request()
    return make_plan(request, parse_space(request), sample_model_profile(), sample_hardware_profile())


@in_loop
async def test_the_helper_suggests_what_the_function_would(plan: Plan) -> None:
    helper = HelperSuggester()
    try:
        for seed in (1, 2):
            search = SearchRequest(sampler="random", seed=seed)
            assert await helper.suggest(plan, (), search) == suggest(plan, (), search)
        search, earlier = SearchRequest(sampler="guided"), [_large_micro_batches_are_slow(plan)]
        found = [await helper.suggest(plan, (), search, known) for known in ((), earlier)]
        assert found == [suggest(plan, (), search), suggest(plan, (), search, earlier)]
        assert found[0] != found[1]
    finally:
        await helper.close()


def _large_micro_batches_are_slow(plan: Plan) -> EarlierStudy:
    """A study in which they took 9 times as long as predicted."""
    trials = []
    for number, (config, prediction) in enumerate(plan.candidates):
        seconds = (9.0 if config.micro_batch_size == 4 else 1.0) * (prediction.step_seconds or 0.0)
        trials.append(Trial(study_id="s", number=number, role=TrialRole.SUGGESTED, state=TrialState.FINISHED,
                            config=config, prediction=prediction, outcome=Outcome.OK,
                            measurement=sample_measurement(seconds), started_at=START, finished_at=START))
    return EarlierStudy(study_id="s", relation=Relation.HERE, trials=tuple(trials))


_ASK_FOR_GP = """
import asyncio, sys
from autotune.domain.request import SearchRequest
from autotune.scheduler.suggester import HelperSuggester
from autotune.search.plan import make_plan
from autotune.search.space import parse_space
from tests.support.samples import sample_hardware_profile, sample_model_profile, sample_request

async def main():
    request = sample_request()
    plan = make_plan(request, parse_space(request), sample_model_profile(), sample_hardware_profile())
    helper = HelperSuggester()
    try:
        assert await helper.suggest(plan, (), SearchRequest(sampler="gp")) is not None
    finally:
        await helper.close()
    print("torch" in sys.modules)

asyncio.run(main())
"""


def test_what_a_sampler_loads_stays_in_the_helper() -> None:
    # In a process of its own: this one may have loaded torch for other tests.
    done = subprocess.run([sys.executable, "-c", _ASK_FOR_GP], cwd=Path(__file__).parents[2], capture_output=True,
                          text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]


@in_loop
async def test_a_helper_that_died_is_replaced(plan: Plan) -> None:
    helper = HelperSuggester()
    search = SearchRequest(sampler="random", seed=1)
    try:
        first = await helper.suggest(plan, (), search)
        assert helper._process is not None
        killed = helper._process.pid
        os.kill(killed, signal.SIGKILL)
        assert await helper.suggest(plan, (), search) == first
        assert helper._process.pid != killed
    finally:
        await helper.close()


@in_loop
async def test_an_error_of_the_sampler_comes_back_with_its_traceback(plan: Plan) -> None:
    helper = HelperSuggester()
    try:
        with pytest.raises(RuntimeError, match="no such sampler: nonsense"):
            await helper.suggest(plan, (), SearchRequest(seed=1).model_copy(update={"sampler": "nonsense"}))
        assert await helper.suggest(plan, (), SearchRequest(sampler="random")) is not None
    finally:
        await helper.close()


@in_loop
async def test_a_caller_that_is_cancelled_ends_the_computation(plan: Plan) -> None:
    helper = HelperSuggester()
    asking = asyncio.create_task(helper.suggest(plan, (), SearchRequest(sampler="random")))
    while helper._process is None:
        await asyncio.sleep(0.01)
    process = helper._process
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert process.returncode == -signal.SIGKILL
    assert helper._process is None


@in_loop
async def test_a_helper_that_always_dies_is_said_to_have_died(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    helper = HelperSuggester()
    with pytest.raises(RuntimeError, match="ended twice without an answer"):
        await helper.suggest(plan, (), SearchRequest(sampler="random"))
    assert helper._process is None
