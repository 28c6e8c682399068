"""What the operator decides, as the service and its workers understand it."""

import pytest

from autotune.settings import Settings
from engine.spec import allowed_prefixes, is_allowed_entry_point


@pytest.mark.parametrize(("entry_point", "allowed"), [
    ("mytasks:make", True), ("mytasks.inner:make", True), ("mytaskss:make", False), ("team.a:make", True),
    ("team:make", True), ("teams:make", False)])
def test_service_and_worker_allow_the_same_tasks(entry_point: str, allowed: bool) -> None:
    given = "mytasks, team., "
    assert Settings(allowed_tasks=given).allows_task(entry_point) is allowed  # type: ignore[arg-type]
    assert is_allowed_entry_point(entry_point, allowed_prefixes(given)) is allowed
