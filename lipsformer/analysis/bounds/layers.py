"""Bounds of single layers of PyTorch, timm and this project. Proofs: docs/lipschitz.md."""

import math
from dataclasses import replace
from typing import Any

from timm.layers import (
    ClassifierHead,
    DropPath,
    LayerScale,
    Mlp,
    PatchDropout,
    SelectAdaptivePool2d,
)
from timm.layers.adaptive_avgmax_pool import FastAdaptiveAvgPool
from torch import Tensor, nn

from lipsformer.analysis.bounds.core import (
    Bound,
    Domain,
    UnknownModuleError,
    bound_rule,
    chain,
    compose,
    lipschitz_bound,
    max_abs,
    simple_bound,
    unchanged,
)
from lipsformer.layers import CenterNorm, DepthwiseConv2d, Linear, largest_singular_value
from lipsformer.layers.spectral import conv_sigma_bound, depthwise_sigma

# The largest derivative of GELU(x) = x Phi(x), which is Phi(x) + x phi(x) at x = sqrt(2).
GELU_BOUND = 0.5 * (1.0 + math.erf(1.0)) + math.exp(-1.0) / math.sqrt(math.pi)

# On maps of at most this many tokens a depthwise convolution is cheap to write out as a matrix.
MAX_DENSE_TOKENS = 64

# Modules that return their input in evaluation mode.
PASSIVE = (nn.Identity, nn.Dropout, DropPath, PatchDropout)


def center_norm_sigma(weight: Tensor) -> float:
    r"""Return the exact 2-norm of CenterNorm, :math:`\sigma_{max}(diag(g) d/(d-1) (I - 11^T/d))`.

    Without the factor d/(d-1), the square of the norm is the largest root of
    :math:`\sum_i 1 / (g_i^2 - \lambda) = 0`. The root lies between the two largest :math:`g_i^2`.
    Bisection from above finds it in O(d).

    Args:
        weight: The gain g, [d].
    """
    squares = weight.double().detach().cpu().square().sort(descending=True).values
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
        matrix = scale.detach().double().expand(len(matrix)).unsqueeze(1) * matrix
    return largest_singular_value(matrix).item()


def bias_norm(bias: Tensor | None, channels: int, scale: Tensor | None = None) -> float:
    """Return the 2-norm of diag(scale) b, which is 0 without a bias.

    Args:
        bias: b, which broadcasts to [channels]; None for none.
        channels: Number of channels.
        scale: [channels]; None for ones.
    """
    if bias is None:
        return 0.0
    bias = bias.detach().double().expand(channels)
    return (bias if scale is None else bias * scale.detach().double()).norm().item()


def product(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return the product of a gain and a scale, [C], in double precision."""
    weight = weight.detach().double()
    return weight if scale is None else weight * scale.detach().double()


@bound_rule(*PASSIVE, nn.ReLU)
def _nonexpansive(module: nn.Module, domain: Domain, scale: Tensor | None) -> Bound:
    return simple_bound(max_abs(scale), domain, radius=max_abs(scale) * domain.radius)


@bound_rule(LayerScale)
def _layer_scale(module: LayerScale, domain: Domain, scale: Tensor | None) -> Bound:
    value = max_abs(product(module.gamma, scale))
    return simple_bound(value, domain, radius=value * domain.radius)


@bound_rule(nn.Sequential)
def _sequential(module: nn.Module, domain: Domain, scale: Tensor | None) -> Bound:
    # `named_children` leaves out a module that stands in a second place.
    return chain(module._modules.items(), domain, scale)  # pyright: ignore[reportArgumentType]


@bound_rule(nn.GELU)
def _gelu(module: nn.GELU, domain: Domain, scale: Tensor | None) -> Bound:
    if module.approximate != "none":
        raise UnknownModuleError(
            f"no Lipschitz bound is known for GELU(approximate={module.approximate!r}): use the "
            "exact form"
        )
    # The radius follows from |GELU(x)| <= |x|.
    return simple_bound(GELU_BOUND * max_abs(scale), domain, radius=max_abs(scale) * domain.radius)


def _affine(sigma: float, module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    offset = bias_norm(module.bias, len(module.weight), scale)
    return simple_bound(sigma, domain, radius=sigma * domain.radius + offset)


@bound_rule(nn.Linear, Linear)
def _linear(module: nn.Linear, domain: Domain, scale: Tensor | None) -> Bound:
    return _affine(linear_sigma(module.weight, scale), module, domain, scale)


@bound_rule(CenterNorm)
def _center_norm(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    if module.dim != len(module.weight):
        raise UnknownModuleError(f"CenterNorm has dim={module.dim} and {len(module.weight)} gains")
    return _affine(center_norm_sigma(product(module.weight, scale)), module, domain, scale)


@bound_rule(DepthwiseConv2d)
def _depthwise(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    check_depthwise(module)
    sigma = depthwise_channel_sigma(module.weight, (domain.size[0], domain.size[1]))
    if scale is not None:
        sigma = sigma * scale.detach().double().abs()
    radius = depthwise_radius(module.weight, domain.radius, scale)
    radius += bias_norm(module.bias, len(module.weight), scale)
    return simple_bound(sigma.max().item(), domain, radius=radius)


def check_depthwise(module: Any) -> None:
    """Raise `UnknownModuleError` unless a depthwise convolution keeps the size of the map."""
    if module.padding != module.weight.shape[-1] // 2:
        raise UnknownModuleError(
            f"no Lipschitz bound is known for DepthwiseConv2d with padding {module.padding}: use "
            "half of the kernel size"
        )


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
    """Bound a convolution of channels-first maps."""
    if module.dilation != (1, 1) or module.padding_mode not in ("zeros", "circular"):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {module}: use dilation 1 and padding_mode 'zeros' or "
            "'circular'"
        )
    if len(domain.size) != 2:
        raise UnknownModuleError(f"{module} needs a map, and its inputs have size {domain.size}")
    size = _conv2d_size(module, domain.size)
    weight = module.weight.detach().double()
    if scale is not None:
        weight = weight * scale.detach().double()[:, None, None, None]
    stride = (module.stride[0], module.stride[1])
    sigma = conv_sigma_bound(weight, stride, module.groups).max().item()
    patch = max(linear_sigma(group) for group in weight.chunk(module.groups))
    patch *= math.sqrt(math.prod(weight.shape[2:]))
    radius = patch * domain.radius + bias_norm(module.bias, len(module.weight), scale)
    return simple_bound(sigma, domain, size=size, radius=radius)


def _conv2d_size(module: nn.Conv2d, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the size of the output map.

    A circular convolution is the restriction of a convolution on the torus only if no output
    appears twice and the strides fit into the map. Otherwise its norm may be larger.
    """
    sides = []
    for axis, (side, kernel, stride) in enumerate(
        zip(size, module.weight.shape[2:], module.stride, strict=True)
    ):
        if module.padding == "same":
            sides.append(side)
            continue
        padding = 0 if isinstance(module.padding, str) else int(module.padding[axis])
        built = module._reversed_padding_repeated_twice[::-1][2 * axis : 2 * axis + 2]
        if module.padding_mode == "circular" and built != [padding, padding]:
            raise UnknownModuleError(f"the padding of {module} was changed after it was built")
        if side + 2 * padding < kernel:
            raise ValueError(f"{module} refuses a map of {size}, which is smaller than its kernel")
        if module.padding_mode == "circular" and padding > 0:
            if padding > side:
                raise ValueError(f"{module} refuses a map of {size}, around which it would wrap")
            if 2 * padding >= kernel or side % stride != 0:
                raise UnknownModuleError(
                    f"no Lipschitz bound is known for {module} on a map of {size}: use circular "
                    "padding below half of the kernel and a map that is a multiple of the stride"
                )
        sides.append((side + 2 * padding - kernel) // stride + 1)
    return tuple(sides)


@bound_rule(SelectAdaptivePool2d)
def _pool(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    unchanged(module.flatten, nn.Flatten, nn.Identity)
    flattens = not isinstance(module.flatten, nn.Identity)
    if flattens and (module.flatten.start_dim, module.flatten.end_dim) != (1, -1):
        raise UnknownModuleError(f"no Lipschitz bound is known for {module.flatten}")
    largest = max_abs(scale)
    if type(module.pool) is nn.Identity:
        unchanged(module.pool, nn.Identity)
        size = () if flattens else domain.size
        radius = domain.radius * (math.sqrt(domain.tokens) if flattens else 1.0)
        return simple_bound(largest, domain, size=size, radius=largest * radius)
    if not isinstance(module.pool, (FastAdaptiveAvgPool, nn.AdaptiveAvgPool2d)):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for pooling {module.pool_type!r}: use 'avg'"
        )
    unchanged(module.pool, FastAdaptiveAvgPool, nn.AdaptiveAvgPool2d)
    if getattr(module.pool, "output_size", 1) not in (1, (1, 1)):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for pooling to {module.pool.output_size}: use 1"
        )
    flattens = flattens or getattr(module.pool, "flatten", False)
    # The mean of N tokens multiplies each by 1 / N. Its norm over the whole map is 1 / sqrt(N).
    value = largest / math.sqrt(domain.tokens)
    size = () if flattens else (1, 1)
    return simple_bound(value, domain, size=size, radius=largest * domain.radius)


@bound_rule(Mlp)
def _mlp(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    unchanged(module.drop2, *PASSIVE)
    names = ("fc1", "act", "drop1", "norm", "fc2")
    return chain([(name, getattr(module, name)) for name in names], domain, scale)


@bound_rule(ClassifierHead)
def _classifier_head(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    pooled = compose(
        Bound(log10=0.0, paper_log10=0.0, output=domain, input=domain),
        lipschitz_bound(module.global_pool, domain),
        "global_pool",
    )
    misplaced = nn.Linear if module.input_fmt == "NCHW" else nn.Conv2d
    if len(pooled.output.size) == 2 and isinstance(module.fc, misplaced):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {type(module.fc).__name__} behind a map of "
            f"{module.input_fmt}: use pooling, or a convolution for NCHW only"
        )
    bound = chain([("drop", module.drop), ("fc", module.fc)], pooled.output, scale)
    bound = compose(pooled, bound)
    unchanged(module.flatten, nn.Flatten, nn.Identity)
    if isinstance(module.flatten, nn.Identity):
        return bound
    if bound.output.tokens != 1:
        raise UnknownModuleError("no Lipschitz bound is known for logits of several tokens in one")
    return replace(bound, output=replace(bound.output, size=()))
