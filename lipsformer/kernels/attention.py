"""Attention on the CPU in training: gradients that keep less memory than PyTorch's."""

from typing import Any

import torch
from torch import Tensor

from lipsformer.kernels.dispatch import refuse_second_derivatives


def normalize_rows(x: Tensor, eps: float, length: Tensor | float) -> Tensor:
    """Return length * x / sqrt(|x|^2 + eps), keeping the result instead of the input.

    Args:
        x: [..., d].
        eps: Number above 0.
        length: A number, or a tensor that broadcasts over the tokens, such as [H, 1, 1].
    """
    return _NormalizeRows.apply(x, eps, length)


class _NormalizeRows(torch.autograd.Function):
    """Keep the result, which attention keeps as well, instead of the input.

    The gradient cannot be differentiated again, because `inverse` has no graph. In evaluation mode
    the plain operators can.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, length: Tensor | float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()
        y = x * (inverse * length)
        ctx.length = None if isinstance(length, Tensor) else length
        ctx.save_for_backward(y, inverse, *([length] if isinstance(length, Tensor) else []))
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives(*grad_outputs)
        y, inverse, *lengths = ctx.saved_tensors
        length = lengths[0] if lengths else ctx.length
        (grad,) = grad_outputs
        product = (grad * y).sum(dim=-1, keepdim=True)
        grad_x = grad * (inverse * length)
        grad_x.addcmul_(y, product * (inverse / length), value=-1.0)
        grad_length = (product / length).sum_to_size(length.shape) if lengths else None
        return grad_x, None, grad_length


def recomputed_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Return softmax(q k^T + bias) v and compute the weights again in the backward pass.

    PyTorch has no fused CPU kernel for a learnable bias. Without a bias its kernel is not faster
    on small windows, and it also stores the output.

    Args:
        q: Queries, [B, H, M, d], already scaled.
        k: Keys, [B, H, N, d].
        v: Values, [B, H, N, d].
        bias: Broadcastable to [B, H, M, N], or None.
    """
    return _RecomputedAttention.apply(q, k, v, bias)


class _RecomputedAttention(torch.autograd.Function):
    """Keep the queries, keys, values and the bias, and nothing of the size N x N."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        return _weights(q, k, bias) @ v

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        (grad,) = grad_outputs
        attn = _weights(q, k, bias)
        grad_attn = grad @ v.transpose(-2, -1)
        grad_scores = torch.ops.aten._softmax_backward_data(grad_attn, attn, -1, attn.dtype)
        return (
            grad_scores @ k,
            grad_scores.transpose(-2, -1) @ q,
            attn.transpose(-2, -1) @ grad,
            grad_scores.sum_to_size(bias.shape) if ctx.needs_input_grad[3] else None,
        )


def _weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    if bias is not None:
        scores += bias
    return scores.softmax(dim=-1)
