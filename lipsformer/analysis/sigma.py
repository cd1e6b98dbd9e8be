"""Largest singular values of all weights of a model, at a cost that training can afford.

Weights of the same shape are measured as one batch. Every weight keeps its singular vector, from
which the next measurement starts. Nothing here waits for the device.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import LayerScale, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d
from timm.layers.std_conv import StdConv2dSame
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lipsformer._precision import finite_or_zero, power_of_two, without_autocast
from lipsformer._renamed import renamed
from lipsformer.analysis.conv_norms import conv_sigma_bound
from lipsformer.layers import CenterNorm, DepthwiseConv2d, WeightedResidual

# Dimensions of the Krylov space of a measurement, and of the first one, from random vectors.
STEPS, FIRST_STEPS = 16, 64
# Convolutions of timm that apply another weight than their parameter.
STANDARDIZED = (StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame)


@dataclass(frozen=True)
class Operator:
    """A weight and the linear operator that it defines.

    Attributes:
        name: Name of the parameter.
        weight: The parameter.
        is_matrix: Whether the norm of the operator is that of the weight reshaped to
            [out, in * ...]. It is for linear layers and for convolutions whose stride equals their
            kernel size.
        stride: Stride of a convolution.
        groups: Number of groups of a convolution.

    Example:
        >>> from torch import nn
        >>> from lipsformer.analysis.sigma import operators
        >>> [(op.name, op.is_matrix) for op in operators(nn.Sequential(nn.Linear(3, 5)))]
        [('0.weight', True)]
    """

    name: str
    weight: Tensor
    is_matrix: bool
    stride: tuple[int, int] = (1, 1)
    groups: int = 1


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of PyTorch or of PyG, which need not be there."""
    names = (f"{cls.__module__}.{cls.__name__}" for cls in type(module).__mro__)
    return isinstance(module, nn.Linear) or "torch_geometric.nn.dense.linear.Linear" in names


def operators(model: nn.Module) -> list[Operator]:
    """Return the linear operators of a model: its linear layers and its 2-d convolutions.

    Raises:
        ValueError: If a weight is parametrized or not initialized yet, or if a convolution
            standardizes its weight, or has a norm that depends on the map because it pads with
            other values than zeros.

    Example:
        >>> from torch import nn
        >>> from lipsformer.analysis.sigma import operators
        >>> model = nn.Sequential(nn.Conv2d(3, 5, 4, stride=4), nn.GELU(), nn.Conv2d(5, 7, 3))
        >>> [(op.name, op.is_matrix) for op in operators(model)]  # the patches do not overlap
        [('0.weight', True), ('2.weight', False)]
    """
    found = []
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        path = f"{name}.weight" if name else "weight"
        if not _is_linear(module) and not isinstance(module, (nn.Conv2d, DepthwiseConv2d)):
            continue
        if is_lazy(weight):
            raise ValueError(f"{path} has no shape yet: run one batch through the model first")
        if parametrize.is_parametrized(module, "weight"):
            raise ValueError(
                f"{path} is parametrized, so its norm can be neither followed nor changed: call "
                "torch.nn.utils.parametrize.remove_parametrizations first"
            )
        if isinstance(module, STANDARDIZED):
            raise ValueError(
                f"{name or 'the convolution'} is of {type(module).__name__}, which standardizes "
                "its weight in every pass, so the norm of the weight is not that of the layer"
            )
        if isinstance(module, DepthwiseConv2d):
            found.append(Operator(path, weight, is_matrix=False, groups=len(weight)))
        elif not isinstance(module, nn.Conv2d):
            found.append(Operator(path, weight, is_matrix=True))
        else:
            if module.padding_mode != "zeros":
                raise ValueError(
                    f"{name or 'the convolution'} has padding_mode={module.padding_mode!r}, with "
                    "which its norm depends on the map: use 'zeros'"
                )
            # Leaving out outputs is a contraction, so a dilated convolution is at most as large as
            # with stride 1, where the dilation does not change the supremum of the symbol.
            dilated = module.dilation != (1, 1)
            stride = (1, 1) if dilated else (module.stride[0], module.stride[1])
            patches = stride == module.kernel_size and module.groups == 1
            found.append(Operator(path, weight, patches, stride, module.groups))
    return found


def residual_scale_of(module: nn.Module) -> Tensor | None:
    """Return the weight that a module gives to a residual branch, or None for other modules.

    The weight is `residual_scale` of a `WeightedResidual`, or `gamma` of timm's `LayerScale`, which
    `lipsformer.convert` uses because timm's blocks have a place for it.

    Returns:
        The parameter itself, [C], or None.

    Example:
        >>> from timm.layers import LayerScale
        >>> from lipsformer.analysis.sigma import residual_scale_of
        >>> residual_scale_of(LayerScale(3, init_values=0.5)).tolist()
        [0.5, 0.5, 0.5]
    """
    if isinstance(module, WeightedResidual):
        return module.residual_scale
    return module.gamma if isinstance(module, LayerScale) else None


def gain_of(module: nn.Module) -> Tensor | None:
    """Return the gain of a `CenterNorm`, or None for other modules.

    Returns:
        The parameter itself, [C], or None.

    Example:
        >>> from lipsformer.analysis.sigma import gain_of
        >>> from lipsformer.layers import CenterNorm
        >>> gain_of(CenterNorm(3)).tolist()
        [1.0, 1.0, 1.0]
    """
    return module.weight if isinstance(module, CenterNorm) else None


@without_autocast
def krylov_sigma_estimate(matrices: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Estimate largest singular values by the Rayleigh-Ritz method in a Krylov space of W^T W.

    The space contains every iterate of the same number of steps of power iteration. The estimate is
    therefore at least as close as power iteration, and never above the true value.

    Args:
        matrices: The matrices W, [G, m, n].
        start: First vectors, [G, n], such as the singular vectors that were found before.
        steps: Dimension of the space, at most min(m + 1, n).

    Returns:
        The estimates [G], NaN for a matrix that is not finite, and the right singular vectors
        [G, n].

    Example:
        >>> import torch
        >>> from lipsformer.analysis.sigma import krylov_sigma_estimate
        >>> matrices = torch.diag(torch.tensor([3.0, 5.0]))[None]
        >>> sigma, vectors = krylov_sigma_estimate(matrices, torch.ones(1, 2), steps=2)
        >>> sigma.round(decimals=3), vectors.abs().round(decimals=3)
        (tensor([5.]), tensor([[0., 1.]]))
    """
    floor, noise = torch.finfo(matrices.dtype).tiny, 100.0 * torch.finfo(matrices.dtype).eps
    size = power_of_two(matrices, (1, 2))
    matrices = matrices / size
    direction = start / start.norm(dim=1, keepdim=True).clamp_min(floor)
    basis: list[Tensor] = []
    for _ in range(min(steps, matrices.shape[1] + 1, matrices.shape[2])):
        basis.append(direction)
        space = torch.stack(basis, dim=2)
        direction = (matrices.mT @ (matrices @ direction.unsqueeze(2))).squeeze(2)
        # Orthogonalize twice, and normalize in between. In an exhausted space only the noise of
        # rounding remains. It is replaced by 0, because it is not orthogonal to the space.
        for _ in range(2):
            before = direction.norm(dim=1, keepdim=True)
            direction = direction - (space @ (space.mT @ direction.unsqueeze(2))).squeeze(2)
            length = direction.norm(dim=1, keepdim=True)
            found = length > noise * before
            direction = torch.where(found, direction / length.clamp_min(floor), 0.0)
    space = torch.stack(basis, dim=2)
    image = matrices @ space
    gram, finite = finite_or_zero(image.mT @ image)
    values, vectors = torch.linalg.eigh(gram)
    sigma = torch.where(finite, values[:, -1].clamp_min(0.0).sqrt(), torch.nan)
    return sigma * size[:, 0, 0], (space @ vectors[:, :, -1:]).squeeze(2)


class SigmaTracker:
    """Measure the largest singular values of named weights again and again during training.

    Every call starts from the singular vectors of the previous call. For matrices the relative
    error is below 1e-3 from the second call on, as long as the weights move as they do in training.
    Convolutions get the proved bound of `conv_sigma_bound`, the largest over the groups.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.sigma import SigmaTracker, operators
        >>> layer = torch.nn.Linear(3, 3)
        >>> tracker = SigmaTracker(operators(layer))
        >>> sigmas = tracker.measure({"weight": torch.diag(torch.tensor([1.0, 2.0, 4.0]))})
        >>> f"{sigmas['weight']:.3f}"
        '4.000'
    """

    def __init__(self, tracked: list[Operator]) -> None:
        """Create the tracker.

        Args:
            tracked: The operators.
        """
        self.names = [op.name for op in tracked]
        self.convolutions = [op for op in tracked if not op.is_matrix]
        self.groups: dict[tuple[int, int], list[Operator]] = defaultdict(list)
        for op in tracked:
            if op.is_matrix:
                self.groups[op.weight.shape[0], op.weight[0].numel()].append(op)
        self.vectors: dict[tuple[int, int], Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the singular vectors, by the shape of their matrices."""
        return {f"{m}x{n}": vectors for (m, n), vectors in self.vectors.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the singular vectors. Matrices whose shape is missing start from random vectors.

        Args:
            state: The result of `state_dict`.
        """
        self.vectors = {
            (m, n): state[f"{m}x{n}"].to(group[0].weight.device)
            for (m, n), group in self.groups.items()
            if f"{m}x{n}" in state
        }

    def measure(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the largest singular value of each operator, as a scalar tensor by name, in order.

        It is estimated from below for a matrix, and bounded from above for a convolution.

        Args:
            weights: Full weights by operator name, or tensors of the same shapes such as updates.
        """
        sigmas: dict[str, Tensor] = {}
        for shape, group in self.groups.items():
            matrices = torch.stack([weights[op.name].flatten(1) for op in group])
            matrices = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
            generator = torch.Generator(matrices.device).manual_seed(0)
            size = (len(group), shape[1])
            start = torch.randn(
                size, dtype=matrices.dtype, device=matrices.device, generator=generator
            )
            if shape in self.vectors:
                # The noise finds a direction orthogonal to the old one that has become the largest.
                start = self.vectors[shape] + 0.3 * start / start.norm(dim=1, keepdim=True)
            steps = STEPS if shape in self.vectors else FIRST_STEPS
            found, vectors = krylov_sigma_estimate(matrices, start, steps)
            # A zero matrix, such as a skipped update, has no singular direction.
            self.vectors[shape] = torch.where(found.unsqueeze(1) > 0.0, vectors, start)
            sigmas.update(zip((op.name for op in group), found, strict=True))
        for op in self.convolutions:
            sigmas[op.name] = conv_sigma_bound(weights[op.name], op.stride, op.groups).amax()
        return {name: sigmas[name] for name in self.names}


__getattr__ = renamed(__name__)
