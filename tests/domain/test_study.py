"""States of a study and the contract of a request."""

import pytest
from pydantic import ValidationError

from autotune.domain.request import StudyRequest
from autotune.domain.study import STUDY_TRANSITIONS, StudyState

BODY = {
    "name": "gpt-tiny",
    "model": {"kind": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 4096, "sequence_length": 128},
    "training": {
        "global_batch_size": 32,
        "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
        "gradient_clipping": 1.0,
    },
    "hardware": {"device": "auto", "devices": 2, "memory_limit_bytes": None},
    "search": {"sampler": "tpe", "seed": 0, "space": {"zero_stage": [0, 1, 2, 3], "precision": ["bf16"]}},
    "budget": {"max_trials": 20, "max_seconds": 600},
}


def test_every_state_has_its_transitions_and_final_ones_have_none():
    assert set(STUDY_TRANSITIONS) == set(StudyState)
    assert {state for state in StudyState if state.is_final} == {
        StudyState.SUCCEEDED, StudyState.FAILED, StudyState.CANCELLED}


def test_a_request_survives_json_unchanged():
    request = StudyRequest.model_validate(BODY)
    assert StudyRequest.model_validate_json(request.model_dump_json()) == request
    assert request.training.optimizer.weight_decay == 0.1
    assert request.search.space == {"zero_stage": [0, 1, 2, 3], "precision": ["bf16"]}


@pytest.mark.parametrize(
    ("change", "location"),
    [
        ({"model": {"kind": "gpt", "hidden": 250}}, ("model", "gpt")),
        ({"model": {"kind": "unet"}}, ("model",)),
        ({"training": {"global_batch_size": 0}}, ("training", "global_batch_size")),
        ({"training": {"global_batch_size": 8, "globl": 1}}, ("training", "globl")),
        ({"hardware": {"devices": 0}}, ("hardware", "devices")),
        ({"name": "  "}, ("name",)),
    ],
)
def test_what_can_never_run_is_refused_at_its_place(change, location):
    with pytest.raises(ValidationError) as caught:
        StudyRequest.model_validate({**BODY, **change})
    assert [error["loc"] for error in caught.value.errors()] == [location]
