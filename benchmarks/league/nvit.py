"""nViT: the normalized transformer (nGPT) on the body of the league.

Every token, and every vector of a weight along the channels of the tokens, has length 1.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.league.attention import DotProductAttention
from lipsformer.analysis.instruments import InstrumentBase
from lipsformer.layers import DepthwiseConv2d, Linear
from lipsformer.models.lipsformer_swin import WindowAttention


class UnitNorm(nn.Module):
    """Divide each token by its length."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` ([..., C])."""
        return F.normalize(x, dim=-1)


class Scale(nn.Module):
    r"""Learned factors whose learning rate does not depend on their size.

    .. math:: s = \hat s \cdot s_{init} / s_{scale}, \quad \hat s = s_{scale} \text{ at the start}

    with :math:`s_{scale} = 1 / \sqrt{d}`.
    """

    def __init__(self, number: int, dim: int, init: float = 1.0) -> None:
        """Create the factors.

        Args:
            number: Number of factors.
            dim: Number of channels d of the tokens.
            init: Their initial value.
        """
        super().__init__()
        self.factor = init * dim**0.5
        self.values = nn.Parameter(torch.full((number,), dim**-0.5))

    def forward(self) -> Tensor:
        """Return the factors."""
        return self.values * self.factor


class NormalizedAttention(DotProductAttention):
    r"""Attention with queries and keys of learned lengths.

    .. math:: \mathrm{softmax}(\sqrt{d}\, \tilde q \tilde k^T + B) v, \quad
        \tilde x = s_{qk} \odot x / |x|_2
    """

    def __init__(self, num_heads: int, head_dim: int, dim: int) -> None:
        """Create the scale.

        Args:
            num_heads: Number of heads H.
            head_dim: Number of channels d of a head.
            dim: Number of channels of a token.
        """
        super().__init__(num_heads)
        self.scale = Scale(head_dim, dim)

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k such that their plain products are the scores."""
        scale = self.scale()
        q, k = F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1) * scale
        return q * q.shape[-1] ** 0.5, k


class ScaledGelu(nn.Module):
    r"""GELU of inputs brought to the size of one: :math:`\mathrm{GELU}(\sqrt{d}\, s_u x)`."""

    def __init__(self, number: int, dim: int) -> None:
        """Create the scale.

        Args:
            number: Number of inputs.
            dim: Number of channels d of a token.
        """
        super().__init__()
        self.scale = Scale(number, dim)
        self.factor = dim**0.5

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to `x` ([..., number])."""
        return F.gelu(x * (self.scale() * self.factor))


class NormalizedBlock(nn.Module):
    r"""The four branches of a LipsFormer block, joined on the sphere.

    .. math:: h \leftarrow \mathrm{Norm}(h + a \odot (\mathrm{Norm}(f(h)) - h))

    Shape: [B, H, W, C] to the same.
    """

    def __init__(self, dim: int, attention: nn.Module, alpha: float) -> None:
        """Create the branches.

        Args:
            dim: Number of channels C.
            attention: Attention on [B, H, W, C], projections included.
            alpha: Initial value of the step a of every branch.
        """
        super().__init__()
        self.conv1 = nn.Sequential(
            DepthwiseConv2d(dim, 7), Linear(dim, dim, bias=False), ScaledGelu(dim, dim)
        )
        self.conv2 = nn.Sequential(DepthwiseConv2d(dim, 7), ScaledGelu(dim, dim))
        self.attn = attention
        self.mlp = nn.Sequential(
            Linear(dim, 4 * dim, bias=False),
            ScaledGelu(4 * dim, dim),
            Linear(4 * dim, dim, bias=False),
        )
        self.steps = nn.ModuleList([Scale(dim, dim, alpha) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to `x` ([B, H, W, C])."""
        branches = (self.conv1, self.conv2, self.attn, self.mlp)
        for branch, step in zip(branches, self.steps, strict=True):
            x = F.normalize(torch.lerp(x, F.normalize(branch(x), dim=-1), step()), dim=-1)
        return x


class NormalizedClassifier(nn.Module):
    """Classify by cosines, times a learned factor per class that starts at 1."""

    def __init__(self, dim: int, num_classes: int) -> None:
        """Create the weight.

        Args:
            dim: Number of channels C.
            num_classes: Number of classes.
        """
        super().__init__()
        self.fc = Linear(dim, num_classes, bias=False)
        self.scale = Scale(num_classes, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of `x` ([B, C])."""
        return self.fc(x) * self.scale()


def make_normalized(model: Any, blocks: int) -> None:
    """Turn a LipsFormer-Swin into a normalized transformer, in place.

    The paper's step a is 0.05 at 24 layers, "in the order of 1 / number of layers"; here it is 1 /
    number of branches. There are no biases, no weight decay and no norms with parameters.

    Deviations: all heads of an attention share s_qk, where the paper has one vector per head. The
    s_scale of s_u is 1 / sqrt(d), where the paper has 1, so the effective learning rate of s_u is
    sqrt(d) times the paper's. GELU takes the place of SwiGLU, because it is that of the body.

    Args:
        model: The model.
        blocks: Number of its blocks.

    Reference:
        Loshchilov et al. 2024, "nGPT: Normalized Transformer with Representation Learning on the
        Hypersphere", arXiv:2410.01131.
    """
    model.patch_embed.norm = UnitNorm()
    for stage in model.stages:
        attentions = [m for m in stage.blocks.modules() if isinstance(m, WindowAttention)]
        for attention in attentions:
            dim, heads = attention.dim, attention.num_heads
            attention.attention = NormalizedAttention(heads, dim // heads, dim)
            for layer in (attention.qkv, attention.proj):
                layer.register_parameter("bias", None)
        made = [NormalizedBlock(a.dim, a, 1.0 / (4 * blocks)) for a in attentions]
        stage.blocks = nn.Sequential(*made)
        if not isinstance(stage.downsample, nn.Identity):
            stage.downsample.norm = UnitNorm()
            stage.downsample = nn.Sequential(stage.downsample, UnitNorm())
    model.norm = nn.Identity()
    model.head.fc = NormalizedClassifier(model.num_features, model.num_classes)
    for module in model.modules():
        if isinstance(module, (DepthwiseConv2d, nn.Conv2d)) and module.bias is not None:
            nn.init.zeros_(module.bias).requires_grad_(False)
    NormalizeWeights(model).after_step(0)


class NormalizeWeights(InstrumentBase):
    """Bring every vector of the weights along the tokens' channels back to length 1.

    These are the rows of a weight that reads tokens and the columns of one that writes them: the
    output projections of attention and MLP. A depthwise kernel counts as one vector per channel.
    """

    def __init__(self, model: nn.Module) -> None:
        """Sort the weights.

        Args:
            model: Made by `make_normalized`.
        """
        writing: list[Any] = [m.proj for m in model.modules() if isinstance(m, WindowAttention)]
        writing += [m.mlp[2] for m in model.modules() if isinstance(m, NormalizedBlock)]
        self.columns: list[Tensor] = [layer.weight for layer in writing]
        self.rows: list[Any] = [
            layer.weight
            for layer in model.modules()
            if isinstance(layer, (nn.Linear, nn.Conv2d, DepthwiseConv2d)) and layer not in writing
        ]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Normalize the weights.

        Args:
            step: Number of steps made before the one that just ended.
        """
        for weight in self.columns:
            weight.copy_(F.normalize(weight, dim=0))
        for weight in self.rows:
            weight.copy_(F.normalize(weight.flatten(1), dim=1).view_as(weight))
