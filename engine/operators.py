"""What operators do and what they cost: the same classes counted in a task, on fake tensors, and timed on a device."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from engine.profile import OperatorClass

_aten = torch.ops.aten


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


_CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward}
"""The fused attention of the CPU, which torch's counters do not know. Shapes, not tensors."""

_LOOKUPS = (_aten.embedding, _aten.gather, _aten.index_select, _aten.index)
"""They read as much as they write, however large what they read from."""

_FREE = (_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided,
         _aten._unsafe_view)


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is entered, what the operators of each class do.

    Attributes:
        flops: floating-point operations; of products and attention alone.
        bytes: of operands and results, each once.
        kernels: operators that move anything.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: dict[OperatorClass, float] = dict.fromkeys(("product", "attention", "other"), 0.0)
        self.bytes = dict(self.flops)
        self.kernels = dict(self.flops)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        written = _bytes(tree_leaves(result))
        if written and not func.is_view and packet not in _FREE:
            self._count(packet, args, kwargs or {}, result, written)
        return result

    def _count(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, written: int
               ) -> None:
        moved = 2 * written if packet in _LOOKUPS else written + _bytes(tree_leaves((args, kwargs)))
        kind: OperatorClass = "other"
        if packet in _CPU_ATTENTION:
            kind = "attention"
            self.flops[kind] += _CPU_ATTENTION[packet](*(_shape(value) for value in args))
        elif packet in flop_registry:
            kind = "attention" if "attention" in str(packet) else "product"
            self.flops[kind] += flop_registry[packet](*args, **kwargs, out_val=result)
        self.bytes[kind] += moved
        self.kernels[kind] += 1


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else value


def _bytes(values: Iterable[Any]) -> int:
    """Of an expanded tensor, what there is of it."""
    return sum(min(value.numel() * value.element_size(), value.untyped_storage().nbytes())
               for value in values if isinstance(value, Tensor))
