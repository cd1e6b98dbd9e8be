"""LayerScale and ReZero: other starts and shapes of the weight of a residual branch."""

from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from lipsformer.layers import WeightedResidual


def layer_scale_(residual: WeightedResidual, blocks: int) -> None:
    r"""Start the weights of a branch as LayerScale does.

    .. math:: y = x + \mathrm{diag}(\lambda) f(x)

    with every entry of lambda 0.1 up to 18 blocks, 1e-5 up to 24 and 1e-6 beyond.

    Args:
        residual: Its weights are changed in place and stay trainable.
        blocks: Number of blocks of the model.

    Reference:
        Touvron et al. 2021, "Going deeper with Image Transformers", arXiv:2103.17239.
    """
    start = 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6
    nn.init.constant_(residual.residual_scale, start)


class _OneForAll(nn.Module):
    """Repeat one number for all channels."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, number: Tensor) -> Tensor:
        return number.repeat(self.dim)

    def right_inverse(self, values: Tensor) -> Tensor:
        return values[:1].clone()


def rezero_(residual: WeightedResidual) -> None:
    r"""Give a branch one learned weight that starts at zero.

    .. math:: y = x + a f(x), \quad a = 0 \text{ at the start}

    Args:
        residual: Changed in place.

    Reference:
        Bachlechner et al. 2020, "ReZero is All You Need", arXiv:2003.04887.
    """
    nn.init.zeros_(residual.residual_scale)
    dim = len(residual.residual_scale)
    register_parametrization(residual, "residual_scale", _OneForAll(dim))
