"""Parameters that are gathered when an operation reads them, wherever that is."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

Hold = Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]

_METADATA: frozenset[Any] = frozenset({
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf", "is_cuda",
        "is_cpu", "is_meta", "is_sparse", "is_quantized", "itemsize", "nbytes", "_version", "_backward_hooks",
        "_post_accumulate_grad_hooks")),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *(getattr(Tensor, name) for name in (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "__len__",
        "requires_grad_", "register_hook", "register_post_accumulate_grad_hook")),
    torch.is_floating_point, torch.is_complex, torch.numel,
})
"""What can be told of a parameter without its values."""

_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


class OnDemand:
    """Watches parameters: what reads a watched one runs inside of `hold`, where it has values.

    A watched parameter has a subclass of its own class, as torch's uninitialized ones have; while it is held it has its
    own again, so that reading it costs nothing, and compilers see what they know.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], hold: Hold) -> None:
        self._parameters, self._hold = frozenset(parameters), hold
        self._classes: dict[type, type] = {}
        self.watch(self._parameters)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            own = type(parameter)
            if _is_watched(parameter):
                continue
            if own not in self._classes:
                self._classes[own] = _watched(own, self._read)
            parameter.__class__ = self._classes[own]

    def unwatch(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if _is_watched(parameter):
                parameter.__class__ = type(parameter).__mro__[1]

    def close(self) -> None:
        self.unwatch(self._parameters)

    def _read(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watched = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if _is_watched(leaf)]
        self.unwatch(set(watched) - self._parameters)  # copies, which have values
        if _changes(function) and any(_is_watched(first) for first in args[:1]):
            raise RuntimeError("changing a parameter has no effect at zero_stage 3, where it is gathered from its "
                               "shards for every use: change it before initialize, or load a checkpoint")
        with self._hold([parameter for parameter in watched if parameter in self._parameters]):
            return function(*args, **kwargs)


def _watched(own: type, read: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> type:
    """A subclass that hands what is done with its values to `read`."""
    def run(cls: type, function: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None) -> Any:
        if function not in _METADATA:
            return read(function, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    return type(own)(own.__name__, (own,), {"__torch_function__": classmethod(run), "engine_watches": True,
                                            "__module__": own.__module__})


def _is_watched(value: Any) -> bool:
    return getattr(type(value), "engine_watches", False)


def _changes(function: Callable[..., Any]) -> bool:
    """Whether it changes its first argument, by torch's way of naming such functions."""
    name = getattr(function, "__name__", "")
    return function == _SET_DATA or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
