"""ELU that costs less on a CPU."""

from torch import Tensor, nn

from lipsformer import kernels

__all__ = ["ELU"]


class ELU(nn.ELU):
    r"""Apply `torch.nn.ELU`, on a CPU with the compiled kernel.

    .. math:: \mathrm{ELU}(x) = x \text{ if } x > 0, \text{ else } \alpha (e^x - 1)

    Results differ from PyTorch's in rounding only.

    Shape:
        x: [...]. The output has the shape of x.

    Example:
        >>> import torch
        >>> from lipsformer.graph.elu import ELU
        >>> ELU()(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.6321,  0.0000,  1.0000])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply the function element by element."""
        if self.alpha == 1 and not self.inplace and kernels.usable("elu", input):
            return kernels.elu(input)
        return super().forward(input)
