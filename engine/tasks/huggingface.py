"""Any transformers causal language model or image classifier, from its config.json, with random weights.

Nothing is downloaded and no code from a model repository is run: only classes that the installed transformers has.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.errors import TaskError
from engine.spec import HuggingFaceSpec
from engine.tasks.base import Batch, Task
from engine.tasks.synthetic import random_bits, random_uniform

_REMOTE_KEYS = ("auto_map", "_name_or_path", "trust_remote_code")

_LEFTOVERS = frozenset({"n_ctx", "seq_length", "max_sequence_length", "model_max_length", "offset_alibi"})
"""Numbers that published configs carry without their class knowing them; no model is built by them."""

_OTHER_NAMES = {
    **dict.fromkeys(("layers", "n_layer", "n_layers", "num_layers"), "num_hidden_layers"),
    **dict.fromkeys(("heads", "n_head", "n_heads", "num_heads"), "num_attention_heads"),
    **dict.fromkeys(("hidden", "hidden_dim", "d_model", "dim", "n_embd"), "hidden_size"),
    "vocab": "vocab_size", "num_classes": "num_labels",
}
"""What other configs, the bundled models' too, call what most of transformers' call so."""

_ABOUT_THE_CONFIG = (ValueError, TypeError, KeyError, AttributeError, ImportError, AssertionError)
"""What transformers raises over a config; lack of memory is none of these."""


def build_huggingface_task(spec: HuggingFaceSpec, *, seed: int = 0) -> Task:
    """The task of a specification.

    Raises:
        TaskError: transformers is missing, does not know the model type, has no such head for it, or would ignore a
            part of the config.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification
    except ImportError as error:
        raise TaskError("model kind huggingface needs transformers: install autotune[huggingface]") from error
    if spec.config.get("quantization_config"):
        raise TaskError("a quantized model is not trained here: remove quantization_config from the config")
    fields = {name: value for name, value in spec.config.items() if name not in _REMOTE_KEYS}
    model_type = fields.pop("model_type")
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except _ABOUT_THE_CONFIG as error:
        raise TaskError(f"transformers cannot read the config of model_type {model_type!r}: {_in_words(error)}"
                        ) from error
    ignored = _ignored_keys(fields, config, "model.config.")
    if ignored:
        raise TaskError(f"model_type {model_type!r} does not know {', nor '.join(ignored)}; correct or remove what it "
                        "would ignore")
    auto = AutoModelForCausalLM if spec.head == "causal_lm" else AutoModelForImageClassification
    if type(config) not in auto._model_mapping:
        raise TaskError(f"transformers has no {spec.head} model for model_type {model_type!r}: choose another head")
    auto._model_mapping[type(config)]  # imports the modeling module now, before anything is measured
    if spec.head == "causal_lm":
        return CausalLmTask(config, auto.from_config, sequence_length=spec.sequence_length, seed=seed)
    return ImageClassificationTask(config, auto.from_config, seed=seed)


def _built(from_config: Callable[..., Any], config: Any) -> nn.Module:
    """The model with random weights.

    Raises:
        TaskError: its config makes no model.
    """
    try:
        model: nn.Module = from_config(config, dtype=torch.float32)
    except _ABOUT_THE_CONFIG as error:
        raise TaskError(f"transformers cannot build a model from this config of model_type {config.model_type!r}: "
                        f"{_in_words(error)}") from error
    return model.train()


def _ignored_keys(given: Mapping[str, Any], config: Any, path: str) -> list[str]:
    """Keys that transformers only keeps, although the user means something by them; each with what may be meant.

    Published configs are full of leftovers that their class does not know and that are harmless. So a key is taken as
    meant where it is much like one that is not given, or where it says a number: a size or a rate.
    """
    from transformers import PretrainedConfig

    try:
        default = type(config)()
    except _ABOUT_THE_CONFIG:  # some cannot do without parts
        return []
    known = {*vars(default), *default.to_dict(), *default.attribute_map}
    found = []
    for key, value in given.items():
        part = vars(config).get(key)
        if isinstance(value, dict) and isinstance(part, PretrainedConfig):
            found += _ignored_keys(value, part, f"{path}{key}.")
        harmless = key in _LEFTOVERS or key.startswith("_") or key.endswith("_token_id")
        if harmless or key in known or hasattr(type(config), key) or key not in vars(config):
            continue
        says_a_number = isinstance(value, int | float) and not isinstance(value, bool) and value != 0
        meant = _meant(key, known - given.keys(), likeness=0.6 if says_a_number else 0.88)
        if says_a_number or meant:
            found.append(f"{path}{key}{f' (did you mean {meant!r}?)' if meant else ''}")
    return found


def _meant(key: str, names: Set[str], *, likeness: float) -> str | None:
    other = _OTHER_NAMES.get(key)
    if other in names or other == "num_labels":  # a property of every config
        return other
    return next(iter(difflib.get_close_matches(key, sorted(names), n=1, cutoff=likeness)), None)


def _in_words(error: BaseException) -> str:
    """A KeyError's text is a bare key."""
    return f"{type(error).__name__}: {error}" if isinstance(error, KeyError | AssertionError) else str(error)


class CausalLmTask:
    """Next-token prediction on arithmetic progressions of token ids, as the bundled `gpt`."""

    def __init__(self, config: Any, from_config: Callable[..., Any], *, sequence_length: int, seed: int) -> None:
        text = config.get_text_config()
        limit = getattr(text, "max_position_embeddings", None)
        if isinstance(limit, int) and 0 < limit < sequence_length:
            raise TaskError(f"sequence_length {sequence_length} exceeds the model's max_position_embeddings {limit}")
        vocab = getattr(text, "vocab_size", None)
        if not isinstance(vocab, int) or vocab < 1:
            raise TaskError(f"config of {config.model_type!r} needs a vocab_size of at least 1, not {vocab}")
        self._config, self._from_config, self._seed = config, from_config, seed
        self._vocab: int = vocab
        self._length = sequence_length
        config.use_cache = False

    @property
    def tokens_per_sample(self) -> int:
        return self._length

    def build_model(self) -> nn.Module:
        return _built(self._from_config, self._config)

    def batch(self, indices: Sequence[int]) -> Batch:
        """{input_ids, targets}, both (B, L) int64."""
        bits = random_bits(self._seed, indices, 2)
        start, stride = bits[:, :1] % self._vocab, 1 + bits[:, 1:] % 8
        sequence = (start + stride * torch.arange(self._length + 1)) % self._vocab
        return {"input_ids": sequence[:, :-1].contiguous(), "targets": sequence[:, 1:].contiguous()}

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        assert isinstance(batch, dict)
        logits_BLV = model(input_ids=batch["input_ids"], use_cache=False).logits
        return F.cross_entropy(logits_BLV.flatten(0, 1).float(), batch["targets"].flatten())


class ImageClassificationTask:
    """Classification of random images, label and image tied by a shift of the mean."""

    def __init__(self, config: Any, from_config: Callable[..., Any], *, seed: int) -> None:
        size = getattr(config, "image_size", 224)
        self._size: tuple[int, int] = (size, size) if isinstance(size, int) else (size[0], size[1])
        self._channels = int(getattr(config, "num_channels", 3))
        self._classes = int(config.num_labels)
        self._config, self._from_config, self._seed = config, from_config, seed

    @property
    def tokens_per_sample(self) -> int:
        """Images per sample: 1, as the patches of an arbitrary model are not known."""
        return 1

    def build_model(self) -> nn.Module:
        return _built(self._from_config, self._config)

    def batch(self, indices: Sequence[int]) -> Batch:
        """{pixel_values (B, C, S, S) fp32, targets (B,) int64}."""
        labels = random_bits(self._seed, indices, 1, stream=1)[:, 0] % self._classes
        shape = (len(indices), self._channels, *self._size)
        noise = random_uniform(self._seed, indices, self._channels * self._size[0] * self._size[1]).view(shape)
        return {"pixel_values": noise - 0.5 + (labels.float() / self._classes).view(-1, 1, 1, 1), "targets": labels}

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        assert isinstance(batch, dict)
        return F.cross_entropy(model(pixel_values=batch["pixel_values"]).logits.float(), batch["targets"])
