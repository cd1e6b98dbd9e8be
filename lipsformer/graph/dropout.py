"""Dropout whose mask costs less on a CPU."""

import torch
from torch import Tensor, nn

from lipsformer._arguments import check_fraction

__all__ = ["Dropout"]


class Dropout(nn.Dropout):
    r"""Apply dropout, on a CPU with 16 random bits per element.

    .. math:: y = \frac{m}{1 - p} x, \quad m \in \{0, 1\}, \quad P(m = 0) = p

    PyTorch's `bernoulli_` draws 64 bits per element and takes a branch, which the processor cannot
    predict. Deviation: the probability is rounded to a multiple of 2^-16, in the factor too, so
    that the mean stays that of x.

    Shape:
        x: [...], dense or sparse CSR. The output has the shape of x.

    Example:
        >>> import torch
        >>> from lipsformer.graph.dropout import Dropout
        >>> Dropout(0.5).eval()(torch.ones(3))
        tensor([1., 1., 1.])
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        """Store the probability, which must be in [0, 1]; `torch.nn.Dropout` accepts NaN."""
        check_fraction("dropout", p)
        super().__init__(p, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Zero every element with probability p in training, and divide the others by 1 - p.

        Of a sparse CSR matrix only the stored elements need random numbers.
        """
        if input.layout is torch.sparse_csr:
            indices, values = (input.crow_indices(), input.col_indices()), self(input.values())
            return torch.sparse_csr_tensor(*indices, values, input.shape, check_invariants=False)
        kept = round((1 - self.p) * 2**16)  # of the 2^16 numbers
        partly = self.training and 0 < kept < 2**16
        if not partly or self.inplace or input.device.type != "cpu":
            return super().forward(input)
        words = input.new_empty(-(-input.numel() // 4), dtype=torch.long).random_(-(2**63), None)
        numbers = words.view(torch.short)[: input.numel()].view(input.shape)
        keep = numbers < kept - 2**15
        return input * keep.to(input.dtype).mul_(2**16 / kept)
