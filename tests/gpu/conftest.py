"""Everything here needs an accelerator and is skipped, with that reason, where there is none."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


@pytest.fixture
def device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True)
