"""CenterNorm: the Lipschitz-continuous replacement of LayerNorm."""

import torch
from torch import Tensor, nn


class CenterNorm(nn.Module):
    r"""Centre each token over its channels, then scale and shift it.

    .. math:: CN(x) = \gamma \odot \frac{d}{d-1} (x - \mathrm{mean}(x)) + \beta

    The map is affine. Its 2-norm Lipschitz constant per token is
    :math:`\sigma_{max}(\mathrm{diag}(\gamma) \frac{d}{d-1} (I - 11^T/d)) \le \max|\gamma| d/(d-1)`,
    with equality at initialisation. LayerNorm divides by the standard deviation of the token and
    has no Lipschitz constant.

    Shape:
        x: [..., C], channels last; the output has the same shape.

    Reference:
        Qi et al. 2023 (LipsFormer), CenterNorm.
    """

    def __init__(
        self,
        dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the gain (ones) and the bias (zeros).

        Args:
            dim: Number of channels C, at least 2: one channel minus its own mean is always zero.
            device: Device of the parameters.
            dtype: Type of the parameters.

        Raises:
            ValueError: If ``dim`` is below 2.
        """
        super().__init__()
        if dim < 2:
            raise ValueError(f"CenterNorm needs dim >= 2 to scale by dim/(dim - 1), got dim={dim}")
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gain to one and the bias to zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` ([..., C])."""
        centred = x - x.mean(dim=-1, keepdim=True)
        return torch.addcmul(self.bias, centred, self.weight * (self.dim / (self.dim - 1)))

    def extra_repr(self) -> str:
        """Show the number of channels."""
        return f"{self.dim}"
