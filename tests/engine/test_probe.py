"""The probe's numbers against counts by hand and against real tensors."""

import pytest
import torch

from engine.errors import TaskError
from engine.probe import StorageTracker, probe, profile_fingerprint
from engine.process import host_memory_bytes
from engine.spec import ALLOWED_TASKS_VARIABLE, GptSpec, HuggingFaceSpec, ModelSpec, VitSpec, spec_fingerprint
from engine.tasks import build_task
from tests.engine import probed
from tests.support import tasks

GPT = GptSpec(kind="gpt", layers=3, hidden=64, heads=4, vocab=512, sequence_length=32)

LLAMA = {"model_type": "llama", "hidden_size": 80, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED_TASKS_VARIABLE, f"{tasks.MODULE},{probed.MODULE}")


def test_parameters_are_counted_exactly() -> None:
    profile = probe(GPT, precisions=("fp32",))
    block = 12 * 64 * 64 + 13 * 64
    assert profile.block_parameters == block
    assert profile.parameters == profile.trainable_parameters == 3 * block + 512 * 64 + 32 * 64 + 2 * 64
    assert profile.largest_parameter == 512 * 64
    assert profile.parameter_tensors == len(list(build_task(GPT).build_model().parameters()))
    assert (profile.block_class, profile.block_count) == ("TransformerBlock", 3)
    assert profile.tokens_per_sample == 32
    assert profile.fingerprint == spec_fingerprint(GPT)


def test_blocks_of_different_sizes_are_told_one_by_one() -> None:
    profile = probe(probed.spec("growing"), precisions=("fp32",))
    assert profile.block_sizes == (8 * 16 + 16, 16 * 32 + 32, 32 * 64 + 64)
    assert profile.block_parameters == 32 * 64 + 64
    assert profile.parameters == sum(profile.block_sizes)


def test_operations_follow_the_formula() -> None:
    """Forward and backward: 6 per weight and token, and 12 x layers x length^2 x hidden for attention."""
    tokens, weights = 32, 3 * 12 * 64 * 64 + 512 * 64
    expected = 6 * weights * tokens + 12 * 3 * tokens**2 * 64
    assert probe(GPT, precisions=("fp32",)).flops_per_sample == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("size", [3, 5])
def test_fake_activations_equal_those_of_real_tensors(size: int) -> None:
    entry = probe(GPT, precisions=("fp32",)).activation("none", "fp32")
    task = build_task(GPT)
    model = task.build_model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    batch = task.batch(range(size))
    inputs = sum(tensor.nbytes for tensor in batch)  # type: ignore[union-attr]
    with StorageTracker(list(model.parameters())) as tracker:
        loss = task.loss(model, batch)
        saved = tracker.bytes
        loss.backward()
    assert entry.saved_per_sample * size == pytest.approx(saved + inputs, rel=0.02)
    assert entry.peak_per_sample * size + entry.fixed == pytest.approx(tracker.peak_bytes + inputs, rel=0.02)


@pytest.mark.parametrize(("spec", "expected"), [
    (GPT, (64, 4, 512, "fused")),
    (VitSpec(kind="vit", layers=2, hidden=48, heads=3, image_size=16, patch_size=4, classes=10), (48, 3, 0, "fused")),
    (HuggingFaceSpec(kind="huggingface", sequence_length=16, config=LLAMA), (80, 4, 96, "fused")),
    (HuggingFaceSpec(kind="huggingface", sequence_length=16, config=LLAMA | {"attn_implementation": "eager"}),
     (80, 4, 96, "eager")),
    (tasks.spec("toy"), (0, 0, 0, "fused")),
])
def test_dimensions_are_read_from_what_is_computed(spec: ModelSpec, expected: tuple[int, int, int, str]) -> None:
    """Heads are not as wide as a share of the hidden size, and fewer keys than queries are stored; a ViT's loss has
    rows of whole images."""
    profile = probe(spec, precisions=("bf16",))
    assert (profile.hidden, profile.heads, profile.vocab, profile.attention) == expected


def test_every_operator_is_counted_in_its_class() -> None:
    """The products are the formula's; each reads two matrices and writes one, of weights once for all samples."""
    tokens, hidden, layers, vocab = 32, 64, 3, 512
    profile = probe(GPT, precisions=("fp32",))
    none, full = (next(work for work in profile.work if work.checkpointing == choice) for choice in ("none", "full"))
    weights = layers * 12 * hidden**2 + vocab * hidden
    product, attention = none.operators["product"], none.operators["attention"]
    assert product.flops_per_sample == pytest.approx(6 * weights * tokens, rel=0.01)
    assert product.bytes_fixed == pytest.approx(3 * 4 * weights, rel=0.03)  # read twice, and their gradients written
    assert attention.flops_per_sample == pytest.approx(14 * layers * tokens**2 * hidden, rel=0.01)  # 2 + 5 products
    again = full.operators["product"].flops_per_sample - product.flops_per_sample
    assert again == pytest.approx(2 * layers * 8 * hidden**2 * tokens)  # backward needs no block's last product
    assert none.operators["other"].flops_per_sample == 0
    assert none.operators["other"].bytes_per_sample > 0


def test_activations_go_as_gradients_come() -> None:
    profile = probe(GPT, precisions=("fp32",))
    entry = profile.activation("none", "fp32")
    first, last = entry.backward[0], entry.backward[-1]
    assert [point.gradients for point in entry.backward] == sorted(point.gradients for point in entry.backward)
    assert last.gradients == profile.trainable_parameters
    for size in (2, 8):
        assert max(point.fixed + size * point.per_sample for point in entry.backward) == pytest.approx(
            entry.fixed + size * entry.peak_per_sample, rel=0.02)
    assert last.per_sample < 0.2 * first.per_sample


def test_checkpointing_and_narrow_types_save_activations() -> None:
    profile = probe(GPT)
    for precision in ("fp32", "bf16", "fp16"):
        none, selective, full = (
            profile.activation(mode, precision).saved_per_sample for mode in ("none", "selective", "full"))
        assert 0 < full < selective < none
    wide, narrow = profile.activation("none", "fp32"), profile.activation("none", "bf16")
    assert narrow.saved_per_sample < 0.75 * wide.saved_per_sample
    assert narrow.model_copy(update={"precision": "fp16"}) == profile.activation("none", "fp16")


@pytest.mark.parametrize("spec", [
    GptSpec(kind="gpt", layers=2, hidden=32768, heads=4, vocab=65536, sequence_length=16),
    VitSpec(kind="vit", layers=2, hidden=32768, heads=4),
    HuggingFaceSpec(kind="huggingface", sequence_length=16, config={
        "model_type": "llama", "hidden_size": 32768, "intermediate_size": 65536, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 1000, "torch_dtype": "bfloat16"}),
])
def test_no_weights_are_made(spec: ModelSpec) -> None:
    """100 GB of weights are profiled in place."""
    profile = probe(spec, precisions=("bf16",))
    assert profile.parameters > 25e9
    assert profile.block_count in (2, 3)


@pytest.mark.parametrize("kind", probed.LOOKS)
def test_a_task_that_looks_at_values_runs_on_real_tensors(kind: str) -> None:
    profile = probe(probed.spec("looks", kind=kind), precisions=("fp32",))
    assert profile.parameters == 2 * (8 * 8 + 8)
    assert profile.activation("none", "fp32").saved_per_sample == 3 * 8 * 4


def test_real_weights_that_have_no_room_are_refused() -> None:
    """They are more than the host has, and are never written to."""
    spare = host_memory_bytes() // 2**30 + 1
    with pytest.raises(TaskError, match=r"needs values to be probed \(DataDependentOutputException: .*\), and with "
                                        r"real weights it takes more than \d+\.\d GiB, 50% of what this host can"):
        probe(probed.spec("looks", kind="a number", spare=spare), precisions=("fp32",))


@pytest.mark.parametrize(("kind", "error"), [
    ("runtime", RuntimeError), ("type", TypeError), ("missing", NotImplementedError)])
def test_a_tasks_own_error_is_not_tried_again_on_real_tensors(kind: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^call 1$"):
        probe(probed.spec("fails", kind=kind), precisions=("fp32",))


def test_without_repeated_blocks_there_is_nothing_to_checkpoint() -> None:
    profile = probe(tasks.spec("toy"), precisions=("fp32",))
    assert profile.block_class is None
    assert [entry.checkpointing for entry in profile.activations] == ["none"]


def test_the_tasks_own_error_is_what_the_user_sees() -> None:
    with pytest.raises(ValueError, match="bad arg"):
        probe(tasks.spec("fails_at_build"))


def test_a_python_tasks_fingerprint_follows_its_source() -> None:
    assert profile_fingerprint(tasks.spec("toy")) != spec_fingerprint(tasks.spec("toy"))
    assert profile_fingerprint(tasks.spec("toy")) == profile_fingerprint(tasks.spec("toy"))


def test_the_tracker_forgets_what_is_freed() -> None:
    with StorageTracker([]) as tracker:
        first = torch.ones(1000)
        view = first[:10]
        second = torch.ones(500)
        assert tracker.bytes == 6000
        del first
        assert tracker.bytes == 6000
        del view, second
        assert tracker.bytes == 0
    assert tracker.peak_bytes == 6000
