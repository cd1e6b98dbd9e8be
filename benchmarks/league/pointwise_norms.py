"""DyT and Derf: pointwise functions in the place of LayerNorm."""

import torch
from torch import Tensor, nn


class DyT(nn.Module):
    r"""Dynamic tanh.

    .. math:: y = \gamma \odot \tanh(a x) + \beta

    a is one learned number, 0.5 at the start.

    Reference:
        Zhu et al. 2025, "Transformers without Normalization", arXiv:2503.10622.
    """

    def __init__(self, dim: int) -> None:
        """Create the parameters.

        Args:
            dim: Number of channels C.
        """
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to `x` ([..., C])."""
        return torch.addcmul(self.bias, torch.tanh(self.alpha * x), self.weight)


class Derf(DyT):
    r"""Dynamic erf.

    .. math:: y = \gamma \odot \mathrm{erf}(a x + s) + \beta

    a and s are one learned number each, 0.5 and 0 at the start.

    Reference:
        Chen et al. 2025, "Stronger Normalization-Free Transformers", arXiv:2512.10938.
    """

    def __init__(self, dim: int) -> None:
        """Create the parameters.

        Args:
            dim: Number of channels C.
        """
        super().__init__(dim)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to `x` ([..., C])."""
        return torch.addcmul(self.bias, torch.erf(self.alpha * x + self.shift), self.weight)
