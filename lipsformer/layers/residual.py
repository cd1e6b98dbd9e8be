"""WeightedResidual: a shortcut whose branch enters with a small learnable weight."""

import math
from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer._arguments import check_drop_path
from lipsformer.layers._residual_kernels import declared, enter


class WeightedResidual(nn.Module):
    r"""Add a branch to its input with a learnable weight per channel, and drop path.

    .. math:: y = x + \alpha \odot \mathrm{DropPath}(f(x))

    2-norm Lipschitz constant per token: at most :math:`1 + \max|\alpha| Lip(f)` in evaluation and
    :math:`1 + \max|\alpha| Lip(f) / (1 - p)` in training with drop path rate p. With
    :math:`\alpha = 1/B` in B blocks of b branches, the product over all branches is at most
    :math:`e^{b \max Lip(f)}`.

    A pass over the map is saved if the branch and the residual share the last operator of the
    branch. Such a branch names this operator in the class attribute `ends_in`:

    - `"linear"`: `branch(x, output_scale=alpha)` returns alpha * f(x), because its last linear
      layer multiplies alpha into its weight.
    - `"gelu"`: `branch(x, last_gelu=False)` returns z with f(x) = GELU(z), and the residual
      computes x + alpha * GELU(z) at once.

    In training on a CPU, the samples that drop path drops do not enter the branch, if its class has
    `treats_samples_alone = True`, which says that no sample changes the result of another one.
    With further arguments, which may belong to the samples, all of them enter.

    Both attributes belong in the class that defines `forward`. A subclass that defines its own
    `forward` sets them again if they hold for it.

    Shape:
        x: [B, ..., C], channels last; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.layers import WeightedResidual
        >>> residual = WeightedResidual(torch.nn.ReLU(), dim=3, init_value=0.1)
        >>> residual(torch.tensor([[-1.0, 0.0, 2.0]])).detach()
        tensor([[-1.0000,  0.0000,  2.2000]])

    Reference:
        Qi et al. 2023 (LipsFormer), weighted residual shortcut and Theorem 2.
    """

    keep_rate: Tensor | None

    def __init__(
        self,
        branch: nn.Module,
        dim: int,
        init_value: float,
        drop_path: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the residual scale alpha.

        Args:
            branch: f, from [B, ..., C] to the same shape.
            dim: Number of channels C.
            init_value: Initial value of every channel's weight. The paper uses 1 / (number of
                blocks).
            drop_path: Probability, in [0, 1), of dropping the branch of a sample in training.
            device: Device of the parameter.
            dtype: Data type of the parameter.

        Raises:
            ValueError: If `drop_path` is outside [0, 1), or `init_value` is not finite.
        """
        super().__init__()
        if not math.isfinite(init_value):
            raise ValueError(f"init_value={init_value} must be finite")
        self.init_value = init_value
        self.residual_scale = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.drop_path = drop_path
        self.branch = branch
        self.reset_parameters()

    @property
    def drop_path(self) -> float:
        """Drop path rate. It can be set at any time, for example to raise it during a training."""
        return self._drop_path

    @drop_path.setter
    def drop_path(self, rate: float) -> None:
        check_drop_path("drop_path", rate)
        self._drop_path = rate
        # A number would be a constant of compiled kernels, which blocks could then not share.
        keep_rate = torch.empty((), device=self.residual_scale.device) if rate > 0.0 else None
        self.register_buffer("keep_rate", keep_rate, persistent=False)
        self.init_non_persistent_buffers()

    def reset_parameters(self) -> None:
        """Set every channel's weight to its initial value, and fill the buffer of drop path."""
        nn.init.constant_(self.residual_scale, self.init_value)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Fill the buffer of drop path; timm calls this after `to_empty`."""
        if self.keep_rate is not None:
            keep = 1.0 - self.drop_path
            self.keep_rate = torch.full_like(
                self.keep_rate, keep, device=self.residual_scale.device
            )

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any
    ) -> None:
        """Fill the buffer too, which no checkpoint holds: a model from the meta device lacks it."""
        super()._load_from_state_dict(*args)
        self.init_non_persistent_buffers()

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """Return `x + residual_scale * drop_path(branch(x))`.

        Args:
            x: [B, ..., C].
            *context: Further arguments of the branch, such as the edges of a graph.
        """
        entering, branch = enter(self, x, context), self.branch
        ends_in = declared(branch, "ends_in")
        if ends_in == "linear":
            scaled = branch(entering.inputs, *context, output_scale=self.residual_scale)
            return entering.add_scaled(scaled)
        scale = entering.masked(self.residual_scale)
        if ends_in == "gelu" and entering.fuses_gelu(branch, scale):
            return entering.add_gelu(branch(entering.inputs, *context, last_gelu=False), scale)
        return entering.add(branch(entering.inputs, *context), scale)

    def draw_mask(self, x: Tensor) -> Tensor | None:
        """Draw the factor that drop path puts on the branch of each sample of `x` ([B, ..., C]).

        Returns:
            [B, 1, ..., 1]: 0 for a dropped sample, 1 / (1 - drop_path) for any other. None if
            nothing can be dropped.
        """
        if not self.training or self.keep_rate is None:
            return None
        shape = [x.shape[0]] + [1] * (x.ndim - 1)
        dtype = self.residual_scale.dtype
        if torch.compiler.is_compiling():
            kept = torch.rand(shape, device=x.device) < self.keep_rate
            return kept.to(dtype) / self.keep_rate.to(dtype)
        keep = 1.0 - self.drop_path
        return x.new_empty(shape, dtype=dtype).bernoulli_(keep) / keep

    def extra_repr(self) -> str:
        """Show the initial value and the drop path rate."""
        return f"init_value={self.init_value:.4g}, drop_path={self.drop_path:.3g}"


register_notrace_module(WeightedResidual)  # FX cannot trace drop path
