"""Keeping one healthy group on a study's devices."""

import asyncio

import pytest

from autotune.scheduler.group import GroupKeeper
from engine.report import ProbeRequest
from engine.spec import GptSpec
from tests.support.launcher import FakeGroup, FakeLauncher
from tests.support.scheduling import in_loop

PROBE = ProbeRequest(model=GptSpec(kind="gpt"))


class SlowLauncher(FakeLauncher):
    """Its groups take their time to end."""

    async def start(self, devices):  # type: ignore[no-untyped-def]
        group = await super().start(devices)
        close = group.close

        async def slow_close() -> None:
            await asyncio.sleep(0.1)
            await close()

        group.close = slow_close  # type: ignore[method-assign]
        return group


@in_loop
async def test_closing_can_be_interrupted_and_repeated() -> None:
    launcher = SlowLauncher()
    keeper = GroupKeeper(launcher, launcher.devices())
    await keeper.run(PROBE, deadline_seconds=10)
    closing = asyncio.create_task(keeper.close())
    await asyncio.sleep(0.02)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert launcher.open_groups == {1}
    await keeper.close()
    assert launcher.open_groups == set()


@in_loop
async def test_an_idle_group_that_broke_is_replaced_before_the_next_request() -> None:
    launcher = FakeLauncher()
    keeper = GroupKeeper(launcher, launcher.devices())
    await keeper.run(PROBE, deadline_seconds=10)
    group = keeper._group
    assert isinstance(group, FakeGroup)
    group.healthy = False
    report, log = await keeper.run(PROBE, deadline_seconds=10)
    assert report.kind == "probe"
    assert log == "served probe in group 2\n"
    assert launcher.open_groups == {2}
