"""The instrument that keeps norms and scales below a limit."""

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipsformer._arguments import check_positive
from lipsformer._sharding import assign, full_tensor
from lipsformer.analysis.conv_norms import conv_sigma_bound
from lipsformer.analysis.instruments.base import InstrumentBase
from lipsformer.analysis.sigma import (
    Operator,
    SigmaTracker,
    gain_of,
    operators,
    residual_scale_of,
)
from lipsformer.layers.spectral import clip_singular_values


class SpectralCap(InstrumentBase):
    """Keep the norms of linear layers and 2-d convolutions, and optionally scales, below a limit.

    The mode `project` replaces a weight above the cap by the nearest weight within it in the
    Frobenius norm, whose singular values are clipped. The mode `soft` shrinks the weight: every
    step removes a fraction of the excess, so the weight approaches the cap but may exceed it. The
    channels of a depthwise convolution and the groups of other convolutions are scaled as a whole.
    If norms, residual scales and gains are all capped, the proved bound of the model has a fixed
    ceiling.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.instruments import SpectralCap
        >>> layer = torch.nn.Linear(2, 2)
        >>> with torch.no_grad():
        ...     _ = layer.weight.copy_(torch.diag(torch.tensor([3.0, 0.5])))
        >>> SpectralCap(layer, sigma=1.0).before_eval()
        {}
        >>> torch.linalg.svdvals(layer.weight.detach())
        tensor([1.0000, 0.5000])
    """

    def __init__(
        self,
        model: nn.Module,
        sigma: float | None = None,
        *,
        mode: Literal["project", "soft"] = "project",
        strength: float = 0.1,
        residual_scale: float | None = None,
        gain: float | None = None,
        average: nn.Module | None = None,
    ) -> None:
        """Find the weights to cap.

        Args:
            model: The model without the wrappers of DDP or the compiler.
            sigma: Largest allowed norm of a linear operator, > 0; None for no limit.
            mode: "project" or "soft".
            strength: Fraction of the excess that `soft` removes per step, in (0, 1].
            residual_scale: Largest allowed |alpha| of the residual branches; None for no limit. It
                has no effect on a model without weighted residuals or layer scales.
            gain: Largest allowed |gamma| of CenterNorm; None for no limit. It has no effect on a
                model without CenterNorm.
            average: A moving average of the model, whose weights are projected before every
                evaluation. An average of weights that `soft` has not yet moved to the cap exceeds
                it. None for no average.

        Raises:
            ValueError: If an argument is out of range, or if `sigma` is given and the model has no
                linear layer or 2-d convolution, or has a weight that cannot be followed and would
                exceed the limit unnoticed: that of another convolution, a recurrent or bilinear
                layer, an embedding, PyTorch's attention, or a graph convolution without a linear
                layer, such as GCNII's.
        """
        for name, limit in (("sigma", sigma), ("residual_scale", residual_scale), ("gain", gain)):
            if limit is not None:
                check_positive(name, limit)
        if mode not in ("project", "soft"):
            raise ValueError(f"mode must be 'project' or 'soft', got {mode!r}")
        if not 0.0 < strength <= 1.0:
            raise ValueError(f"strength must lie in (0, 1], got {strength}")
        self.sigma = math.inf if sigma is None else sigma
        self.mode, self.strength = mode, strength
        self.operators = [] if sigma is None else _every_operator(model)
        self.averaged = [] if sigma is None or average is None else _every_operator(average)
        if sigma is not None and not self.operators:
            raise ValueError(
                f"sigma={sigma} has no effect: the model has no linear layer or 2-d convolution"
            )
        self.tracker = SigmaTracker([op for op in self.operators if op.is_matrix])
        self.trackers = {"weights": self.tracker}
        self.clamped: list[tuple[Tensor, float]] = []
        for module in model.modules():
            if residual_scale is not None and (alpha := residual_scale_of(module)) is not None:
                self.clamped.append((alpha, residual_scale))
            if gain is not None and (gamma := gain_of(module)) is not None:
                self.clamped.append((gamma, gain))

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Move the weights to the cap or towards it, by estimates of the singular values.

        Args:
            step: Number of optimizer steps completed before this one.
        """
        weights = {op.name: full_tensor(op.weight) for op in self.operators}
        sigmas = self.tracker.measure(weights)
        above = set(sigmas)
        if self.mode == "project" and sigmas:
            # The estimates are lower bounds, so compute exactly whatever may lie above the cap.
            found = torch.stack(list(sigmas.values())) > 0.97 * self.sigma
            above = {name for name, high in zip(sigmas, found.tolist(), strict=True) if high}
        for op in self.operators:
            weight = weights[op.name]
            if not op.is_matrix:
                assign(op.weight, self._shrink_groups(op, weight))
            elif op.name in above and self.mode == "project":
                assign(op.weight, clip_singular_values(weight, self.sigma))
            elif op.name in above:
                assign(op.weight, weight * self._factor(sigmas[op.name]))
        self._clamp()

    @torch.no_grad()
    def before_eval(self) -> Mapping[str, Mapping[str, float]]:
        """Project every weight of the model and of its average exactly, in both modes."""
        for op in (*self.operators, *self.averaged):
            weight = full_tensor(op.weight)
            if op.is_matrix:
                assign(op.weight, clip_singular_values(weight, self.sigma))
            else:
                assign(op.weight, self._shrink_groups(op, weight, exact=True))
        self._clamp()
        return {}

    def _factor(self, sigma: Tensor, exact: bool = False) -> Tensor:
        strength = self.strength if self.mode == "soft" and not exact else 1.0
        return 1.0 - strength * (1.0 - self.sigma / sigma.clamp_min(self.sigma))

    def _shrink_groups(self, op: Operator, weight: Tensor, exact: bool = False) -> Tensor:
        factor = self._factor(conv_sigma_bound(weight, op.stride, op.groups), exact)
        factor = factor.repeat_interleave(len(weight) // op.groups)
        return weight * factor[:, None, None, None].to(weight.dtype)

    def _clamp(self) -> None:
        for parameter, limit in self.clamped:
            parameter.clamp_(-limit, limit)


def _every_operator(model: nn.Module) -> list[Operator]:
    """Return the operators of a model, or raise if one of them cannot be capped.

    A weight that several modules share is listed once for each stride and number of groups with
    which they apply it.
    """
    followed = operators(model)
    known = {id(op.weight) for op in followed}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if parametrize.is_parametrized(module):
            own |= {key: getattr(module, key) for key in cast(Any, module.parametrizations)}
        if any("weight" in key and w.ndim > 1 and id(w) not in known for key, w in own.items()):
            raise ValueError(
                f"{name or 'the model'} is of {type(module).__name__}, which cannot be capped: "
                "only linear layers and 2-d convolutions can"
            )
    return list({(id(op.weight), op.stride, op.groups): op for op in followed}.values())
