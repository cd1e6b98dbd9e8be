"""Layers with the Lipschitz constant 1, whose products lose nothing: for certified models."""

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer import kernels
from lipsformer._precision import without_autocast
from lipsformer._renamed import renamed

GROUPS = 8  # of channels: 0 to 3 are folded, 2 to 5 move by one token
MOVES = ((1, 1), (1, -1), (2, 1), (2, -1))  # (axis of [B, H, W, C], step) of the groups 2 to 5
MAX_STEPS = 100  # of Newton and Schulz; each multiplies a small singular value by 1.5
CONVERGED = 1e-13  # length of a step, relative to that of the matrix


class FoldShift(nn.Module):
    r"""Take the absolute value of half of the channels, and move half of them by one token.

    The channels are eight equal groups. The groups 0 to 3 become :math:`|x|`. The groups 2, 3, 4
    and 5 move down, up, right and left by one token, cyclically. The map keeps the length of every
    input, so its 2-norm Lipschitz constant is 1, and its Jacobian is orthogonal almost everywhere.
    Linear layers before and after it make it a convolution with an activation.

    Shape:
        x: [B, H, W, C] with C a multiple of 8; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.layers import FoldShift
        >>> FoldShift()(-torch.ones(1, 1, 1, 8)).flatten().tolist()
        [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        """Fold and shift `x` ([B, H, W, C]).

        Raises:
            ValueError: If C is no multiple of 8.
        """
        if x.shape[-1] % GROUPS:
            raise ValueError(f"x has {x.shape[-1]} channels: use a multiple of {GROUPS}")
        if torch.is_grad_enabled() and kernels.usable("fold_shift", x, training=self.training):
            return kernels.fold_shift(x, GROUPS, MOVES)
        groups = list(x.chunk(GROUPS, dim=-1))
        groups[:4] = [group.abs() for group in groups[:4]]
        for index, (axis, step) in enumerate(MOVES, start=2):
            groups[index] = groups[index].roll(step, axis)
        return torch.cat(groups, dim=-1)


register_notrace_module(FoldShift)  # FX cannot trace the choice of a kernel


class JoinTokens(nn.Module):
    """Join all tokens of a map to one long token, without any loss: [B, H, W, C] to [B, 1, 1, HWC].

    Example:
        >>> import torch
        >>> from lipsformer.layers import JoinTokens
        >>> JoinTokens()(torch.zeros(2, 3, 5, 7)).shape
        torch.Size([2, 1, 1, 105])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Join the tokens of `x` ([B, H, W, C])."""
        return x.flatten(1)[:, None, None]


@torch.no_grad()
@without_autocast
def orthogonalize(weight: Tensor, exact: bool = False) -> Tensor:
    r"""Move a weight towards the nearest orthogonal matrix, by a step of Newton and Schulz.

    .. math:: W \leftarrow \tfrac 3 2 W - \tfrac 1 2 W W^T W

    A singular value s becomes (3 s - s^3)/2, which is at most 1 for every s in [0, 2]. One step
    after a small change of an orthogonal matrix leaves an error of the square of the change.

    Args:
        weight: [out, in, ...], reshaped to [out, in * ...]. Half precision is widened to float32.
        exact: Make as many steps in float64 as lead to the nearest matrix itself. A singular value
            below 1e-13 of the largest one counts as 0, and stays 0. LAPACK's singular value
            decomposition would be shorter, but may fail where singular values are equal.

    Returns:
        A new tensor with the shape and the dtype of `weight`.

    Example:
        >>> import torch
        >>> from lipsformer.layers import orthogonalize
        >>> orthogonalize(torch.diag(torch.tensor([0.9, 1.1])))
        tensor([[0.9855, 0.0000],
                [0.0000, 0.9845]])
    """
    matrix = weight.flatten(1).to(torch.promote_types(weight.dtype, torch.float32))
    matrix = _nearest(matrix.double()) if exact else _step(matrix)
    return matrix.reshape(weight.shape).to(weight.dtype)


def orthogonal_parts(name: str, weight: Tensor) -> tuple[Tensor, ...]:
    """Return the matrices of a weight that are orthogonal one by one, as views of it.

    The projections to queries, keys and values are three matrices, because `ContractiveResidual` of
    `lipsformer.models.lipsformer_contractive` needs a norm of at most 1 of each.

    Args:
        name: Name of the parameter, such as "attn.qkv.weight".
        weight: [out, in, ...].
    """
    return weight.chunk(3 if name.endswith("qkv.weight") else 1)


def _step(matrix: Tensor) -> Tensor:
    if matrix.shape[0] <= matrix.shape[1]:
        return 1.5 * matrix - 0.5 * (matrix @ matrix.T) @ matrix
    return 1.5 * matrix - 0.5 * matrix @ (matrix.T @ matrix)


def _nearest(matrix: Tensor) -> Tensor:
    """Return the limit of the iteration, begun with a multiple whose norm is at most 1."""
    squared = (matrix @ matrix.T).abs().sum(1).max()  # at least the square of the norm
    matrix = matrix / squared.sqrt().clamp_min(1.0)
    for _ in range(MAX_STEPS):
        before, matrix = matrix, _step(matrix)
        if (matrix - before).norm() <= CONVERGED * matrix.norm():
            break
    return matrix


__getattr__ = renamed(__name__)
