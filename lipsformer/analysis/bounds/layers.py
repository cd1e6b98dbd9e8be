"""Bounds of single layers of PyTorch, timm and this project. Proofs: docs/lipschitz.md."""

import math
from typing import Any

from timm.layers import ClassifierHead, DropPath, LayerScale, Mlp, SelectAdaptivePool2d
from torch import Tensor, nn

from lipsformer.analysis.bounds.core import (
    Bound,
    Domain,
    UnknownModuleError,
    bound_rule,
    chain,
    children_in_order,
    max_abs,
    simple_bound,
)
from lipsformer.layers import CenterNorm, DepthwiseConv2d, Linear, largest_singular_value
from lipsformer.layers.spectral import conv_sigma_bound, depthwise_sigma

# The largest derivative of GELU(x) = x Phi(x), which is Phi(x) + x phi(x) at x = sqrt(2).
GELU_BOUND = 0.5 * (1.0 + math.erf(1.0)) + math.exp(-1.0) / math.sqrt(math.pi)

# On maps of at most this many tokens a depthwise convolution is cheap to write out as a matrix.
MAX_DENSE_TOKENS = 64


def center_norm_sigma(weight: Tensor) -> float:
    r"""Return the exact 2-norm of CenterNorm, :math:`\sigma_{max}(diag(g) d/(d-1) (I - 11^T/d))`.

    Without the factor d/(d-1), the square of the norm is the largest root of
    :math:`\sum_i 1 / (g_i^2 - \lambda) = 0`. The root lies between the two largest :math:`g_i^2`.
    Bisection from above finds it in O(d).

    Args:
        weight: The gain g, [d].
    """
    squares = weight.detach().double().cpu().square().sort(descending=True).values
    dim = len(squares)
    high, low = squares[0].item(), squares[1].item()
    for _ in range(60):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if (1.0 / (squares - middle)).sum() > 0.0:
            high = middle
        else:
            low = middle
    return dim / (dim - 1) * math.sqrt(high)


def linear_sigma(weight: Tensor, scale: Tensor | None = None) -> float:
    """Return the largest singular value of diag(scale) W in double precision.

    Args:
        weight: W, [out, in, ...], which is reshaped to [out, in * ...].
        scale: [out]; None for ones.
    """
    matrix = weight.detach().double().flatten(1)
    if scale is not None:
        matrix = scale.detach().double().unsqueeze(1) * matrix
    return largest_singular_value(matrix).item()


def bias_norm(bias: Tensor | None, scale: Tensor | None = None) -> float:
    """Return the 2-norm of diag(scale) b, which is 0 without a bias."""
    if bias is None:
        return 0.0
    return (bias.detach() if scale is None else bias.detach() * scale.detach()).norm().item()


@bound_rule(nn.Identity, nn.Dropout, nn.ReLU, DropPath)
def _nonexpansive(module: nn.Module, domain: Domain, scale: Tensor | None) -> Bound:
    return simple_bound(max_abs(scale), domain, radius=max_abs(scale) * domain.radius)


@bound_rule(LayerScale)
def _layer_scale(module: LayerScale, domain: Domain, scale: Tensor | None) -> Bound:
    value = max_abs(module.gamma if scale is None else module.gamma * scale)
    return simple_bound(value, domain, radius=value * domain.radius)


@bound_rule(nn.Sequential)
def _sequential(module: nn.Module, domain: Domain, scale: Tensor | None) -> Bound:
    return chain(module.named_children(), domain, scale)


@bound_rule(nn.GELU)
def _gelu(module: nn.GELU, domain: Domain, scale: Tensor | None) -> Bound:
    if module.approximate != "none":
        raise UnknownModuleError(
            f"no Lipschitz bound is known for GELU(approximate={module.approximate!r}): use the "
            "exact form"
        )
    # The radius follows from |GELU(x)| <= |x|.
    return simple_bound(GELU_BOUND * max_abs(scale), domain, radius=max_abs(scale) * domain.radius)


@bound_rule(nn.Linear, Linear)
def _linear(module: nn.Linear, domain: Domain, scale: Tensor | None) -> Bound:
    sigma = linear_sigma(module.weight, scale)
    return simple_bound(sigma, domain, radius=sigma * domain.radius + bias_norm(module.bias, scale))


@bound_rule(CenterNorm)
def _center_norm(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    gain = module.weight if scale is None else module.weight * scale
    sigma = center_norm_sigma(gain)
    return simple_bound(sigma, domain, radius=sigma * domain.radius + bias_norm(module.bias, scale))


@bound_rule(DepthwiseConv2d)
def _depthwise(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    sigma = depthwise_channel_sigma(module.weight, (domain.size[0], domain.size[1]))
    if scale is not None:
        sigma = sigma * scale.detach().double().abs()
    radius = depthwise_radius(module.weight, domain.radius, scale)
    return simple_bound(sigma.max().item(), domain, radius=radius + bias_norm(module.bias, scale))


def depthwise_channel_sigma(weight: Tensor, size: tuple[int, int]) -> Tensor:
    """Bound the norm of the convolution of each channel. The bound is exact on small maps.

    Args:
        weight: [C, 1, k, k], of a convolution with zero padding k // 2.
        size: (H, W) of the map.

    Returns:
        [C], float64.
    """
    weight = weight.detach().double()
    if math.prod(size) <= MAX_DENSE_TOKENS:
        return depthwise_sigma(weight, size)
    return conv_sigma_bound(weight, groups=len(weight), oversampling=16)


def depthwise_radius(weight: Tensor, radius: float, scale: Tensor | None = None) -> float:
    """Bound the 2-norm of an output token of a depthwise convolution without its bias.

    The bound is the radius of the inputs times the smaller of sum_o max_c |w_co| and
    k max_c |w_c|_2, where o runs over the k * k taps of the kernel.
    """
    kernel = weight.detach().double().flatten(1)
    if scale is not None:
        kernel = kernel * scale.detach().double().unsqueeze(1)
    taps = kernel.shape[1]
    by_offset = kernel.abs().amax(0).sum().item()
    by_channel = math.sqrt(taps) * kernel.norm(dim=1).max().item()
    return min(by_offset, by_channel) * radius if radius < math.inf else math.inf


@bound_rule(nn.Conv2d)
def conv2d_bound(module: nn.Conv2d, domain: Domain, scale: Tensor | None) -> Bound:
    """Bound a convolution without dilation, padded with zeros or cyclically."""
    if module.dilation != (1, 1) or module.padding_mode not in ("zeros", "circular"):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {module}: use dilation 1 and padding_mode 'zeros' or "
            "'circular'"
        )
    weight = module.weight.detach().double()
    if scale is not None:
        weight = weight * scale.detach().double()[:, None, None, None]
    stride = (module.stride[0], module.stride[1])
    sigma = conv_sigma_bound(weight, stride, module.groups).max().item()
    patch = max(linear_sigma(group) for group in weight.chunk(module.groups))
    patch *= math.sqrt(math.prod(module.kernel_size))
    size = domain.size
    if module.padding != "same":
        padding = (0, 0) if isinstance(module.padding, str) else module.padding
        size = tuple(
            (side + 2 * p - k) // s + 1
            for side, p, k, s in zip(size, padding, module.kernel_size, stride, strict=True)
        )
    radius = patch * domain.radius + bias_norm(module.bias, scale)
    return simple_bound(sigma, domain, size=size, radius=radius)


@bound_rule(SelectAdaptivePool2d)
def _pool(module: SelectAdaptivePool2d, domain: Domain, scale: Tensor | None) -> Bound:
    if module.is_identity():
        return _nonexpansive(module, domain, scale)
    if module.pool_type not in ("avg", "fast", "fastavg"):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for pooling {module.pool_type!r}: use 'avg'"
        )
    # The mean of N tokens multiplies each by 1 / N. Its norm over the whole map is 1 / sqrt(N).
    value = max_abs(scale) / math.sqrt(domain.tokens)
    return simple_bound(value, domain, size=(), radius=max_abs(scale) * domain.radius)


bound_rule(Mlp)(children_in_order("fc1", "act", "norm", "fc2"))
bound_rule(ClassifierHead)(children_in_order("global_pool", "fc"))
