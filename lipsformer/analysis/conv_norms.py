"""Norms of convolutions: on maps of every size from their symbols, on small maps exactly."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lipsformer._precision import finite_or_zero, power_of_two, without_autocast

__all__ = ["conv_sigma_bound", "conv_symbols", "depthwise_operator", "grid_excess", "scaled_groups"]


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
        >>> from lipsformer.analysis.conv_norms import conv_sigma_bound
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
        >>> from lipsformer.analysis.conv_norms import depthwise_operator
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
