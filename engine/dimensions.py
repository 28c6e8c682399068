"""A transformer's dimensions, read from the shapes that its operators and blocks compute with: names in a
configuration may mean anything, and a task of one's own has none."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_FUSED_ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu, _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_fused_attention_overrideable)
_SOFTMAX = (_aten._softmax, _aten._safe_softmax)


class DimensionReader(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads dimensions in a forward pass while it is entered. Those that were not seen are 0.

    Attributes:
        heads: of the first attention over a whole sequence, fused or written out.
        attention: "eager" where its matrix of scores is written out.
        hidden: elements of a token in what the first block returns.
        vocab: outputs per token that the loss is computed from.

    Args:
        blocks: of the model, which is not used again.
        samples: of the batch.
        tokens: of a sample; a loss of fewer rows is one of whole samples.
    """

    def __init__(self, blocks: Sequence[nn.Module], *, samples: int, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heads = self.hidden = self.vocab = 0
        self.attention: Literal["fused", "eager"] = "fused"
        self._samples, self._tokens = samples, tokens
        for block in blocks[:1]:
            block.register_forward_hook(self._read_block)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in _FUSED_ATTENTION and not self.heads:
            self.heads = args[0].shape[1]  # (samples, heads, length, width)
        elif packet in _SOFTMAX and not self.heads:
            self._read_scores(result.shape)
        elif packet is _aten._log_softmax and not self.vocab:
            outputs = result.shape[-1]
            # Losses of the next token leave one row of each sample out.
            if result.numel() // outputs >= self._samples * max(self._tokens - 1, 2):
                self.vocab = outputs
        return result

    def _read_scores(self, shape: torch.Size) -> None:
        """Of (samples, heads, length, length), or with the first two as one."""
        if len(shape) < 3 or shape[-1] != shape[-2]:
            return
        heads, rest = divmod(shape[:-2].numel(), self._samples)
        if not rest:
            self.heads, self.attention = heads, "eager"

    def _read_block(self, block: nn.Module, inputs: Any, output: Any) -> None:
        first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        if first is not None and first.dim() == 3:
            self.hidden = first.shape[-1]
