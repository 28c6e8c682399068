"""Tasks keep their contract: batches by global index, equal weights from one seed, a scalar mean loss."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import TaskError
from engine.spec import (
    ALLOWED_TASKS_VARIABLE,
    GptSpec,
    HuggingFaceSpec,
    ModelSpec,
    PythonSpec,
    VitSpec,
    allowed_prefixes,
    is_allowed_entry_point,
)
from engine.tasks import build_task
from engine.tasks.base import checked_batch, checked_loss, task_blocks
from engine.tasks.synthetic import random_bits, random_uniform
from tests.support import tasks

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 64}
SPECS: dict[str, ModelSpec] = {
    "gpt": GptSpec(kind="gpt", layers=2, hidden=32, heads=2, vocab=64, sequence_length=16),
    "vit": VitSpec(kind="vit", layers=2, hidden=32, heads=2, image_size=16, patch_size=4, classes=10),
    "causal_lm": HuggingFaceSpec(kind="huggingface", config=LLAMA, sequence_length=16),
    "image_classification": HuggingFaceSpec(
        kind="huggingface", head="image_classification",
        config={"model_type": "vit", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
                "id2label": {str(label): str(label) for label in range(5)}}),
    "python": tasks.spec("toy"),
}


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED_TASKS_VARIABLE, tasks.MODULE)


def _rows(batch: Any) -> list[Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)


@pytest.mark.parametrize("name", SPECS)
def test_a_sample_depends_on_its_index_and_the_seed_alone(name: str) -> None:
    task, other_seed = build_task(SPECS[name], seed=3), build_task(SPECS[name], seed=4)
    many = _rows(task.batch([7, 2, 5, 5, 9, 11, 4]))
    alone = _rows(build_task(SPECS[name], seed=3).batch([5]))
    for together, single in zip(many, alone, strict=True):
        assert torch.equal(together[2], single[0])
        assert torch.equal(together[3], single[0])
    assert not torch.equal(many[0][0], many[0][2])
    assert not torch.equal(_rows(other_seed.batch([7, 2, 5]))[0], many[0][:3])


@pytest.mark.parametrize("name", SPECS)
def test_weights_follow_the_global_generator(name: str) -> None:
    task = build_task(SPECS[name])
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(task.build_model().state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert any(not torch.equal(states[0][key], states[2][key]) for key in states[0])
    assert all(value.dtype == torch.float32 for value in states[0].values() if value.is_floating_point())


@pytest.mark.parametrize("name", SPECS)
def test_the_loss_of_a_batch_is_the_mean_of_its_halves(name: str) -> None:
    task = build_task(SPECS[name])
    torch.manual_seed(0)
    model = task.build_model().eval()
    whole = checked_loss(task, model, checked_batch(task, range(8)))
    halves = [checked_loss(task, model, checked_batch(task, indices)) for indices in (range(4), range(4, 8))]
    assert whole.shape == ()
    assert torch.allclose(whole, (halves[0] + halves[1]) / 2, atol=1e-5)


@pytest.mark.parametrize(("name", "tokens"), [("gpt", 16), ("vit", 16), ("causal_lm", 16), ("python", 10)])
def test_tokens_per_sample(name: str, tokens: int) -> None:
    assert build_task(SPECS[name]).tokens_per_sample == tokens


@pytest.mark.parametrize("name", ["gpt", "vit", "causal_lm", "image_classification"])
def test_a_few_steps_learn_something(name: str) -> None:
    task = build_task(SPECS[name])
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = checked_loss(task, model, checked_batch(task, range(16)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_gpt_ties_its_head_and_names_its_blocks() -> None:
    task = build_task(SPECS["gpt"])
    model = task.build_model()
    blocks = task_blocks(task, model)
    assert model.head.weight is model.tokens.weight
    assert blocks is not None
    assert len(blocks) == 2
    assert task_blocks(build_task(SPECS["python"]), model) is None


def test_random_numbers_are_spread_evenly() -> None:
    numbers = random_uniform(0, range(200), 50)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean().item() - 0.5) < 0.01
    assert len(random_bits(0, range(200), 50).unique()) == 10_000
    assert not torch.equal(random_bits(0, [1], 4), random_bits(0, [1], 4, stream=1))


@pytest.mark.parametrize(("entry_point", "allowed"), [
    ("mytasks:make", True), ("mytasks.sub.deep:make", True), ("mytasks2:make", False), ("other:make", False),
    ("mytask:make", False), ("my.package:make", True), ("my:make", False)])
def test_prefixes_end_at_module_boundaries(entry_point: str, allowed: bool) -> None:
    assert is_allowed_entry_point(entry_point, allowed_prefixes("mytasks, my.package ,,")) is allowed


def test_no_prefix_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOWED_TASKS_VARIABLE)
    with pytest.raises(TaskError, match=r"tests\.support\.tasks:toy is not allowed.*AUTOTUNE_ALLOWED_TASKS"):
        build_task(SPECS["python"])


def test_a_python_task_gets_its_arguments_and_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_task(tasks.spec("toy", tokens_per_sample=7)).tokens_per_sample == 7
    assert build_task(tasks.spec("toy"), seed=5)._seed == 5  # type: ignore[attr-defined]
    assert build_task(tasks.spec("toy", seed=6), seed=5)._seed == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize(("spec", "message"), [
    (tasks.spec("not_a_task"), "NoTask without build_model, batch, loss"),
    (tasks.spec("NOT_CALLABLE"), "no callable NOT_CALLABLE"),
    (tasks.spec("missing"), "no callable missing"),
    (tasks.spec("toy", tokens_per_sample=0), "tokens_per_sample must be a whole number"),
    (PythonSpec(kind="python", entry_point="tests.support.tasks.nowhere:make"), "No module named"),
    (HuggingFaceSpec(kind="huggingface", config={"model_type": "no_such_model"}), "no_such_model"),
    (HuggingFaceSpec(kind="huggingface", config={"model_type": "vit"}), "no causal_lm model"),
    (HuggingFaceSpec(kind="huggingface", config=LLAMA, sequence_length=65), "max_position_embeddings 64"),
    (HuggingFaceSpec(kind="huggingface", config={**LLAMA, "quantization_config": {"load_in_4bit": True}}),
     "remove quantization_config"),
    (HuggingFaceSpec(kind="huggingface", config={**LLAMA, "vocab_size": 0}, sequence_length=16),
     "vocab_size of at least 1, not 0"),
])
def test_what_cannot_be_built_says_why(spec: ModelSpec, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        build_task(spec)


@pytest.mark.parametrize(("wrong", "told"), [
    ({"hiden_size": 512}, "model.config.hiden_size (did you mean 'hidden_size'?)"),
    ({"num_layers": 3}, "model.config.num_layers (did you mean 'num_hidden_layers'?)"),
    ({"heads": 2}, "model.config.heads (did you mean 'num_attention_heads'?)"),
    ({"tie_word_embedding": True}, "model.config.tie_word_embedding (did you mean 'tie_word_embeddings'?)"),
    ({"hiden_act": "relu", "my_rate": 0.5},
     "model.config.hiden_act (did you mean 'hidden_act'?), nor model.config.my_rate;"),
])
def test_what_transformers_would_ignore_of_a_config_is_refused(wrong: dict[str, Any], told: str) -> None:
    config = {"model_type": "llama", "vocab_size": 128}
    with pytest.raises(TaskError) as caught:
        build_task(HuggingFaceSpec(kind="huggingface", config={**config, **wrong}, sequence_length=16))
    assert str(caught.value).startswith("model_type 'llama' does not know model.config.")
    assert told in str(caught.value)


def test_a_part_of_a_config_is_looked_at_as_well() -> None:
    config = {"model_type": "llama4", "text_config": {"hiden_size": 32}}
    with pytest.raises(TaskError, match=r"model\.config\.text_config\.hiden_size \(did you mean 'hidden_size'"):
        build_task(HuggingFaceSpec(kind="huggingface", config=config, sequence_length=16))


LEFTOVERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": 1024, "n_embd": 32, "n_head": 4, "task_specific_params": {"text-generation": {"max_length": 50}},
             "summary_first_dropout": 0.1, "architectures": ["GPT2LMHeadModel"]},
    "llama": {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
              "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "pretraining_tp": 1, "temperature": 0.6,
              "max_length": 4096, "_attn_implementation_autoset": True, "sep_token_id": 3, "num_labels": 3,
              "max_sequence_length": 2048, "torchscript": False, "name_or_path": "someone/llama"},
    "bloom": {"n_embed": 32, "n_head": 4, "seq_length": 2048, "offset_alibi": 100, "masked_softmax_fusion": True,
              "attention_softmax_in_fp32": True, "n_inner": None, "unk_token_id": 0},
    "opt": {"activation_dropout": 0.0, "activation_function": "relu", "prefix": "</s>", "word_embed_proj_dim": 32,
            "hidden_size": 32, "_remove_final_layer_norm": False},
}
"""Of published config.json files: what their classes do not know, or take under another name."""


@pytest.mark.parametrize("model_type", LEFTOVERS)
def test_what_published_configs_carry_along_is_no_mistake(model_type: str) -> None:
    build_task(HuggingFaceSpec(kind="huggingface", config={"model_type": model_type, **LEFTOVERS[model_type]}))


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen2", "mixtral", "gemma3_text", "gpt_neox", "falcon"])
def test_a_config_that_transformers_wrote_itself_is_taken(model_type: str) -> None:
    from transformers import AutoConfig

    written = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    build_task(HuggingFaceSpec(kind="huggingface", config=written, sequence_length=16))


def test_errors_of_the_users_own_code_pass_through() -> None:
    with pytest.raises(ValueError, match="bad arg"):
        build_task(tasks.spec("fails_at_build"))


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    task = build_task(tasks.spec("loss_is_a_list"))
    with pytest.raises(TaskError, match="must return a scalar tensor, the mean over the batch, not list"):
        checked_loss(task, task.build_model(), task.batch([0]))


def test_code_named_in_a_transformers_config_is_not_run() -> None:
    config = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil--modeling.Evil"}, "_name_or_path": "someone/evil"}
    task = build_task(HuggingFaceSpec(kind="huggingface", config=config, sequence_length=16))
    assert type(task.build_model()).__module__.startswith("transformers.")


@pytest.mark.parametrize("wrong", [{"hidden_act": "nope"}, {"attn_implementation": "flash_attention_2"},
                                   {"pad_token_id": 999_999}])
def test_a_config_that_makes_no_model_is_said_to_be_at_fault(wrong: dict[str, Any]) -> None:
    task = build_task(HuggingFaceSpec(kind="huggingface", config={**LLAMA, **wrong}, sequence_length=16))
    with pytest.raises(TaskError, match="cannot build a model from this config of model_type 'llama'"):
        task.build_model()
