"""A loop and a model of the user's own under the engine: the README's loop, and models of transformers."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import engine
from engine import TrainConfig
from engine.trainer import initialize
from tests.engine.training import RanksOf, Weights, assert_same_weights, over_shared_memory, stages

README = Path(__file__).parents[2] / "README.md"

CONFIG = re.compile(r"`CONFIG = (engine\.TrainConfig\(.*\))`")


def _readme() -> tuple[list[str], str]:
    """The lines of the README's loop, each with its mark, and the configuration that goes with it."""
    section = README.read_text().split("### The engine by itself")[1]
    configuration = CONFIG.search(section)
    assert configuration is not None
    return section.split("```diff\n")[1].split("\n```")[0].splitlines(), configuration[1]


def _program(mark: str) -> str:
    """The loop before (-) or after (+) the change."""
    lines, _ = _readme()
    return "\n".join(line[1:] for line in lines if line[:1] in ("", " ", mark))


def _run_program(mark: str, config: TrainConfig | None) -> float:
    """The loss on what was held out, after training."""
    namespace: dict[str, Any] = {"CONFIG": config}
    exec(compile(_program(mark), str(README), "exec"), namespace)
    generator = torch.Generator().manual_seed(1)
    x, held_out = torch.randn(48, 6, generator=generator), torch.randn(10, 6, generator=generator)
    y, held_out_y = x.sum(1, keepdim=True), held_out.sum(1, keepdim=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    loss: float = namespace["train"](model, TensorDataset(x, y), (held_out, held_out_y))
    return loss


def _run_on_engine(stage: int) -> float:
    config: TrainConfig = eval(_readme()[1], {"engine": engine})
    return _run_program("+", TrainConfig.model_validate(config.model_dump() | {"zero_stage": stage}))


def test_five_lines_change_in_the_readmes_loop() -> None:
    added = [line for line in _readme()[0] if line.startswith("+")]
    assert len(added) == 5
    compile(_program("-"), str(README), "exec")


@stages
def test_the_readmes_loop_learns_the_same_on_two_ranks(ranks: RanksOf, stage: int) -> None:
    loss = _run_program("-", None)
    assert ranks(2).run(_run_on_engine, stage) == pytest.approx([loss, loss], rel=1e-5)


_TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_IDS = torch.randint(1, 31, (5, 8, 6), generator=torch.Generator().manual_seed(3))
"""(steps, samples, tokens)"""
_PIXELS = torch.randn(5, 8, 1, 8, 8, generator=torch.Generator().manual_seed(4))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_TINY, vocab_size=32, num_key_value_heads=1, tie_word_embeddings=True))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_TINY, **_NO_DROPOUT, vocab_size=32, max_position_embeddings=8))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**_TINY, **_NO_DROPOUT, image_size=8, patch_size=4, num_channels=1))


def _loss(model: Callable[..., Any], build: Callable[[], nn.Module], step: int, rows: slice) -> torch.Tensor:
    if build is _vit:
        return model(pixel_values=_PIXELS[step, rows], labels=_IDS[step, rows, 0] % 2).loss
    return model(input_ids=_IDS[step, rows], labels=_IDS[step, rows]).loss


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _train_transformers(build: Callable[[], nn.Module], config: TrainConfig) -> list[Weights]:
    torch.manual_seed(0)
    trainer = initialize(build().train(), config=config, optimizer=_sgd)
    history = []
    for step in range(3):
        for micro in range(2):
            first = micro * 4 + trainer.rank * 2
            trainer.backward(_loss(trainer, build, step, slice(first, first + 2)))
            trainer.step()
        history.append(trainer.consolidated_state_dict())
    trainer.close()
    return history


def _train_transformers_plainly(build: Callable[[], nn.Module]) -> list[Weights]:
    torch.manual_seed(0)
    model = build().train()
    optimizer = _sgd(model.parameters())
    history = []
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, build, step, slice(0, 8)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append({name: value.clone() for name, value in model.state_dict().items()})
    return history


@over_shared_memory
@stages
@pytest.mark.parametrize("build", [_llama, _gpt2, _bert, _vit])
def test_models_of_transformers_train_the_same(ranks: RanksOf, stage: int, build: Callable[[], nn.Module]) -> None:
    pytest.importorskip("transformers")
    checkpointing = ("none", "selective", "full", "selective")[stage]
    config = TrainConfig.model_validate({
        "zero_stage": stage, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "activation_checkpointing": checkpointing})
    expected = _train_transformers_plainly(build)
    assert_same_weights(ranks(2).run(_train_transformers, build, config), expected, atol=2e-6)
