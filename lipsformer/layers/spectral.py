"""Largest singular values of weights: spectral initialization, caps and fixed scales."""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipsformer._arguments import check_positive
from lipsformer._precision import finite_or_zero, power_of_two, without_autocast
from lipsformer._renamed import renamed
from lipsformer.layers.conv import DepthwiseConv2d

_WITH_WEIGHT = (nn.Linear, nn.Conv2d, DepthwiseConv2d)


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

    Raises:
        TypeError: If a weight is computed from other parameters. Nothing has been changed then.

    Example:
        >>> import torch
        >>> from lipsformer.layers import spectral_init_modules_
        >>> linear = torch.nn.Linear(3, 2)
        >>> spectral_init_modules_(linear)
        >>> linear.bias.tolist()
        [0.0, 0.0]
    """
    require_own_weights(module)
    for layer in module.modules():
        if isinstance(layer, _WITH_WEIGHT):
            spectral_init_(layer.weight)
            if layer.bias is not None and (zero_conv_bias or isinstance(layer, nn.Linear)):
                nn.init.zeros_(layer.bias)


def require_own_weights(module: nn.Module) -> None:
    """Raise unless `spectral_init_modules_` can write to all weights.

    Raises:
        TypeError: If a weight is computed from other parameters, so that the next call would
            overwrite it.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, _WITH_WEIGHT) and "weight" not in layer._parameters:
            raise TypeError(
                f"the weight of {name or type(layer).__name__} is computed by a parametrization, "
                "weight norm or pruning, and cannot be initialized: initialize it first and "
                "register them afterwards"
            )


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

    The scale is computed in float32 or better, under autocast too. For a weight in half precision
    it leaves room for rounding, so that the largest singular value of the rounded weight stays
    below c. Two errors are allowed for:

    - Normal numbers err together by at most half a unit in the last place times the Frobenius norm
      of W. This is added to the largest singular value.
    - Each subnormal number errs by at most half of the smallest one. This is subtracted from c.

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
            # Numbers that are not finite are left out of this Gram matrix only. They stay in the
            # weight, so that a training notices them.
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


def draw_scaled_weights_(module: nn.Module) -> None:
    """Draw Xavier uniform values for the weights that a `SpectralScale` scales.

    An initialization that writes to such a weight changes nothing, because the weight is computed
    again at every access. This function writes to the parameter from which it is computed.

    Args:
        module: Searched with all its descendants.

    Example:
        >>> from torch import nn
        >>> from torch.nn.utils.parametrize import register_parametrization
        >>> from lipsformer.layers.spectral import SpectralScale, draw_scaled_weights_
        >>> linear = register_parametrization(nn.Linear(8, 4), "weight", SpectralScale(0.5))
        >>> before = linear.weight.clone()
        >>> nn.init.xavier_uniform_(linear.weight).equal(before), linear.weight.equal(before)
        (False, True)
        >>> draw_scaled_weights_(linear)
        >>> linear.weight.equal(before)
        False
    """
    for part in module.modules():
        parametrized = isinstance(part, parametrize.ParametrizationList)
        if parametrized and any(isinstance(step, SpectralScale) for step in part):
            nn.init.xavier_uniform_(cast(Tensor, part.original))


__getattr__ = renamed(__name__)
