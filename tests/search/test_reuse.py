"""Winners of earlier studies as first candidates."""

from datetime import timedelta
from typing import Any

from autotune.domain.study import BestConfig
from autotune.search.plan import Plan
from autotune.search.reuse import reusable, reused_note
from engine.config import TrainConfig
from tests.search.support import NOW, hardware_profile, study_plan, study_request
from tests.support.samples import sample_best

SPACE = {"zero_stage": [0, 1, 2], "micro_batch_size": [1, 2, 4], "precision": ["fp32", "bf16"]}


def plan() -> Plan:
    return study_plan(study_request(space=SPACE))


def winner(age: int = 0, hardware: str = "hardware", **config: Any) -> BestConfig:
    return sample_best(study_id=f"{age}" * 32, config=TrainConfig.model_validate(config),
                       hardware_profile=hardware_profile(fingerprint=hardware, device_name=f"device {hardware}"),
                       hardware_fingerprint=hardware, created_at=NOW - timedelta(days=age))


def test_values_that_are_not_in_the_space_become_the_nearest() -> None:
    known = [winner(zero_stage=3, micro_batch_size=64, precision="fp16", gradient_accumulation_steps=3)]
    (reused,) = reusable(plan(), known)
    assert reused.config == TrainConfig(zero_stage=2, micro_batch_size=4, gradient_accumulation_steps=4)


def test_the_same_hardware_comes_first_and_no_configuration_twice() -> None:
    here = [winner(age, zero_stage=stage) for age, stage in ((2, 1), (3, 1), (4, 2))]
    known = [winner(1, "other", zero_stage=0), *here]
    assert [(each.best.study_id[0], each.config.zero_stage) for each in reusable(plan(), known)] == [("2", 1), ("4", 2)]
    assert [each.best.study_id[0] for each in reusable(plan(), known[:2])] == ["2", "1"]


def test_what_does_not_fit_here_is_left_out() -> None:
    tight = study_plan(study_request(space=SPACE), hardware=hardware_profile(memory_bytes=100 * 2**20))
    fitting = {candidate.config for candidate in tight.candidates}
    known = [winner(number, zero_stage=stage, micro_batch_size=size, precision="fp32")
             for number, (stage, size) in enumerate((stage, size) for stage in (0, 2) for size in (1, 4))]
    assert {each.config for each in reusable(tight, known)} <= fitting
    assert len(fitting) < len(plan().candidates)


def test_the_note_says_from_where() -> None:
    assert reused_note([], plan()) is None
    known = [winner(1, "other", zero_stage=0), winner(2, zero_stage=1)]
    assert reused_note(reusable(plan(), known), plan()) == (
        "tried first what won in study 22222222 and study 11111111 on device other")
