"""sigmaReparam: every weight is divided by its largest singular value."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization


class SigmaReparam(nn.Module):
    r"""Parametrization of a weight by its direction and its spectral norm.

    .. math:: \hat W = \frac{\gamma}{\sigma(W)} W, \quad \sigma(W) = u^T W v

    gamma is one learned number, 1 at the start, as in the paper; the authors' code for vision
    starts it at the initial spectral norm. The singular vectors u and v come from a singular value
    decomposition at the start and follow the weight by one step of power iteration whenever the
    weight is read in training, which a layer does one to three times per forward pass. A
    convolution's weight is reshaped to [out, in * k * k], as in the authors' code.

    Reference:
        Zhai et al. 2023, "Stabilizing Transformer Training by Preventing Attention Entropy
        Collapse", arXiv:2303.06296.
    """

    u: Tensor
    v: Tensor

    def __init__(self, weight: Tensor) -> None:
        """Take the singular vectors of the initial weight.

        Args:
            weight: [out, in, ...].
        """
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(()))
        left, _, right = torch.linalg.svd(weight.detach().flatten(1), full_matrices=False)
        self.register_buffer("u", left[:, 0].clone())
        self.register_buffer("v", right[0].clone())

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight with spectral norm gamma."""
        matrix = weight.flatten(1)
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.v = F.normalize(matrix.mT @ self.u, dim=0)
                self.u = F.normalize(matrix @ self.v, dim=0)
        sigma = self.u @ matrix @ self.v
        return weight * (self.gamma / sigma)


def sigma_reparam_(layer: nn.Module) -> None:
    """Reparametrize the weight of a linear layer or a convolution in place."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    register_parametrization(layer, "weight", SigmaReparam(weight))
