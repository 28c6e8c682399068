"""Telling living processes from dead ones."""

import subprocess
import sys

import pytest

from autotune.scheduler.owner import Owner


def owner_of(pid: int, **changes: object) -> Owner:
    here = Owner.current("here")
    from autotune.scheduler.owner import _started

    return here.model_copy(update={"pid": pid, "started": _started(pid) or 0, **changes})


def test_owners_survive_being_written_and_read() -> None:
    here = Owner.current("a|strange|host")
    assert Owner.parse(str(here)) == here


@pytest.mark.parametrize("text", ["", "scheduler-1", "a|b|c|d", "host|1|2"])
def test_other_names_are_not_taken_for_processes(text: str) -> None:
    assert Owner.parse(text) is None


def test_this_process_is_alive() -> None:
    here = Owner.current("here")
    assert not here.is_dead(here)


def test_a_killed_process_is_dead_even_before_its_parent_has_looked() -> None:
    here = Owner.current("here")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = owner_of(process.pid)
        assert not owner.is_dead(here)
        process.kill()
        process.stdin.close()  # type: ignore[union-attr]
        while not owner.is_dead(here):  # a zombie from here on
            pass
        process.wait()
    assert owner.is_dead(here)


def test_another_process_under_the_same_id_is_not_the_owner() -> None:
    here = Owner.current("here")
    assert here.model_copy(update={"started": here.started - 1}).is_dead(here)


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"namespace": "pid:[1]"}])
def test_processes_elsewhere_are_not_judged(changes: dict[str, str]) -> None:
    here = Owner.current("here")
    assert not here.model_copy(update={"pid": 2**22 + 1, **changes}).is_dead(here)
