"""Largest singular values of all weights of a model, cheaply and again and again.

Weights of one shape are handled as one batch; each keeps its singular vector as part of the start
of the next measurement. Nothing here waits for the device.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lipsformer.layers import DepthwiseConv2d, WeightedResidual
from lipsformer.layers.spectral import conv_sigma_bound


@dataclass(frozen=True)
class Operator:
    """A weight and the linear operator that it stands for.

    Attributes:
        name: Of the parameter.
        weight: The parameter.
        is_matrix: Whether the operator's norm is that of the weight reshaped to [out, in * ...]:
            linear layers and convolutions whose stride equals their kernel.
        stride: Of a convolution.
        groups: Of a convolution.
    """

    name: str
    weight: Tensor
    is_matrix: bool
    stride: tuple[int, int] = (1, 1)
    groups: int = 1


def operators(model: nn.Module) -> list[Operator]:
    """Return the linear operators of a model: linear layers and convolutions."""
    found = []
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        path = f"{name}.weight" if name else "weight"
        if isinstance(module, nn.Linear):
            found.append(Operator(path, weight, is_matrix=True))
        elif isinstance(module, DepthwiseConv2d):
            found.append(Operator(path, weight, is_matrix=False, groups=len(weight)))
        elif isinstance(module, nn.Conv2d):
            stride = (module.stride[0], module.stride[1])
            patches = stride == module.kernel_size and module.groups == 1
            found.append(Operator(path, weight, patches, stride, module.groups))
    return found


def residual_scale_of(module: nn.Module) -> Tensor | None:
    """Return the weight of a residual branch if that is what a module holds."""
    if isinstance(module, WeightedResidual):
        return module.residual_scale
    return module.gamma if isinstance(module, LayerScale) else None


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that FSDP2 may have sharded; every rank must call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assign(weight: Tensor, values: Tensor) -> None:
    """Write all values of a weight that FSDP2 may have sharded."""
    with torch.no_grad():
        if isinstance(weight, DTensor):
            values = distribute_tensor(
                values.to(weight.dtype), weight.device_mesh, weight.placements, src_data_rank=None
            )
        weight.copy_(values)


def krylov_sigma(matrices: Tensor, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Estimate largest singular values by Rayleigh and Ritz in a Krylov space of W^T W.

    The space holds every iterate of as many steps of power iteration, so the estimate is at least
    as close, and never above the true value.

    Args:
        matrices: [G, m, n].
        start: Where to start, [G, n], such as the singular vectors found before.
        steps: Dimension of the space, cut to m + 1 and n.

    Returns:
        (sigma [G], right singular vectors [G, n]).
    """
    floor = torch.finfo(matrices.dtype).tiny
    direction = start / start.norm(dim=1, keepdim=True).clamp_min(floor)
    basis: list[Tensor] = []
    for _ in range(min(steps, matrices.shape[1] + 1, matrices.shape[2])):
        basis.append(direction)
        space = torch.stack(basis, dim=2)
        direction = (matrices.mT @ (matrices @ direction.unsqueeze(2))).squeeze(2)
        for _ in range(2):  # normalised in between: in an exhausted space only noise is left
            direction = direction - (space @ (space.mT @ direction.unsqueeze(2))).squeeze(2)
            direction = direction / direction.norm(dim=1, keepdim=True).clamp_min(floor)
    space = torch.stack(basis, dim=2)
    image = matrices @ space
    values, vectors = torch.linalg.eigh(image.mT @ image)
    found = (space @ vectors[:, :, -1:]).squeeze(2)
    return values[:, -1].clamp_min(0.0).sqrt(), found


class SigmaTracker:
    """Largest singular values of named weights, warm-started from one call to the next.

    Matrices are within 1e-3 of their true value from the second call on while weights move as in
    training; convolutions get the proved bound of ``conv_sigma_bound``, the largest over channels.
    """

    def __init__(self, tracked: list[Operator], steps: int = 16, first_steps: int = 64) -> None:
        """Create the tracker.

        Args:
            tracked: The operators.
            steps: Dimension of the Krylov space.
            first_steps: The same for the first call, which starts at random.
        """
        self.steps, self.first_steps = steps, first_steps
        self.convolutions = [op for op in tracked if not op.is_matrix]
        self.groups: dict[tuple[int, int], list[Operator]] = defaultdict(list)
        for op in tracked:
            if op.is_matrix:
                self.groups[op.weight.shape[0], op.weight[0].numel()].append(op)
        self.vectors: dict[tuple[int, int], Tensor] = {}

    def state(self) -> dict[str, Tensor]:
        """Return the singular vectors, by the shape of their matrices."""
        return {f"{m}x{n}": vectors for (m, n), vectors in self.vectors.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the vectors that :meth:`state` returned; none of a shape start anew.

        Args:
            state: Shape to vectors.
        """
        self.vectors = {
            (m, n): state[f"{m}x{n}"].to(group[0].weight.device)
            for (m, n), group in self.groups.items()
            if f"{m}x{n}" in state
        }

    def measure(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a scalar tensor per name.

        Args:
            weights: The whole weights, or tensors like them such as updates, by operator name.
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
                # not the old vector alone: a direction orthogonal to it may have become the largest
                start = self.vectors[shape] + 0.3 * start / start.norm(dim=1, keepdim=True)
            steps = self.steps if shape in self.vectors else self.first_steps
            found, vectors = krylov_sigma(matrices, start, steps)
            # a zero matrix, such as a skipped update, tells no direction
            self.vectors[shape] = torch.where(found.unsqueeze(1) > 0.0, vectors, start)
            sigmas.update(zip((op.name for op in group), found, strict=True))
        for op in self.convolutions:
            sigmas[op.name] = conv_sigma_bound(weights[op.name], op.stride, op.groups).amax()
        return sigmas
