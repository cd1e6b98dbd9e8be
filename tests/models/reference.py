"""Both backbones once more, in float64 and as plain loops over images, windows and heads."""

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Parameters = dict[str, Tensor]


def forward(model: nn.Module, images: Tensor, *, swin: bool, num_heads, windows, tau, nu) -> Tensor:
    """Logits of a Swin or CSwin backbone from its parameters alone.

    `windows` holds (height, width) for Swin and stripe widths, or None, for CSwin; `nu=None` is
    the released code's form.
    """
    p = {name: tensor.double() for name, tensor in model.state_dict().items()}
    x = F.conv2d(images.double(), p["patch_embed.proj.weight"], p["patch_embed.proj.bias"], 4)
    x = center_norm(x.permute(0, 2, 3, 1), _part(p, "patch_embed.norm"))
    for stage in range(len(num_heads)):
        if stage > 0:
            x = _downsample(x, _part(p, f"stages.{stage}.downsample"), swin)
        index = 0
        while block := _part(p, f"stages.{stage}.blocks.{index}"):
            x = _block(x, block, swin, num_heads[stage], windows[stage], tau, nu)
            index += 1
    if swin:
        x = center_norm(x, _part(p, "norm"))
    return _linear(x.mean((1, 2)), _part(p, "head.fc"))


def center_norm(x: Tensor, p: Parameters) -> Tensor:
    d = x.shape[-1]
    matrix = d / (d - 1) * (torch.eye(d, dtype=x.dtype) - torch.full((d, d), 1 / d, dtype=x.dtype))
    return x @ (p["weight"][:, None] * matrix).T + p["bias"]


def window_attention(
    x: Tensor, p: Parameters, num_heads: int, window: tuple[int, int], tau: float, nu: float | None
) -> Tensor:
    cell = cell_side(x.shape[1], window[0]), cell_side(x.shape[2], window[1])
    row = torch.arange(cell[0]).repeat_interleave(cell[1])
    col = torch.arange(cell[1]).repeat(cell[0])
    offset = row[:, None] - row[None, :] + window[0] - 1, col[:, None] - col[None, :]
    index = offset[0] * (2 * window[1] - 1) + offset[1] + window[1] - 1
    bias = p["relative_position_bias_table"][index].permute(2, 0, 1)
    q, k, v = _linear(x, _part(p, "qkv")).chunk(3, -1)
    return _linear(_attend_in_cells(q, k, v, cell, num_heads, tau, nu, bias), _part(p, "proj"))


def stripe_attention(
    x: Tensor, p: Parameters, num_heads: int, split: int | None, tau: float, nu: float | None
) -> Tensor:
    _, height, width, dim = x.shape
    if split is None:
        cells = [(height, width)]
    else:
        cells = [(height, cell_side(width, split)), (cell_side(height, split), width)]
    heads, channels = num_heads // len(cells), dim // len(cells)
    q, k, v = _linear(x, _part(p, "qkv")).chunk(3, -1)
    outputs = []
    for branch, cell in enumerate(cells):
        mine = slice(branch * channels, (branch + 1) * channels)
        y = _attend_in_cells(q[..., mine], k[..., mine], v[..., mine], cell, heads, tau, nu)
        outputs.append(y + _lepe_in_cells(v[..., mine], cell, _part(p, f"lepe.{branch}")))
    y = torch.cat(outputs, -1)
    return _linear(y if nu is not None else y / heads**0.5, _part(p, "proj"))


def cell_side(size: int, largest: int) -> int:
    """The smallest side that needs no more cells than the largest allowed one."""
    counts = {side: len(range(0, size, side)) for side in range(1, largest + 1)}
    return min(side for side, count in counts.items() if count == counts[largest])


def _part(p: Parameters, prefix: str) -> Parameters:
    return {n.removeprefix(prefix + "."): t for n, t in p.items() if n.startswith(prefix + ".")}


def _linear(x: Tensor, p: Parameters) -> Tensor:
    y = x @ p["weight"].T
    return y + p["bias"] if "bias" in p else y


def _depthwise(x: Tensor, p: Parameters) -> Tensor:
    weight = p["weight"]
    y = F.conv2d(
        x.permute(0, 3, 1, 2), weight, p["bias"], padding=weight.shape[-1] // 2, groups=len(weight)
    )
    return y.permute(0, 2, 3, 1)


def _cells(x: Tensor, cell: tuple[int, int]):
    return product(range(len(x)), range(0, x.shape[1], cell[0]), range(0, x.shape[2], cell[1]))


def _cut(x: Tensor, image: int, top: int, left: int, cell: tuple[int, int]) -> Tensor:
    """One cell [h, w, C]; what lies beyond the map is zero."""
    inside = x[image, top : top + cell[0], left : left + cell[1]]
    cut = x.new_zeros(*cell, x.shape[-1])
    cut[: inside.shape[0], : inside.shape[1]] = inside
    return cut


def _attend_in_cells(q, k, v, cell, num_heads, tau, nu, bias=None) -> Tensor:
    out = torch.zeros_like(q)
    d = q.shape[-1] // num_heads
    for image, top, left in _cells(q, cell):
        for head in range(num_heads):
            mine = slice(head * d, (head + 1) * d)
            tokens = [_cut(t, image, top, left, cell)[..., mine].reshape(-1, d) for t in (q, k, v)]
            eps = 1e-6 if nu is None else 1e-2
            scores = tau * _unit(tokens[0], eps) @ _unit(tokens[1], eps).T
            if bias is not None:
                scores = scores + bias[head]
            values = tokens[2] if nu is None else nu * _unit(tokens[2], eps)
            y = (scores.softmax(-1) @ values).reshape(*cell, d)
            target = out[image, top : top + cell[0], left : left + cell[1], mine]
            target.copy_(y[: target.shape[0], : target.shape[1]])
    return out


def _lepe_in_cells(v: Tensor, cell: tuple[int, int], p: Parameters) -> Tensor:
    out = torch.zeros_like(v)
    for image, top, left in _cells(v, cell):
        y = _depthwise(_cut(v, image, top, left, cell)[None], p)[0]
        target = out[image, top : top + cell[0], left : left + cell[1]]
        target.copy_(y[: target.shape[0], : target.shape[1]])
    return out


def _unit(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


def _block(x, p: Parameters, swin: bool, num_heads, window, tau, nu) -> Tensor:
    y = F.gelu(_depthwise(x, _part(p, "conv1.branch.depthwise")))
    y = F.gelu(_linear(y, _part(p, "conv1.branch.pointwise")))
    x = x + p["conv1.residual_scale"] * y
    x = x + p["conv2.residual_scale"] * F.gelu(_depthwise(x, _part(p, "conv2.branch.depthwise")))
    attention = window_attention if swin else stripe_attention
    y = attention(x, _part(p, "attn.branch"), num_heads, window, tau, nu)
    x = x + p["attn.residual_scale"] * y
    if swin:
        x = center_norm(x, _part(p, "norm1"))
    y = _linear(F.gelu(_linear(x, _part(p, "mlp.branch.fc1"))), _part(p, "mlp.branch.fc2"))
    return center_norm(x + p["mlp.residual_scale"] * y, _part(p, "norm2"))


def _downsample(x: Tensor, p: Parameters, swin: bool) -> Tensor:
    batch, height, width, dim = x.shape
    padded = x.new_zeros(batch, height + height % 2, width + width % 2, dim)
    padded[:, :height, :width] = x
    if swin:
        neighbors = [padded[:, row::2, col::2] for col in (0, 1) for row in (0, 1)]
        return _linear(
            center_norm(torch.cat(neighbors, -1), _part(p, "norm")), _part(p, "reduction")
        )
    y = F.conv2d(padded.permute(0, 3, 1, 2), p["conv.weight"], p["conv.bias"], 2)
    return center_norm(y.permute(0, 2, 3, 1), _part(p, "norm"))
