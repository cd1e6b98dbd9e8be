"""Bounds of single layers of PyTorch, timm and this project. Proofs: docs/theorems.md."""

import math
from dataclasses import replace
from typing import Any

import torch
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

from lipsformer.analysis.bounds.composition import (
    Bound,
    Domain,
    Last,
    compose,
    max_abs,
    simple_bound,
)
from lipsformer.analysis.bounds.core import (
    UnknownModuleError,
    bound_rule,
    chain,
    checked_domain,
    require_unchanged,
)
from lipsformer.analysis.bounds.rounding import (
    FFT_ERROR,
    OUTWARD,
    UNIT,
    abs_sigma_bound,
    gamma,
    norm_bound,
    outward,
    sigma_bound,
)
from lipsformer.analysis.conv_norms import (
    conv_symbols,
    depthwise_operator,
    grid_excess,
    scaled_groups,
)
from lipsformer.layers import CenterNorm, DepthwiseConv2d, Linear

# The largest derivative of GELU(x) = x Phi(x), which is Phi(x) + x phi(x) at x = sqrt(2).
GELU_BOUND = outward(0.5 * (1.0 + math.erf(1.0)) + math.exp(-1.0) / math.sqrt(math.pi))

# GELU in float32 errs by at most GELU_ERROR |x|, in PyTorch and in our kernel. A slow test goes
# through all floats.
GELU_ERROR = 2.0**-20

# On maps of at most this many tokens a depthwise convolution is cheap to write out as a matrix.
MAX_EXACT_TOKENS = 64

# Modules that return their input in evaluation mode.
PASSIVE = (nn.Identity, nn.Dropout, DropPath, PatchDropout)


def center_norm_sigma_bound(weight: Tensor) -> float:
    r"""Bound the 2-norm of CenterNorm, :math:`\sigma_{max}(diag(g) d/(d-1) (I - 11^T/d))`.

    Without the factor d/(d-1), the square of the norm is the largest root of
    :math:`\sum_i 1 / (g_i^2 - \lambda) = 0`. The root lies between the two largest :math:`g_i^2`.
    Bisection from above finds it in O(d). A step down is made only where the sum is positive by
    more than its rounding error, so the result is exact up to rounding and never below the norm.

    Args:
        weight: The gain g, [d].
    """
    weight = weight.detach().double().cpu()
    largest = weight.abs().max().item()
    if not 0.0 < largest < math.inf:
        return largest
    unit = 2.0 ** (math.frexp(largest)[1] - 1)  # keeps the squares from under- and overflow
    squares = (weight / unit).square().sort(descending=True).values * OUTWARD
    dim = len(squares)
    high, low = squares[0].item(), squares[1].item()
    for _ in range(60):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        terms = 1.0 / (squares - middle)
        if terms.sum() > 2.0 * UNIT * (dim + 4) * terms.abs().sum():
            high = middle
        else:
            low = middle
    return outward(dim / (dim - 1) * math.sqrt(high) * unit)


def linear_sigma_bound(weight: Tensor, scale: Tensor | None = None) -> float:
    """Bound the largest singular value of diag(scale) W, up to rounding.

    Args:
        weight: W, [out, in, ...], which is reshaped to [out, in * ...].
        scale: [out]; None for ones.
    """
    return sigma_bound(matrix_of(weight, scale)).item()


def matrix_of(weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return diag(scale) W in double precision, reshaped to [out, in * ...]."""
    matrix = weight.detach().double().flatten(1)
    return matrix if scale is None else scale.detach().double().unsqueeze(1) * matrix


def linear_rounding(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, length: float, sigma: float
) -> float:
    r"""Bound the error that float32 adds to :math:`s \odot (W x + b)`, also with s folded in.

    Args:
        weight: W, [out, in, ...], which is reshaped to [out, in * ...].
        bias: b, [out]; None for none.
        scale: s, [out]; None for ones.
        length: 2-norm of x, or its root mean square over many x; the result is of the same kind.
        sigma: Bound of the largest singular value of diag(s) W.
    """
    matrix, shift = matrix_of(weight, scale), bias_norm(bias, scale)
    absolute = abs_sigma_bound(matrix) * length + shift
    return sum_rounding(matrix.shape[1], absolute, sigma * length + shift)


def sum_rounding(terms: int, absolute: float, total: float) -> float:
    r"""Bound the error of sums of products and a bias in float32, added in any order.

    Every addition errs by u times the sum of a part of the terms. The largest sum of a part is
    that of the positive or of the negative terms, :math:`(\sum |t_j| + |\sum t_j|) / 2`. Products
    and a scale round three times.

    Args:
        terms: Number of products.
        absolute: 2-norm of the sums of absolute values.
        total: 2-norm of the sums.
    """
    additions = gamma(terms + 1)
    return gamma(4) * absolute + additions * ((absolute + total) / 2.0 + additions * absolute)


def bias_norm(bias: Tensor | None, scale: Tensor | None = None) -> float:
    """Bound the 2-norm of diag(scale) b, which is 0 without a bias."""
    return 0.0 if bias is None else outward(norm_bound(product(bias, scale)).item())


def product(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return the product of a gain and a scale, [C], in double precision."""
    weight = weight.detach().double()
    return weight if scale is None else weight * scale.detach().double()


@bound_rule(*PASSIVE, nn.ReLU)
def _nonexpansive(module: nn.Module, domain: Domain, scale: Tensor | None) -> Bound:
    largest = max_abs(scale)
    return simple_bound(largest, domain, radius=largest * domain.radius, shift=0.0, rounding=0.0)


@bound_rule(LayerScale)
def _layer_scale(module: LayerScale, domain: Domain, scale: Tensor | None) -> Bound:
    domain = checked_domain(module, domain, len(module.gamma))
    value = max_abs(product(module.gamma, scale))
    radius, rounding = value * domain.radius, gamma(1) * value * domain.rms
    return simple_bound(value, domain, radius=radius, shift=0.0, rounding=rounding)


@bound_rule(nn.Sequential)
def _sequential(module: nn.Module, domain: Domain, scale: Tensor | None) -> Bound:
    # `named_children` leaves out a module that stands in a second place.
    layers: Any = module._modules.items()
    return chain(layers, domain, scale, moves_channels=False)


@bound_rule(nn.GELU)
def _gelu(module: nn.GELU, domain: Domain, scale: Tensor | None) -> Bound:
    if module.approximate != "none":
        raise UnknownModuleError(
            f"no Lipschitz bound is known for GELU(approximate={module.approximate!r}): use the "
            "exact form"
        )
    return gelu_bound(domain, max_abs(scale))


def gelu_bound(domain: Domain, largest: float = 1.0) -> Bound:
    """Return the bound of GELU, followed by a product with factors of at most `largest`.

    Radius and norm follow from |GELU(x)| <= |x|.
    """
    radius, rounding = largest * domain.radius, GELU_ERROR * largest * domain.rms
    bound = simple_bound(GELU_BOUND * largest, domain, radius=radius, shift=0.0, rounding=rounding)
    return replace(bound, output=replace(bound.output, norm=outward(largest * domain.norm)))


@bound_rule(nn.Linear, Linear)
def _linear(module: nn.Linear, domain: Domain, scale: Tensor | None) -> Bound:
    out, channels = module.weight.shape
    domain = checked_domain(module, domain, channels)
    sigma, bias = linear_sigma_bound(module.weight, scale), bias_norm(module.bias, scale)
    radius = sigma * domain.radius + bias
    rounding = linear_rounding(module.weight, module.bias, scale, domain.rms, sigma)
    bound = simple_bound(sigma, domain, radius=radius, shift=bias, rounding=rounding, channels=out)
    if scale is not None:
        return bound
    rows = norm_bound(module.weight, dim=1) * (domain.norm + domain.error)
    rows = rows if module.bias is None else rows + module.bias.detach().double().abs()
    added = rows * ((gamma(4) + gamma(channels + 1) * (1.0 + gamma(channels + 1))) * OUTWARD)
    copied = module.weight.detach().clone()
    return replace(bound, last=Last(bound.log10, copied, domain.error, added))


@bound_rule(CenterNorm)
def _center_norm(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    if module.weight.shape != (module.dim,):
        shape = tuple(module.weight.shape)
        raise UnknownModuleError(f"CenterNorm has dim={module.dim} and gains of shape {shape}")
    domain = checked_domain(module, domain, module.dim)
    gain, dim = product(module.weight, scale), module.dim
    sigma, bias = center_norm_sigma_bound(gain), bias_norm(module.bias, scale)
    # The mean of d channels errs by gamma(d + 1) |x| d^(-1/2), the other steps by a few roundings.
    rounding = gamma(dim + 8) * (max_abs(gain) * dim / (dim - 1) * domain.rms + bias)
    radius = sigma * domain.radius + bias
    return simple_bound(sigma, domain, radius=radius, shift=bias, rounding=rounding)


@bound_rule(DepthwiseConv2d)
def _depthwise(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    check_depthwise(module)
    domain = checked_domain(module, domain, module.dim, on_map=True)
    sigma = depthwise_sigma_bounds(module.weight, (domain.size[0], domain.size[1]))
    largest = module.weight.detach().double().abs().sum((1, 2, 3))  # |w|_1 bounds the norm of |w| *
    if scale is not None:
        sigma, largest = (norm * scale.detach().double().abs() for norm in (sigma, largest))
    bias = bias_norm(module.bias, scale)
    # Padding adds exact zeros. So an output sums at most as many products as there are tokens.
    taps = min(module.weight[0].numel(), domain.tokens)
    return simple_bound(
        sigma.max().item(),
        domain,
        radius=depthwise_radius(module.weight, domain.radius, scale) + bias,
        shift=bias,
        rounding=gamma(taps + 3) * (largest.max().item() * domain.rms + bias),
    )


def check_depthwise(module: Any) -> None:
    """Raise `UnknownModuleError` unless every channel has one kernel that keeps the map's size."""
    side = 2 * module.padding + 1
    if module.weight.shape != (module.dim, 1, side, side):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for DepthwiseConv2d({module.dim}) with the weight "
            f"{tuple(module.weight.shape)} and padding {module.padding}: use one square kernel per "
            "channel, and half of its side as the padding"
        )


def depthwise_sigma_bounds(weight: Tensor, size: tuple[int, int]) -> Tensor:
    """Bound the norm of the convolution of each channel, exactly up to rounding on small maps.

    Args:
        weight: [C, 1, k, k], of a convolution with zero padding k // 2.
        size: (H, W) of the map.

    Returns:
        [C], float64.
    """
    weight = weight.detach().double()
    if math.prod(size) <= MAX_EXACT_TOKENS:
        return sigma_bound(depthwise_operator(weight, size))
    return conv_bound(weight, groups=len(weight), oversampling=16)


def conv_bound(
    weight: Tensor, stride: tuple[int, int] = (1, 1), groups: int = 1, oversampling: int = 8
) -> Tensor:
    """Return `lipsformer.analysis.conv_norms.conv_sigma_bound`, rounded up, one value per group.

    An entry of the symbol errs by at most FFT_ERROR times the sum of its absolute taps. The
    Frobenius norm of these sums bounds the norm of the error.

    Args:
        weight: [out, in / groups, height, width], float64.
        stride: Stride of the rows and the columns.
        groups: Number of groups.
        oversampling: Frequencies per kernel tap.
    """
    kernel, size = scaled_groups(weight, groups)
    peaks = [
        sigma_bound(symbols).flatten(1).amax(1)
        for symbols in conv_symbols(kernel, stride, groups, oversampling)
    ]
    # Phases of a strided convolution have at most as large sums of taps as the kernel itself has.
    taps = kernel.abs().sum((-2, -1)).unflatten(0, (groups, -1))
    sigma = torch.cat(peaks) + FFT_ERROR * norm_bound(taps, dim=(1, 2))
    return sigma * size * grid_excess(weight, stride, oversampling) * OUTWARD


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
    by_channel = math.sqrt(taps) * norm_bound(kernel, dim=1).max().item()
    return outward(min(by_offset, by_channel) * radius) if radius < math.inf else math.inf


@bound_rule(nn.Conv2d)
def conv2d_bound(module: nn.Conv2d, domain: Domain, scale: Tensor | None) -> Bound:
    """Bound a convolution of channels-first maps.

    Raises:
        UnknownModuleError: If it is dilated, pads with other values than zeros or cyclically, or
            its inputs are no map of its channels.
    """
    if module.dilation != (1, 1) or module.padding_mode not in ("zeros", "circular"):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {module}: use dilation 1 and padding_mode 'zeros' or "
            "'circular'"
        )
    channels = module.weight.shape[1] * module.groups
    domain = checked_domain(module, domain, channels, first=True, on_map=True)
    size = _conv2d_size(module, domain.size)
    weight = module.weight.detach().double()
    if scale is not None:
        weight = weight * scale.detach().double()[:, None, None, None]
    stride = (module.stride[0], module.stride[1])
    sigma = conv_bound(weight, stride, module.groups).max().item()
    groups = [group.flatten(1) for group in weight.chunk(module.groups)]
    patch, bias = max(linear_sigma_bound(group) for group in groups), bias_norm(module.bias, scale)
    # A pixel is a part of at most so many patches.
    copies = math.prod(
        math.ceil(k / s) for k, s in zip(module.weight.shape[2:], stride, strict=True)
    )
    length = math.sqrt(copies * domain.tokens / math.prod(size)) * domain.rms
    largest = max(abs_sigma_bound(group) for group in groups)
    return simple_bound(
        sigma,
        domain,
        size=size,
        radius=patch * math.sqrt(math.prod(module.weight.shape[2:])) * domain.radius + bias,
        shift=bias,
        rounding=sum_rounding(groups[0].shape[1], largest * length + bias, patch * length + bias),
        channels=len(weight),
    )


def _conv2d_size(module: nn.Conv2d, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the size of the output map.

    A circular convolution is the restriction of a convolution on the torus only if no output
    appears twice and the strides fit into the map. Otherwise its norm may be larger.
    """
    sides = []
    for axis, (side, kernel, stride) in enumerate(
        zip(size, module.weight.shape[2:], module.stride, strict=True)
    ):
        same = module.padding == "same"
        padding = 0 if isinstance(module.padding, str) else int(module.padding[axis])
        around = [kernel // 2, (kernel - 1) // 2] if same else [padding, padding]
        built = module._reversed_padding_repeated_twice[::-1][2 * axis : 2 * axis + 2]
        changed = module.padding_mode == "circular" and built != around
        if changed or (same and stride != 1):
            raise UnknownModuleError(f"the padding of {module} was changed after it was built")
        if module.padding_mode == "circular" and around[0] > side:
            raise ValueError(f"{module} refuses a map of {size}, around which it would wrap")
        if same:
            sides.append(side)
            continue
        if side + 2 * padding < kernel:
            raise ValueError(f"{module} refuses a map of {size}, which is smaller than its kernel")
        circular = module.padding_mode == "circular" and padding > 0
        if circular and (2 * padding >= kernel or side % stride != 0):
            raise UnknownModuleError(
                f"no Lipschitz bound is known for {module} on a map of {size}: use circular "
                "padding below half of the kernel and a map that is a multiple of the stride"
            )
        sides.append((side + 2 * padding - kernel) // stride + 1)
    return tuple(sides)


@bound_rule(nn.Flatten)
def _flatten(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    _require_whole(module)
    largest = max_abs(scale)
    radius = largest * domain.radius * math.sqrt(domain.tokens)
    if domain.tokens > 1:  # every pixel becomes channels
        domain = replace(domain, channels=None)
    return simple_bound(largest, domain, size=(), radius=radius, shift=0.0, rounding=0.0)


def _require_whole(flatten: Any) -> None:
    if (flatten.start_dim, flatten.end_dim) != (1, -1):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {flatten}: use start_dim=1 and end_dim=-1"
        )


@bound_rule(SelectAdaptivePool2d)
def _pool(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    require_unchanged(module.flatten, nn.Flatten, nn.Identity)
    flattens = not isinstance(module.flatten, nn.Identity)
    if flattens:
        _require_whole(module.flatten)
    largest = max_abs(scale)
    if type(module.pool) is nn.Identity:
        require_unchanged(module.pool, nn.Identity)
        if flattens:
            return _flatten(module.flatten, domain, scale)
        radius = largest * domain.radius
        return simple_bound(largest, domain, radius=radius, shift=0.0, rounding=0.0)
    if not isinstance(module.pool, (FastAdaptiveAvgPool, nn.AdaptiveAvgPool2d)):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for pooling {module.pool_type!r}: use 'avg'"
        )
    require_unchanged(module.pool, FastAdaptiveAvgPool, nn.AdaptiveAvgPool2d)
    if getattr(module.pool, "output_size", 1) not in (1, (1, 1)):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for pooling to {module.pool.output_size}: use 1"
        )
    timms = isinstance(module.pool, FastAdaptiveAvgPool)
    axes = module.pool.dim if timms else (2, 3)
    if len(domain.size) != 2 or axes not in ((1, 2), (2, 3)):
        raise UnknownModuleError(f"no Lipschitz bound is known for {module} over {axes}: use a map")
    domain = checked_domain(module, domain, None, first=axes == (2, 3))
    flattens = flattens or (timms and module.pool.flatten)
    # The mean of N tokens multiplies each by 1 / N. Its norm over the whole map is 1 / sqrt(N).
    value = largest / math.sqrt(domain.tokens)
    size = () if flattens else (1, 1)
    radius, rounding = largest * domain.radius, gamma(domain.tokens + 2) * largest * domain.rms
    return simple_bound(value, domain, size=size, radius=radius, shift=0.0, rounding=rounding)


@bound_rule(Mlp)
def _mlp(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    require_unchanged(module.drop2, *PASSIVE)
    names = ("fc1", "act", "drop1", "norm", "fc2")
    return chain([(name, getattr(module, name)) for name in names], domain, scale)


@bound_rule(ClassifierHead)
def _classifier_head(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    pooled = chain([("global_pool", module.global_pool)], domain, moves_channels=False)
    misplaced = nn.Linear if module.input_fmt == "NCHW" else nn.Conv2d
    if len(pooled.output.size) == 2 and isinstance(module.fc, misplaced):
        raise UnknownModuleError(
            f"no Lipschitz bound is known for {type(module.fc).__name__} after a map of "
            f"{module.input_fmt}: use pooling, or a convolution for NCHW only"
        )
    bound = chain([("drop", module.drop), ("fc", module.fc)], pooled.output, scale)
    bound = compose(pooled, bound)
    require_unchanged(module.flatten, nn.Flatten, nn.Identity)
    if isinstance(module.flatten, nn.Identity):
        return bound
    if bound.output.tokens != 1:
        raise UnknownModuleError("no Lipschitz bound is known for logits of several tokens in one")
    return replace(bound, output=replace(bound.output, size=()))
