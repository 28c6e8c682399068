"""The block that the bundled models repeat: a pre-norm transformer's."""

from torch import Tensor, nn
from torch.nn import functional as F


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each with its norm and residual. (B, L, H) -> (B, L, H).

    Args:
        linear: makes its layers.
    """

    def __init__(self, hidden: int, heads: int, *, causal: bool, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm_1 = nn.LayerNorm(hidden)
        self.qkv = linear(hidden, 3 * hidden)
        self.projection = linear(hidden, hidden)
        self.norm_2 = nn.LayerNorm(hidden)
        self.up = linear(hidden, 4 * hidden)
        self.down = linear(4 * hidden, hidden)

    def forward(self, x_BLH: Tensor) -> Tensor:
        x_BLH = x_BLH + self._attend(self.norm_1(x_BLH))
        out_BLH: Tensor = x_BLH + self.down(F.gelu(self.up(self.norm_2(x_BLH)), approximate="tanh"))
        return out_BLH

    def _attend(self, x_BLH: Tensor) -> Tensor:
        batch, length, hidden = x_BLH.shape
        qkv_BL3ND = self.qkv(x_BLH).view(batch, length, 3, self.heads, hidden // self.heads)
        q_BNLD, k_BNLD, v_BNLD = qkv_BL3ND.permute(2, 0, 3, 1, 4).unbind(0)
        out_BNLD = F.scaled_dot_product_attention(q_BNLD, k_BNLD, v_BNLD, is_causal=self.causal)
        out_BLH: Tensor = self.projection(out_BNLD.transpose(1, 2).reshape(batch, length, hidden))
        return out_BLH
