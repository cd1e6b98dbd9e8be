"""Largest singular values of weights and of convolution operators; spectral init and caps."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipsformer.layers._checks import check_positive
from lipsformer.layers._precision import finite_or_zero, power_of_two, without_autocast
from lipsformer.layers.conv import DepthwiseConv2d


@without_autocast
def largest_singular_value(weight: Tensor) -> Tensor:
    r"""Return the largest singular value of a weight reshaped to [out, in * ...].

    .. math:: \sigma_{max}(W) = \sqrt{\lambda_{max}(W W^T)}

    It is the operator norm of a linear layer, a 1x1 convolution and a convolution whose stride
    equals its kernel size. For any other convolution it is the norm of the reshaped kernel only.
    Computed in float32 (float64 for a float64 weight), under autocast too, from the smaller Gram
    matrix, which is exact to about 1e-6 and much cheaper than a singular value decomposition.

    Args:
        weight: [out, in, ...].

    Returns:
        A scalar tensor in float32 (or float64); NaN for a weight that is not finite.

    Raises:
        ValueError: If `weight` has fewer than two dimensions.

    Example:
        >>> import torch
        >>> from lipsformer.layers import largest_singular_value
        >>> largest_singular_value(torch.diag(torch.tensor([3.0, -4.0])))
        tensor(4.)
    """
    if weight.ndim < 2:
        raise ValueError(f"a weight needs at least 2 dimensions, got shape {tuple(weight.shape)}")
    dtype = torch.promote_types(weight.dtype, torch.float32)
    matrix = weight.detach().reshape(weight.shape[0], -1).to(dtype)
    size = power_of_two(matrix, (0, 1))
    matrix = matrix / size
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    gram, finite = finite_or_zero(gram)
    sigma = torch.linalg.eigvalsh(gram)[-1].clamp_min(0.0).sqrt() * size[0, 0]
    return torch.where(finite, sigma, torch.nan)


@torch.no_grad()
def spectral_init_(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    r"""Fill a weight with Xavier normal values and divide it by its largest singular value.

    .. math:: W \sim N(0, 2 / (fan_{in} + fan_{out})), \quad W \leftarrow W / \sigma_{max}(W)

    A convolution weight is reshaped to [out, in * k * k], as in the released code; for the
    operator norm of such a convolution see `lipsformer.analysis`. Half-precision weights are
    drawn and scaled in float32 and then rounded. A tensor on the meta device is returned as it is.

    Args:
        weight: [out, in, ...], changed in place.
        generator: Source of randomness; torch's default generator if None.

    Returns:
        `weight`, whose reshaped largest singular value is 1.

    Example:
        >>> import torch
        >>> from lipsformer.layers import largest_singular_value, spectral_init_
        >>> largest_singular_value(spectral_init_(torch.empty(5, 3))).round(decimals=4)
        tensor(1.)

    Reference:
        Qi et al. 2023 (LipsFormer), spectral initialization.
    """
    if weight.is_meta:
        return weight
    values = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    nn.init.xavier_normal_(values, generator=generator)
    return weight.copy_(values / largest_singular_value(values))


def spectral_init_modules_(module: nn.Module, zero_conv_bias: bool = True) -> None:
    """Initialize the linear and convolution weights of a module spectrally, and zero the biases.

    Args:
        module: Searched with all its descendants.
        zero_conv_bias: False leaves the biases of convolutions as they are.

    Example:
        >>> import torch
        >>> from lipsformer.layers import spectral_init_modules_
        >>> linear = torch.nn.Linear(3, 2)
        >>> spectral_init_modules_(linear)
        >>> linear.bias.tolist()
        [0.0, 0.0]
    """
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d, DepthwiseConv2d)):
            spectral_init_(layer.weight)
            if layer.bias is not None and (zero_conv_bias or isinstance(layer, nn.Linear)):
                nn.init.zeros_(layer.bias)


@without_autocast
def conv_sigma_bound(
    weight: Tensor, stride: tuple[int, int] = (1, 1), groups: int = 1, oversampling: int = 8
) -> Tensor:
    r"""Bound the 2-norm of a zero padded convolution on maps of every size, one value per group.

    A strided convolution is one of stride 1 on the stride's phases side by side, with k kernel
    taps left per axis. On the infinite plane its norm is the supremum of the spectral norm of its
    symbol over all frequencies, and any zero padded map is a compression of that operator:

    .. math:: |W * x| / |x| \le \sup_f \sigma_{max}(\hat W(f))
        \le \max_{f \in grid} \sigma_{max}(\hat W(f)) \prod_{axes} \cos(\pi (k - 1) / 2n)^{-1}

    with n frequencies per axis. The cosines bound what lies between the points of the grid (M.
    Riesz's inequality for trigonometric polynomials; the proof is in docs/theorems.md). Exact
    where k = 1: stride equal to the kernel, 1x1 kernels.

    Args:
        weight: [out, in / groups, height, width]. Padding with zeros, any amount, no dilation.
        stride: Stride of the rows and the columns.
        groups: Number of groups.
        oversampling: Frequencies per kernel tap, >= 2; the bound exceeds the supremum by less than
            (pi / (2 oversampling))^2, 4 % for the default.

    Returns:
        [groups], in float32, or float64 for a float64 weight.

    Example:
        >>> import torch
        >>> from lipsformer.layers.spectral import conv_sigma_bound
        >>> mean_of_9 = torch.full((1, 1, 3, 3), 1 / 9)  # a constant map shows that its norm is 1
        >>> 1.0 <= conv_sigma_bound(mean_of_9).item() < 1.04
        True
    """
    kernel, size = scaled_groups(weight, groups)
    sigmas = []
    for symbols in conv_symbols(kernel, stride, groups, oversampling):
        if min(symbols.shape[-2:]) == 1:
            peak = torch.linalg.vector_norm(symbols, dim=(-2, -1))
        else:
            rows = symbols if symbols.shape[-2] <= symbols.shape[-1] else symbols.mT
            gram, finite = finite_or_zero(rows @ rows.mH)
            peak = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0).sqrt()
            peak = torch.where(finite, peak, torch.nan)
        sigmas.append(peak.flatten(1).amax(1))
    return torch.cat(sigmas) * size * grid_excess(weight, stride, oversampling)


def scaled_groups(weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Divide each group of a convolution by a power of two, so that no square leaves the range.

    Args:
        weight: [out, in / groups, height, width].
        groups: Number of groups.

    Returns:
        The kernel, in float32 or better, and the powers of two, [groups].
    """
    kernel = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    kernel = kernel.unflatten(0, (groups, -1))
    size = power_of_two(kernel.flatten(1), 1)
    return (kernel / size[:, :, None, None, None]).flatten(0, 1), size[:, 0]


def grid_excess(weight: Tensor, stride: tuple[int, int], oversampling: int) -> float:
    """Return the factor by which a supremum may exceed its maximum on the grid of `conv_symbols`.

    Args:
        weight: [out, in / groups, height, width].
        stride: Stride of the rows and the columns.
        oversampling: Frequencies per kernel tap.
    """
    taps = [math.ceil(side / step) for side, step in zip(weight.shape[2:], stride, strict=True)]
    return math.prod(1.0 / math.cos(math.pi * (k - 1) / (2 * oversampling * k)) for k in taps)


def conv_symbols(
    weight: Tensor, stride: tuple[int, int], groups: int, oversampling: int
) -> Iterator[Tensor]:
    """Yield the symbol of a convolution on a grid of frequencies, some groups at a time.

    Args:
        weight: [out, in / groups, height, width].
        stride: Stride of the rows and the columns.
        groups: Number of groups.
        oversampling: Frequencies per kernel tap and axis. One tap needs a single frequency.

    Yields:
        [groups of this part, frequencies, frequencies, out / groups, in / groups * phases]: complex
        numbers, or real ones if there is a single tap.
    """
    height, width = weight.shape[2:]
    taps = [math.ceil(height / stride[0]), math.ceil(width / stride[1])]
    kernel = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    kernel = F.pad(kernel, (0, taps[1] * stride[1] - width, 0, taps[0] * stride[0] - height))
    kernel = kernel.unflatten(3, (taps[1], stride[1])).unflatten(2, (taps[0], stride[0]))
    # [groups, out / groups, in / groups * phases, taps, taps]
    kernel = kernel.permute(0, 1, 3, 5, 2, 4).flatten(1, 3).unflatten(0, (groups, -1))
    points = [1 if k == 1 else oversampling * k for k in taps]
    for group in kernel.split(max(1, 2**24 // math.prod(points))):  # bounds the memory
        symbols = group if taps == [1, 1] else torch.fft.rfft2(group, s=points)
        yield symbols.movedim((1, 2), (3, 4))


@without_autocast
def depthwise_operator(weight: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the dense matrices of a zero padded depthwise convolution, for small maps only.

    A channel x of the map, flattened to [H W], becomes x @ matrix. Row i of the matrix is therefore
    the output for the input that is 1 at token i and 0 elsewhere.

    Args:
        weight: [C, 1, k, k], k odd; stride 1 and padding k // 2.
        size: (H, W) of the map.

    Returns:
        [C, H W, H W], in float32, or float64 for a float64 weight.

    Example:
        >>> import torch
        >>> from lipsformer.layers.spectral import depthwise_operator
        >>> weight = torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.0, 1.0], [0.0, 0.0, 0.0]])
        >>> depthwise_operator(weight[None, None], size=(1, 2))[0]  # y = (2 x_0 + x_1, 2 x_1)
        tensor([[2., 0.],
                [1., 2.]])
    """
    height, width = size
    tokens = height * width
    kernel = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    basis = torch.eye(tokens, dtype=kernel.dtype, device=kernel.device)
    basis = basis.reshape(tokens, 1, height, width)
    return F.conv2d(basis, kernel, padding=weight.shape[-1] // 2).flatten(2).transpose(0, 1)


@without_autocast
def clip_singular_values(weight: Tensor, cap: float) -> Tensor:
    """Return the nearest weight (Frobenius norm) with no singular value above a cap.

    Computed from the smaller Gram matrix, in float32 or better. A weight within the cap, or one
    that is not finite, is returned as it is, bit for bit. Rounding may leave singular values above
    the cap, by up to about 1e-4 of it in float32, and by more if the weight is in half precision.

    Args:
        weight: [out, in, ...], reshaped to [out, in * ...].
        cap: Largest allowed singular value, > 0.

    Raises:
        ValueError: If `cap` is not positive and finite.

    Example:
        >>> import torch
        >>> from lipsformer.layers.spectral import clip_singular_values
        >>> clip_singular_values(torch.diag(torch.tensor([3.0, 0.5])), 1.0)
        tensor([[1.0000, 0.0000],
                [0.0000, 0.5000]])
    """
    check_positive("cap", cap)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    matrix = weight.detach().flatten(1).to(dtype)
    wide = matrix.shape[0] <= matrix.shape[1]
    size = power_of_two(matrix, (0, 1))
    rows = (matrix if wide else matrix.mT) / size
    gram, _ = finite_or_zero(rows @ rows.mT)
    values, vectors = torch.linalg.eigh(gram)
    sigmas = values.clamp_min(0.0).sqrt() * size[0]
    clipped = (vectors * (cap / sigmas.clamp_min(cap)) * size) @ (vectors.mT @ rows)
    clipped = (clipped if wide else clipped.mT).reshape(weight.shape).to(weight.dtype)
    return torch.where(sigmas[-1] > cap, clipped, weight.detach())


def spectral_linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear layer with spectral initialization and zero bias.

    Example:
        >>> from lipsformer.layers import largest_singular_value
        >>> from lipsformer.layers.spectral import spectral_linear
        >>> largest_singular_value(spectral_linear(8, 4).weight).round(decimals=4)
        tensor(1.)
    """
    linear = nn.Linear(in_features, out_features)
    spectral_init_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class SpectralScale(nn.Module):
    r"""Parametrize a weight so that its largest singular value is c at every step, or at most c.

    .. math:: W \leftarrow c\, W / \sigma_{max}(W)
        \quad\text{or}\quad W \leftarrow c\, W / \max(c, \sigma_{max}(W))

    The scale is computed in float32 or better, under autocast too. Rounding the result to half
    precision errs by at most half a unit in the last place times the Frobenius norm of W, which is
    then added to the largest singular value, and by half of the smallest number for each entry
    below the normal ones, which is subtracted from c: the largest singular value of the rounded
    weight stays below c.

    Shape:
        weight: [out, in]. The output has the same shape.

    Example:
        >>> from torch import nn
        >>> from torch.nn.utils.parametrize import register_parametrization
        >>> from lipsformer.layers import largest_singular_value
        >>> from lipsformer.layers.spectral import SpectralScale
        >>> linear = register_parametrization(nn.Linear(8, 4), "weight", SpectralScale(0.5))
        >>> largest_singular_value(linear.weight).round(decimals=4)
        tensor(0.5000)

    Reference:
        Park and Kim 2024.
    """

    def __init__(self, bound: float, only_shrink: bool = False) -> None:
        """Store the settings.

        Args:
            bound: Largest singular value c > 0 that the weight shall have.
            only_shrink: Whether to leave a weight whose largest singular value is below c as it is.
                Weight decay then acts on it as usual.

        Raises:
            ValueError: If `bound` is not positive and finite.
        """
        super().__init__()
        check_positive("bound", bound)
        self.bound = bound
        self.only_shrink = only_shrink

    def forward(self, weight: Tensor) -> Tensor:
        """Scale the weight. The gradient of sigma is u v^T, with the singular vectors u and v."""
        if weight.is_meta:  # autocast does not know this device
            return weight
        with torch.autocast(weight.device.type, enabled=False):
            matrix = weight.to(torch.promote_types(weight.dtype, torch.float32))
            scale = power_of_two(matrix.detach(), (0, 1))
            gram = (matrix / scale).T @ (matrix / scale)
            # The weight itself keeps what is not finite, which a training then notices.
            largest = torch.linalg.eigvalsh(torch.nan_to_num(gram, 0.0, 0.0, 0.0))[-1]
            largest = largest.clamp_min(1e-24).sqrt() * scale[0, 0]
            bound = self.bound
            if matrix.dtype != weight.dtype:
                info = torch.finfo(weight.dtype)
                largest = largest + info.eps / 2 * matrix.norm()
                # A number below the normal ones errs by half of the smallest one.
                bound -= info.smallest_normal * info.eps / 2 * math.sqrt(weight.numel())
                bound = max(bound, 0.0)
            if self.only_shrink:
                largest = largest.clamp_min(bound)
            return (matrix * (bound / largest)).to(weight.dtype)
