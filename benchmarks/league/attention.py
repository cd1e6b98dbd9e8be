"""Dot-product attention, plain and with normalized queries and keys."""

import torch.nn.functional as F
from torch import Tensor, nn


class DotProductAttention(nn.Module):
    r"""Attend with dot products, in the place of `ScaledCosineAttention`.

    .. math:: \mathrm{softmax}(q k^T / \sqrt{d} + B) v

    Shape:
        q, k, v: [B, H, N, d]; bias: broadcastable to [B, H, N, N]; output [B, H, N, d].
    """

    def __init__(self, num_heads: int) -> None:
        """Keep the number of heads, by which the windows are cut.

        Args:
            num_heads: Number of heads H.
        """
        super().__init__()
        self.num_heads = num_heads

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k such that their plain products are the scores."""
        return q * q.shape[-1] ** -0.5, k

    def scores(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Return what the softmax is taken of, [B, H, N, N]; the values do not enter."""
        q, k = self.normalize(q, k)
        return q @ k.mT + bias

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend with queries `q`, keys `k` and values `v`, adding `bias` to the scores."""
        q, k = self.normalize(q, k)
        return F.scaled_dot_product_attention(q, k, v, bias, scale=1.0)


class QKNormAttention(DotProductAttention):
    r"""Dot-product attention whose queries and keys pass through a LayerNorm over each head.

    .. math:: \mathrm{softmax}(LN(q) LN(k)^T / \sqrt{d} + B) v

    Deviation: the norms have biases, which Dehghani et al. omit.

    Reference:
        Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters",
        arXiv:2302.05442; Wortsman et al. 2023, arXiv:2309.14322.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        """Create the two norms, which all heads share.

        Args:
            num_heads: Number of heads H.
            head_dim: Number of channels d of a head.
        """
        super().__init__(num_heads)
        self.q_norm = nn.LayerNorm(head_dim)
        self.k_norm = nn.LayerNorm(head_dim)

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k such that their plain products are the scores."""
        return super().normalize(self.q_norm(q), self.k_norm(k))
