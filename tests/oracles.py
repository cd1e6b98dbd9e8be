"""Naive float64 references: loops and explicit matrices, written only from the formulas."""

import math

import torch
from torch import Tensor


def center_norm_matrix(weight: Tensor) -> Tensor:
    """diag(gain) d / (d - 1) (I - 11^T / d) as a [d, d] matrix in float64."""
    d = weight.numel()
    matrix = torch.empty(d, d, dtype=torch.float64)
    for row in range(d):
        for col in range(d):
            centring = (1.0 if row == col else 0.0) - 1.0 / d
            matrix[row, col] = weight[row].double() * d / (d - 1) * centring
    return matrix


def smooth_unit(x: Tensor, eps: float) -> list[float]:
    """x / sqrt(|x|^2 + eps) of one vector."""
    values = [float(value) for value in x]
    length = math.sqrt(sum(value * value for value in values) + eps)
    return [value / length for value in values]


def cosine_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    value_scale: float | None,
    eps: float,
) -> Tensor:
    """Scaled cosine attention of one head, [N, d] each, in plain Python loops."""
    num_tokens, head_dim = v.shape
    queries = [smooth_unit(row, eps) for row in q]
    keys = [smooth_unit(row, eps) for row in k]
    if value_scale is None:
        values = [[float(value) for value in row] for row in v]
    else:
        values = [[value_scale * value for value in smooth_unit(row, eps)] for row in v]
    out = torch.zeros(num_tokens, head_dim, dtype=torch.float64)
    for i in range(num_tokens):
        scores = []
        for j in range(num_tokens):
            cosine = sum(a * b for a, b in zip(queries[i], keys[j], strict=True))
            scores.append(logit_scale * cosine + (0.0 if bias is None else float(bias[i, j])))
        weights = [math.exp(score - max(scores)) for score in scores]
        for j in range(num_tokens):
            for c in range(head_dim):
                out[i, c] += weights[j] / sum(weights) * values[j][c]
    return out


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Zero-padded depthwise convolution of one map [H, W, C] with [C, 1, k, k], in loops."""
    height, width, channels = x.shape
    size = weight.shape[-1]
    out = bias.double().expand(height, width, channels).clone()
    for row in range(height):
        for col in range(width):
            for i in range(size):
                for j in range(size):
                    r, c = row + i - size // 2, col + j - size // 2
                    if 0 <= r < height and 0 <= c < width:
                        out[row, col] += weight[:, 0, i, j].double() * x[r, c].double()
    return out
