"""CenterNorm: the Lipschitz-continuous replacement of LayerNorm."""

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer import kernels


class CenterNorm(nn.Module):
    r"""Center each token over its channels, then scale and shift it.

    .. math:: CN(x) = \gamma \odot \frac{d}{d-1} (x - \mathrm{mean}(x)) + \beta

    The map is affine. Its 2-norm Lipschitz constant per token is
    :math:`\sigma_{max}(\mathrm{diag}(\gamma) \frac{d}{d-1} (I - 11^T/d)) \le \max|\gamma| d/(d-1)`,
    with equality at initialization. LayerNorm divides by the standard deviation of the token and
    has no Lipschitz constant.

    In training in float32 on the CPU, the backward pass reads the output instead of the input,
    which saves memory. An operation that changes the output in place is then an error there.

    Shape:
        x: [..., C], channels last; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.layers import CenterNorm
        >>> CenterNorm(4)(torch.tensor([[1.0, 2.0, 3.0, 6.0]])).detach()
        tensor([[-2.6667, -1.3333,  0.0000,  4.0000]])

    Reference:
        Qi et al. 2023 (LipsFormer), section 3, CenterNorm.
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
            dtype: Data type of the parameters.

        Raises:
            ValueError: If `dim` is below 2.
        """
        super().__init__()
        if dim < 2:
            raise ValueError(f"CenterNorm needs dim >= 2 to scale by dim/(dim - 1), got dim={dim}")
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, unit: bool = False) -> None:
        """Set the gain to one, or with `unit` to (d - 1) / d, and the bias to zero.

        The Lipschitz constant is d / (d - 1) with a gain of one and 1 with `unit`.
        """
        nn.init.constant_(self.weight, (self.dim - 1) / self.dim if unit else 1.0)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` ([..., C]).

        Raises:
            ValueError: If x has another number of channels.
        """
        if x.shape[-1] != self.dim:
            raise ValueError(
                f"x has {x.shape[-1]} channels, but CenterNorm({self.dim}) takes {self.dim}, in "
                "the last dimension"
            )
        if kernels.usable(
            "center_norm", x, self.weight, training=self.training, unless=self.obstacle
        ):
            return kernels.center_affine(x, self.weight, self.bias)
        centered = x - x.mean(dim=-1, keepdim=True)
        y = torch.addcmul(self.bias, centered, self.weight * (self.dim / (self.dim - 1)))
        # The next layer needs the type of the input, unless autocast casts it there. There is no
        # autocast on the meta device.
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        return y if autocast else y.to(x.dtype)

    def obstacle(self) -> str | None:
        """Return why the kernels do not compute the norm, or None."""
        if not self.weight.shape == self.bias.shape == (self.dim,):
            return "the gain or the bias was replaced by one of another shape"
        return None

    def extra_repr(self) -> str:
        """Show the number of channels."""
        return f"{self.dim}"


register_notrace_module(CenterNorm)  # FX cannot trace the choice of a kernel
