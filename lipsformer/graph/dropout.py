"""Dropout whose mask costs less on a CPU."""

import torch
from torch import Tensor, nn

from lipsformer.layers._checks import check_dropout

__all__ = ["Dropout"]


class Dropout(nn.Dropout):
    """Apply `torch.nn.Dropout` with the same random numbers, so with the same result to the bit.

    PyTorch's `bernoulli_` takes a branch per element, which the processor cannot predict. Comparing
    uniform numbers needs no branch.

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
        check_dropout("dropout", p)
        super().__init__(p, inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Zero every element with probability p in training, and divide the others by 1 - p.

        Of a sparse CSR matrix only the stored elements need random numbers.
        """
        if input.layout is torch.sparse_csr:
            indices, values = (input.crow_indices(), input.col_indices()), self(input.values())
            return torch.sparse_csr_tensor(*indices, values, input.shape, check_invariants=False)
        if not self.training or not 0 < self.p < 1 or self.inplace or input.device.type != "cpu":
            return super().forward(input)
        keep = torch.empty_like(input, dtype=torch.double).uniform_() < 1 - self.p
        return input * keep.to(input.dtype).div_(1 - self.p)
