"""The layers of a LipsFormer on balls around their inputs at the images of a batch.

Theorems 27 and 28 of docs/theorems.md bound their Jacobians, and how far these change in a ball.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer.analysis.bounds import UnknownModuleError, require_unchanged
from lipsformer.analysis.bounds.layers import GELU_BOUND, depthwise_sigma_bounds
from lipsformer.analysis.conv_norms import depthwise_operator
from lipsformer.analysis.local_attention import LocalAttention
from lipsformer.analysis.local_norms import (
    gram_sigma_bound,
    largest_sigma_bound,
    probed_sigma_bound,
)
from lipsformer.layers import (
    CenterNorm,
    DepthwiseConv2d,
    Linear,
    ScaledCosineAttention,
    WeightedResidual,
    partition_heads,
)
from lipsformer.models.embed import PatchConv2d, PatchEmbed
from lipsformer.models.lipsformer import ConvBranch, LipsFormerBlock, Mlp
from lipsformer.models.lipsformer_cswin import ConvMerging, StripeAttention
from lipsformer.models.lipsformer_swin import PatchMerging, WindowAttention

GELU_CURVATURE = math.sqrt(2.0 / math.pi)  # the largest |GELU''|, at 0
GELU_RANGE = 2.0 * GELU_BOUND - 1.0  # GELU' lies between 1 - GELU_BOUND and GELU_BOUND
MAX_WRITTEN_OUT_TOKENS = 256  # up to this size a depthwise convolution is written out


@dataclass(frozen=True)
class Layer:
    """A layer at the images of a batch.

    Attributes:
        function: The layer.
        output: Its output at the images.
        norm: Bound of its Jacobian at the images, [B].
        drift: Bounds, for inputs within a radius [B], how far the mean of the Jacobian over the way
            from the image is from the Jacobian at the image, [B].
        widest: Bound of its Jacobian anywhere, [B].

    Example:
        >>> import torch
        >>> from lipsformer.analysis.local_layers import linear_layer
        >>> x, matrix = torch.ones(1, 2, dtype=torch.float64), torch.diag(torch.tensor([3.0, 2.0]))
        >>> layer = linear_layer(lambda x: x @ matrix.double(), x, matrix.double())
        >>> f"{layer.norm.item():.3f}"
        '3.000'
    """

    function: Callable[[Tensor], Tensor]
    output: Tensor
    norm: Tensor
    drift: Callable[[Tensor], Tensor]
    widest: Tensor


def linear_layer(function: Callable[[Tensor], Tensor], x: Tensor, matrix: Tensor) -> Layer:
    """Return an affine layer whose norm is that of a matrix."""
    norm = gram_sigma_bound(matrix).expand(len(x))
    return Layer(function, function(x), norm, torch.zeros_like, norm)


def gelu_slope(x: Tensor) -> Tensor:
    r"""Return :math:`GELU'(x) = \Phi(x) + x \varphi(x)`."""
    distribution = 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    return distribution + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def norm_matrix(norm: nn.Module, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix of CenterNorm, [C, C]; the identity for `nn.Identity`."""
    eye = torch.eye(dim, dtype=dtype)
    require_unchanged(norm, CenterNorm, nn.Identity)
    if isinstance(norm, CenterNorm):
        return norm.weight[:, None] * (eye - 1.0 / dim) * (dim / (dim - 1))
    return eye


def patch_matrix(conv: Any) -> Tensor:
    """Return the matrix of a convolution of patches that do not overlap.

    Raises:
        UnknownModuleError: If the patches overlap or are padded, or the channels are grouped.
    """
    require_unchanged(conv, nn.Conv2d, PatchConv2d)
    if conv.stride != conv.weight.shape[2:] or conv.padding != (0, 0) or conv.groups != 1:
        raise UnknownModuleError(f"no local bound is known for {conv}: use patches side by side")
    return conv.weight.flatten(1)


def mlp_layer(residual: Any, norm: nn.Module, x: Tensor) -> Layer:
    """Return norm(x + alpha mlp(x)), which acts token by token."""
    mlp = residual.branch
    require_unchanged(mlp, Mlp)
    require_unchanged(mlp.fc1, Linear)
    first, last = mlp.fc1.weight, residual.residual_scale[:, None] * mlp.fc2.weight
    outer = norm_matrix(norm, len(last), x.dtype)
    last = outer @ last
    slopes = gelu_slope(mlp.fc1(x))
    center = gram_sigma_bound(outer + (slopes[..., None, :] * last) @ first).flatten(1).amax(1)
    rows = first.norm(dim=1)
    curved = 0.5 * GELU_CURVATURE * gram_sigma_bound(last * rows) * gram_sigma_bound(first)
    widest = gram_sigma_bound(outer) + GELU_BOUND * gram_sigma_bound(last) * gram_sigma_bound(first)
    apart = GELU_RANGE * gram_sigma_bound(last) * gram_sigma_bound(first)
    function = nn.Sequential(residual, norm)
    return Layer(
        function,
        function(x),
        center,
        lambda radius: torch.minimum(curved * radius, apart),
        widest.expand(len(x)),
    )


def conv_layer(residual: Any, x: Tensor) -> Layer:
    """Return x + alpha GELU(W GELU(w * x)), or without the pointwise W."""
    branch, alpha = residual.branch, residual.residual_scale
    require_unchanged(branch, ConvBranch)
    require_unchanged(branch.depthwise, DepthwiseConv2d)
    kernel, size = branch.depthwise.weight, (x.shape[1], x.shape[2])
    sigma = depthwise_sigma_bounds(kernel, size)
    reach = kernel.flatten(1).norm(dim=1)  # an output moves by at most this times the radius
    hidden = branch.depthwise(x)
    first = gelu_slope(hidden)
    if branch.pointwise is None:
        above = 1.0 + (alpha * first * sigma).abs().flatten(1, 2).amax(1)
        if math.prod(size) <= MAX_WRITTEN_OUT_TOKENS:  # every channel on its own
            operator = depthwise_operator(kernel, size)
            eye, items = torch.eye(operator.shape[-1], dtype=x.dtype), torch.arange(len(x))
            scale = (alpha * first).flatten(1, 2).mT[..., None, :]
            norm = largest_sigma_bound(lambda c: eye + scale[items, c] * operator[c], above)
        else:
            norm = above.amax(1)
        curved = GELU_CURVATURE * (alpha * reach * sigma).abs().max()
        widest = GELU_BOUND * (alpha * sigma).abs().max()
    else:
        weight = branch.pointwise.weight
        second = gelu_slope(branch.pointwise(nn.functional.gelu(hidden)))
        product = (alpha * second)[..., :, None] * weight * (first * sigma)[..., None, :]
        norm = 1.0 + gram_sigma_bound(product).flatten(1).amax(1)
        scaled = alpha[:, None] * weight
        rows = weight.norm(dim=1, keepdim=True)
        curved = (GELU_BOUND * GELU_CURVATURE) * (
            GELU_BOUND * reach.max() * gram_sigma_bound(rows * scaled * sigma)
            + gram_sigma_bound(scaled * (reach * sigma))
        )
        widest = GELU_BOUND**2 * gram_sigma_bound(scaled * sigma)
    return Layer(
        residual,
        residual(x),
        norm,
        lambda radius: 0.5 * curved * radius,
        (1.0 + widest).expand(len(x)),
    )


def attention_layer(
    residual: Any, norm: nn.Module, x: Tensor, probed: Tensor | None = None
) -> Layer:
    """Return norm(x + alpha attention(x)).

    Args:
        residual: The attention.
        norm: What follows it.
        x: [B, H, W, C].
        probed: Bound of the Jacobian, [B]; None to write it out, head by head.
    """
    attn = residual.branch
    require_unchanged(attn, WindowAttention, StripeAttention)
    batch, height, width, dim = x.shape
    windows, cores, bias, lepes = attn.arrangement(height, width)
    fused = attn.qkv(x).unflatten(-1, (3, len(cores), dim // len(cores)))
    weights = attn.qkv.weight.unflatten(0, (3, len(cores), -1))
    ones = torch.ones(batch, height, width, 1, 1, dtype=x.dtype)
    parts: list[LocalAttention] = []
    everywhere: list[Tensor] = []
    for i, (core, window) in enumerate(zip(cores, windows, strict=True)):
        lepe = lepes[i].weight if len(lepes) > 0 else None
        if not isinstance(core, ScaledCosineAttention):
            raise UnknownModuleError(f"no local bound is known for {type(core).__name__}")
        scales = [torch.as_tensor(x) for x in (core.tau(), core.value_scale) if x is not None]
        if any(scale.min() <= 0.0 for scale in scales):
            raise UnknownModuleError("no local bound is known for scales that are not above 0")
        cut = partition_heads(fused[..., i, :], window, core.num_heads)
        real = partition_heads(ones, window, 1)[0, :, :, :, 0]
        heads = weights[:, i].unflatten(1, (core.num_heads, -1))  # [3, H, d, C]
        local = LocalAttention(core, cut, bias, real, heads, lepe, window, probed is None)
        parts.append(local)
        values = torch.zeros_like(local.tau)
        if lepe is not None:
            sigma = depthwise_sigma_bounds(lepe, window).unflatten(0, (core.num_heads, -1))
            values = sigma.amax(1) * local.sigma[2]
        everywhere.append(local.widest() + values)
    outer = norm_matrix(norm, dim, x.dtype)
    alpha = residual.residual_scale[:, None]
    factor = abs(attn.attn_factor) if isinstance(attn, StripeAttention) else 1.0
    behind = factor * gram_sigma_bound(outer @ (alpha * attn.proj.weight))
    straight = gram_sigma_bound(outer)

    def heads_together(bounds: list[Tensor]) -> Tensor:
        """Bound all heads by the root of the sum of squares of the worst windows, [B]."""
        worst = [b.unflatten(0, (batch, -1)).amax(1) for b in bounds]
        return behind * torch.cat(worst, 1).norm(dim=1)

    def drift(radius: Tensor) -> Tensor:
        each = [radius.repeat_interleave(len(p.norm) // batch)[:, None] for p in parts]
        curved = [p.curvature(r) for p, r in zip(parts, each, strict=True)]
        return 0.5 * radius * heads_together(curved)

    function = nn.Sequential(residual, norm)
    return Layer(
        function,
        function(x),
        straight + heads_together([p.norm for p in parts]) if probed is None else probed,
        drift,
        (straight + behind * torch.cat(everywhere).norm()).expand(batch),
    )


class WrittenOut(DepthwiseConv2d):
    """A depthwise convolution as one matrix per channel.

    The matrices of small maps are faster than the convolution, which autograd differentiates
    twice in a loop over the channels.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.local_layers import WrittenOut
        >>> from lipsformer.layers import DepthwiseConv2d
        >>> conv, x = DepthwiseConv2d(3, 7), torch.randn(2, 5, 11, 3)
        >>> torch.allclose(WrittenOut(conv)(x), conv(x), atol=1e-5)
        True
    """

    def __init__(self, conv: DepthwiseConv2d) -> None:
        """Share the parameters of the convolution."""
        super().__init__(conv.dim, conv.weight.shape[-1])
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x: Tensor) -> Tensor:
        """Convolve `x` ([B, H, W, C])."""
        size = (x.shape[1], x.shape[2])
        if math.prod(size) > MAX_WRITTEN_OUT_TOKENS:
            return super().forward(x)
        operator = depthwise_operator(self.weight, size)
        convolved = torch.einsum("cji,bjc->bic", operator, x.flatten(1, 2)) + self.bias
        return convolved.unflatten(1, size)


def written_out(model: Any) -> Any:
    """Replace all depthwise convolutions of a model by matrices."""
    for name, module in list(model.named_modules()):
        if isinstance(module, DepthwiseConv2d):
            model.set_submodule(name, WrittenOut(module))
    return model


def block_layers(
    block: LipsFormerBlock, x: Tensor, single: Any = None, failure: float = 0.0
) -> list[Layer]:
    """Return the four layers of a block.

    Args:
        block: The block, float64.
        x: [B, H, W, C].
        single: The same block in float32, to probe the attention; None to write it out.
        failure: Probability that the norm of the attention is wrong.
    """
    for residual in (block.conv1, block.conv2, block.attn, block.mlp):
        require_unchanged(residual, WeightedResidual)
    first = conv_layer(block.conv1, x)
    second = conv_layer(block.conv2, first.output)
    probed = None
    if single is not None:
        attended = nn.Sequential(single.attn, single.norm1)
        probed = probed_sigma_bound(attended, second.output.float(), failure).double()
    third = attention_layer(block.attn, block.norm1, second.output, probed)
    return [first, second, third, mlp_layer(block.mlp, block.norm2, third.output)]


class Pooling(nn.Module):
    """The last norm, and the average over all tokens.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.local_layers import Pooling
        >>> Pooling(torch.nn.Identity())(torch.ones(1, 2, 3, 5)).shape
        torch.Size([1, 5])
    """

    def __init__(self, norm: nn.Module) -> None:
        """Keep the norm."""
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Turn `x` ([B, H, W, C]) into [B, C]."""
        return self.norm(x).mean((1, 2))


def layers_of(module: Any, x: Tensor, single: Any = None, failure: float = 0.0) -> list[Layer]:
    """Return the layers of a part of a LipsFormer around its inputs.

    Args:
        module: The part, float64.
        x: [B, ...].
        single: The same part in float32, to probe the attention of a block; None for no probes.
        failure: Probability that the norm of the attention is wrong.

    Raises:
        UnknownModuleError: If no local bound of the part is known.
    """
    kinds = (LipsFormerBlock, Pooling, PatchMerging, PatchEmbed, ConvMerging)
    if not isinstance(module, kinds):
        raise UnknownModuleError(f"no local bound is known for {type(module).__name__}")
    require_unchanged(module, *kinds)
    if isinstance(module, LipsFormerBlock):
        return block_layers(module, x, single, failure)
    if isinstance(module, Pooling):
        matrix = norm_matrix(module.norm, x.shape[-1], x.dtype)
        return [linear_layer(module, x, matrix / (x.shape[1] * x.shape[2]) ** 0.5)]
    if isinstance(module, PatchMerging):
        require_unchanged(module.reduction, Linear)
        weight = module.reduction.weight
        matrix = weight @ norm_matrix(module.norm, weight.shape[1], x.dtype)
        return [linear_layer(module, x, matrix)]
    weight = patch_matrix(module.proj if isinstance(module, PatchEmbed) else module.conv)
    matrix = norm_matrix(module.norm, len(weight), x.dtype) @ weight
    return [linear_layer(module, x, matrix)]
