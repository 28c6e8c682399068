"""`TrainConfig`, `OptimizerConfig` and the arithmetic of batch sizes."""

import pytest
from pydantic import ValidationError

from engine.config import OptimizerConfig, TrainConfig, require_global_batch, resolve_batch_sizes
from engine.errors import BatchSizeError
from engine.report import MeasurePolicy
from engine.run_file import RunFile


def triple(**given: int) -> tuple[int, int, int]:
    sizes = resolve_batch_sizes(data_parallel_size=2, **given)
    return sizes.global_batch_size, sizes.micro_batch_size, sizes.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({"global_batch_size": 8}, (8, 4, 1)),
        ({"micro_batch_size": 2}, (4, 2, 1)),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 3}, (12, 2, 3)),
        ({"global_batch_size": 8, "micro_batch_size": 2}, (8, 2, 2)),
        ({"global_batch_size": 8, "gradient_accumulation_steps": 2}, (8, 2, 2)),
        ({"global_batch_size": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 2}, (8, 2, 2)),
    ],
)
def test_the_batch_triple_is_completed_from_any_sufficient_part(given, resolved):
    assert triple(**given) == resolved


@pytest.mark.parametrize(
    ("given", "message", "fields"),
    [
        ({"global_batch_size": 7}, "7 not divisible by 2", {"global_batch_size"}),
        ({}, "give one of", {"global_batch_size", "micro_batch_size"}),
        ({"gradient_accumulation_steps": 3}, "give one of", {"global_batch_size", "micro_batch_size"}),
        ({"global_batch_size": 8, "micro_batch_size": 3}, "not divisible by 6",
         {"global_batch_size", "micro_batch_size"}),
        ({"global_batch_size": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 1}, "8 != 2*1*2",
         {"global_batch_size", "micro_batch_size", "gradient_accumulation_steps"}),
    ],
)
def test_an_open_or_contradictory_batch_triple_is_refused_naming_the_fields(given, message, fields):
    with pytest.raises(BatchSizeError) as caught:
        triple(**given)
    assert message in str(caught.value)
    assert set(caught.value.fields) == fields


def test_a_configuration_must_train_on_the_global_batch_asked_for():
    config = TrainConfig(micro_batch_size=2, gradient_accumulation_steps=3)
    assert config.global_batch_size(2) == 12
    require_global_batch(config, global_batch_size=12, data_parallel_size=2)
    with pytest.raises(BatchSizeError, match=r"16 != 2\*3\*2"):
        require_global_batch(config, global_batch_size=16, data_parallel_size=2)


@pytest.mark.parametrize("value", [0, -1, 1.5, "1.5", True, "many", None, float("inf"), float("nan"), "inf"])
def test_a_bucket_size_that_is_no_positive_whole_number_is_refused_by_name(value):
    with pytest.raises(ValidationError) as caught:
        TrainConfig(reduce_bucket_size=value)
    assert [error["loc"] for error in caught.value.errors()] == [("reduce_bucket_size",)]


@pytest.mark.parametrize("value", [5e8, "5e8", 500_000_000, "500000000"])
def test_a_bucket_size_may_be_written_in_exponent_form(value):
    size = TrainConfig(reduce_bucket_size=value).reduce_bucket_size
    assert size == 500_000_000
    assert type(size) is int


def test_the_reduce_dtype_follows_the_precision_unless_given():
    assert TrainConfig(precision="bf16").reduce_dtype == "bf16"
    assert TrainConfig(precision="bf16", reduce_dtype="fp32").reduce_dtype == "fp32"
    assert TrainConfig.model_validate(TrainConfig(precision="bf16").model_dump()).reduce_dtype == "bf16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offload_param": True, "zero_stage": 2}, "zero_stage 3"),
        ({"optimizer_precision": "compute", "precision": "fp16"}, "optimizer_precision"),
        ({"zero_stage": 4}, "0, 1, 2 or 3"),
        ({"zero_stge": 1}, "did you mean 'zero_stage'"),
        ({"nonsense": 1}, "unknown field; known here: zero_stage, micro_batch_size"),
        ({"offload_optimizer_ratio": 1.2}, "less than or equal to 1"),
    ],
)
def test_what_the_engine_cannot_run_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig(**fields)


def problems(model, /, **fields):
    """Refusals by field, as users read them."""
    with pytest.raises(ValidationError) as caught:
        model(**fields)
    return {".".join(map(str, error["loc"])): error["msg"].removeprefix("Value error, ")
            for error in caught.value.errors()}


@pytest.mark.parametrize(("written", "meant"), [
    ("stage", "zero_stage"), ("zero_stages", "zero_stage"), ("batch_size", "micro_batch_size"),
    ("train_micro_batch_size_per_gpu", "micro_batch_size"), ("gradient_accumulation", "gradient_accumulation_steps"),
    ("mixed_precision", "precision"), ("max_grad_norm", "gradient_clipping"),
    ("cpu_offload", "offload_optimizer_ratio"), ("gradient_checkpointing", "activation_checkpointing"),
    ("Stage", "zero_stage")])
def test_what_other_tools_call_a_field_is_answered_with_its_name_here(written, meant):
    assert problems(TrainConfig, **{written: 1}) == {written: f"unknown field: did you mean {meant!r}?"}


@pytest.mark.parametrize(("model", "written", "words"), [
    (TrainConfig, "fp16", 'give precision "fp16"'), (TrainConfig, "bf16", 'give precision "bf16"'),
    (TrainConfig, "train_batch_size", "micro_batch_size x gradient_accumulation_steps x ranks"),
    (TrainConfig, "learning_rate", "the optimizer's"), (OptimizerConfig, "learning_rate", "did you mean 'lr'?"),
    (OptimizerConfig, "type", "did you mean 'name'?"), (OptimizerConfig, "beta1", "did you mean 'betas'?"),
    (OptimizerConfig, "max_grad_norm", "gradient_clipping")])
def test_what_is_said_elsewhere_or_otherwise_is_answered_with_how(model, written, words):
    assert words in problems(model, **{written: True})[written]


def test_names_of_other_tools_lead_to_fields_that_there_are():
    for model in (TrainConfig, OptimizerConfig):
        for name, meant in model.other_names.items():
            assert name not in model.model_fields
            assert meant in model.model_fields or " " in meant


def test_every_mistake_is_told_at_its_place_once():
    text = RunFile(model={"kind": "gpt"}, optimizer={}, config={}, global_batch_size=1, world_size=1).model_dump()
    text["config"] = {"stage": 1, "precision": "bfloat16", "offload_optimizer_ratio": 2}
    text["optimizer"] = {"learning_rate": 1, "lr": -1}
    text["model"]["layrs"] = 3
    assert problems(RunFile, **text) == {
        "config.stage": "unknown field: did you mean 'zero_stage'?",
        "config.precision": "unknown precision 'bfloat16': did you mean 'bf16'?",
        "config.offload_optimizer_ratio": "Input should be less than or equal to 1",
        "optimizer.learning_rate": "unknown field: did you mean 'lr'?",
        "optimizer.lr": "Input should be greater than or equal to 0",
        "model.gpt.layrs": "unknown field: did you mean 'layers'?"}


@pytest.mark.parametrize("precision", ["bfloat16", "int8", 16, None, ["bf16"]])
def test_a_wrong_precision_alone_is_to_blame(precision):
    assert set(problems(TrainConfig, precision=precision)) == {"precision"}
    assert set(problems(TrainConfig, precision=precision, reduce_dtype="x")) == {"precision", "reduce_dtype"}


def test_a_configuration_survives_json_unchanged():
    config = TrainConfig(zero_stage=3, precision="bf16", offload_param=True, offload_optimizer_ratio=0.3)
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


def test_a_trial_measures_no_more_steps_than_its_maximum():
    assert MeasurePolicy(max_steps=3).min_steps == 3
    assert MeasurePolicy.model_validate(MeasurePolicy(max_steps=3).model_dump()).min_steps == 3
    assert MeasurePolicy(max_steps=40).min_steps == MeasurePolicy().min_steps == 5
    with pytest.raises(ValidationError, match="min_steps 6 is more than max_steps 4"):
        MeasurePolicy(min_steps=6, max_steps=4)


@pytest.mark.parametrize(
    "fields", [{"name": "adamw", "momentum": 0.9}, {"betas": (0.9, 1.0)}, {"lr": -1.0}, {"name": "x"}])
def test_optimizer_fields_that_do_not_apply_are_refused(fields):
    with pytest.raises(ValidationError):
        OptimizerConfig(**fields)
