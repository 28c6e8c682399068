"""The models whose steps are timed."""

import pytest

from benchmarks.overhead import TENSORS, WEIGHTS, make_model
from engine.blocks import find_blocks


@pytest.mark.parametrize("tensors", TENSORS)
def test_models_differ_in_tensors_and_not_in_work(tensors: int) -> None:
    model = make_model(tensors)
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert len(list(model.parameters())) == tensors
    assert weights == pytest.approx(WEIGHTS, rel=0.03)
    blocks = find_blocks(model)
    assert {len(list(block.parameters())) for block in blocks} == {10}
    assert len(blocks) == tensors // 10
