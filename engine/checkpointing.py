"""Activation checkpointing and compilation of blocks, by wrapping their forward."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar, Token
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from engine.config import TrainConfig
from engine.errors import ConfigurationError

Forward = Callable[..., Any]

_ATEN = torch.ops.aten

_PRODUCTS = frozenset({
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.convolution.default,
    _ATEN._grouped_mm.default,
})
"""Products with weights: dear to compute, their results small."""

_FUSED_ATTENTION = frozenset({
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
})
"""Attention whose scores never reach memory. What it leaves is as small as a product's result, while computing it again
grows with the square of the sequence. Attention in single operators, which leaves scores, is recomputed."""

_REPLACED = "_forward_before_engine"
"""Key in a module's dictionary of the forward that its instance had; None where it had its class's."""

_DROPOUT = {operator: [argument.name for argument in operator._schema.arguments].index("dropout_p")
            for operator in _FUSED_ATTENTION}
"""Where attention takes its dropout."""


def require_wrappable(blocks: Sequence[nn.Module], config: TrainConfig) -> None:
    """Check that what is configured for blocks can be done.

    Raises:
        ConfigurationError: there are no blocks.
    """
    if not blocks and (config.compile or config.activation_checkpointing != "none"):
        field = "compile" if config.compile else "activation_checkpointing"
        raise ConfigurationError(f"{field} works by repeated blocks and none were found in the model; pass "
                                 "blocks=[...] to initialize, or turn it off", fields=(field,))


def wrap_inside(blocks: Sequence[nn.Module], config: TrainConfig) -> None:
    """Compile the blocks where configured, and keep what selective checkpointing keeps; before the stage wraps them.

    Both see single operators, which must be the block's own, none of the stage's. A compiled block recomputes by
    itself: the compiler traces checkpointing with it.
    """
    for block in blocks:
        forward = block.forward
        if config.activation_checkpointing == "selective":
            forward = _checkpointed(forward, context_fn=_COMPILED_SELECTION) if config.compile else _selecting(forward)
        if config.compile:
            forward = torch.compile(forward)
        set_forward(block, forward)


def wrap_outside(blocks: Sequence[nn.Module], config: TrainConfig) -> None:
    """Checkpoint the blocks where configured; after the stage wrapped them, so that recomputing gathers again."""
    if config.activation_checkpointing == "full":
        options: dict[str, Any] = {}
    elif config.activation_checkpointing == "selective" and not config.compile:
        options = {"context_fn": _selection_contexts}
    else:
        return
    for block in blocks:
        set_forward(block, _checkpointed(block.forward, **options))


def set_forward(module: nn.Module, forward: Forward) -> None:
    """Replace a module's forward on this instance."""
    module.__dict__.setdefault(_REPLACED, module.__dict__.get("forward"))
    module.forward = forward


def unwrap(modules: Iterable[nn.Module]) -> None:
    """Give modules back the forward that they had: their class's, or one of their own."""
    for module in modules:
        if _REPLACED in module.__dict__:
            own = module.__dict__.pop(_REPLACED)
            del module.forward
            if own is not None:
                module.forward = own


def _checkpointed(forward: Forward, **options: Any) -> Forward:
    @wraps(forward)
    def run(*inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **keywords)

        def again(*values: Any) -> Any:
            return forward(*values[:len(inputs)], **dict(zip(keywords, values[len(inputs):], strict=True)))

        # All by position: checkpoint takes keywords for itself, and keeps only what comes by position as autograd does.
        return checkpoint(again, *inputs, *keywords.values(), use_reentrant=False, **options)

    return run


# Selective: the block runs again, but for what was kept of its first run.

_COMPILED_SELECTION = partial(create_selective_checkpoint_contexts, [*_PRODUCTS, *_FUSED_ATTENTION])

_offered: ContextVar[TorchDispatchMode | None] = ContextVar("_offered", default=None)
"""What the next selecting forward in this thread is to run in."""


class _Result:
    """What an operator returned, apart from the graph that it became part of."""

    def __init__(self, value: Any) -> None:
        self._value = _detached(value)
        self._versions = self._present_versions()

    def again(self) -> Any | None:
        """The value, None where it was changed in place since."""
        return _detached(self._value) if self._present_versions() == self._versions else None

    def _present_versions(self) -> list[int]:
        return [part._version for part in _parts(self._value) if isinstance(part, Tensor)]


class _Selection:
    """The results of dear operators in one run of a block, by operator in the order of its calls."""

    def __init__(self) -> None:
        self._results: dict[Any, list[_Result]] = defaultdict(list)

    def keeping(self) -> TorchDispatchMode:
        """For the first run."""
        def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = operator(*args, **kwargs)
            if _is_kept(operator, args):
                self._results[operator].append(_Result(value))
            return value

        return _OperatorMode(run)

    def reusing(self) -> TorchDispatchMode:
        """For a run in backward, of which there are several where the graph is retained."""
        rest = {operator: iter(results) for operator, results in self._results.items()}

        def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = next(rest.get(operator, _NOTHING), None) if _is_kept(operator, args) else None
            value = None if result is None else result.again()
            return operator(*args, **kwargs) if value is None else value

        return _OperatorMode(run)


_NOTHING: Iterator[_Result] = iter(())


class _OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators through a function."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What a model compiles by itself stays compiled, and is recomputed."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._run(func, args, kwargs or {})


class _Offering:
    """Inside, the forward that selects runs in a mode of this kind."""

    def __init__(self, make_mode: Callable[[], TorchDispatchMode]) -> None:
        self._make_mode = make_mode

    def __enter__(self) -> None:
        self._token: Token[TorchDispatchMode | None] = _offered.set(self._make_mode())

    def __exit__(self, *_: object) -> None:
        _offered.reset(self._token)


def _selection_contexts() -> tuple[_Offering, _Offering]:
    selection = _Selection()
    return _Offering(selection.keeping), _Offering(selection.reusing)


def _selecting(forward: Forward) -> Forward:
    @wraps(forward)
    def run(*inputs: Any, **keywords: Any) -> Any:
        mode = _offered.get()
        if mode is None:
            return forward(*inputs, **keywords)
        token = _offered.set(None)
        try:
            with mode:
                return forward(*inputs, **keywords)
        finally:
            _offered.reset(token)

    return run


def _is_kept(operator: Any, args: Sequence[Any]) -> bool:
    """Not where it drops out: then random numbers that follow would be others when it is left out."""
    if operator in _PRODUCTS:
        return True
    place = _DROPOUT.get(operator)
    return place is not None and (len(args) <= place or not args[place])


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


def _detached(value: Any) -> Any:
    """Views that share memory and version with the tensors in it."""
    if isinstance(value, tuple):
        return tuple(_detached(part) for part in value)
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()
