"""The instrument that shortens large updates."""

import torch
from torch import Tensor, nn

from lipsformer._arguments import check_positive
from lipsformer._sharding import assign, full_tensor
from lipsformer.analysis.instruments.base import InstrumentBase
from lipsformer.analysis.sigma import SigmaTracker, operators


class UpdateLimit(InstrumentBase):
    r"""Shorten updates that are large compared with their weight, in the spectral norm.

    .. math:: \Delta W \leftarrow \Delta W \min(1, s\, \sigma_1(W) / \sigma_1(\Delta W))

    This is the same as a lower learning rate for one weight and one step. Weight decay is part of
    the update.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.instruments import UpdateLimit
        >>> layer = torch.nn.Linear(2, 2)
        >>> _ = torch.nn.init.eye_(layer.weight)
        >>> limit = UpdateLimit(layer, share=0.1)
        >>> limit.before_step(0)
        >>> _ = torch.nn.init.constant_(layer.weight, 5.0)
        >>> limit.after_step(0)
        >>> torch.linalg.svdvals(layer.weight.detach() - torch.eye(2))[0]
        tensor(0.1000)

    Reference:
        Qi et al. 2025, "Taming Transformer without using learning rate warmup", arXiv:2505.21910.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        """Find the operators of the model. Each step needs memory for a copy of their weights.

        Args:
            model: The model without the wrappers of DDP or the compiler.
            share: Largest allowed ratio s of the norm of the update to that of the weight, > 0.

        Raises:
            ValueError: If `share` is not positive.
        """
        check_positive("share", share)
        self.share = share
        self.operators = operators(model)
        self.weights = SigmaTracker(self.operators)
        self.updates = SigmaTracker(self.operators)
        self.trackers = {"weights": self.weights, "updates": self.updates}
        self._before: dict[str, Tensor] = {}

    def before_step(self, step: int) -> None:
        """Copy the weights.

        Args:
            step: Number of optimizer steps completed before this one.
        """
        self._before = {op.name: full_tensor(op.weight).clone() for op in self.operators}

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Shorten the updates that were too large.

        Args:
            step: Number of optimizer steps completed before this one, as in `before_step`.
        """
        before, self._before = self._before, {}
        deltas = {op.name: full_tensor(op.weight) - before[op.name] for op in self.operators}
        allowed = self.weights.measure(before)
        moved = self.updates.measure(deltas)
        for op in self.operators:
            limit = self.share * allowed[op.name]
            factor = torch.where(moved[op.name] > limit, limit / moved[op.name], 1.0)
            factor = torch.where(limit > 0.0, factor, 1.0)  # Otherwise a zero weight stays zero.
            values = before[op.name] + factor.to(op.weight.dtype) * deltas[op.name]
            assign(op.weight, values)
