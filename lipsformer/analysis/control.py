"""Instruments that steer training: spectral caps, and a limit on the size of an update."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lipsformer.analysis.sigma import Operator, SigmaTracker, assign, operators, whole
from lipsformer.layers import CenterNorm, WeightedResidual
from lipsformer.layers.spectral import clip_singular_values, conv_sigma_bound


class SpectralCap:
    """Holds the norm of every linear operator, and if asked every scale, below a stated value.

    ``project`` replaces a weight above the cap by the nearest one within it (Frobenius norm): its
    singular values are clipped. ``soft`` shrinks it, each update taking back a share of the excess
    over the cap, which is then approached and not held. Channels of a depthwise convolution and
    groups of others are shrunk as a whole. With every norm, scale and gain capped, the proved bound
    of the model has a stated ceiling.
    """

    def __init__(
        self,
        model: nn.Module,
        sigma: float,
        *,
        mode: Literal["project", "soft"] = "project",
        strength: float = 0.1,
        residual_scale: float | None = None,
        gain: float | None = None,
    ) -> None:
        """Create the cap.

        Args:
            model: The model inside DDP's or the compiler's wrapper.
            sigma: Largest allowed norm of a linear operator, > 0.
            mode: "project" or "soft".
            strength: Share of the excess that ``soft`` takes back per update, in (0, 1].
            residual_scale: Largest allowed |alpha| of the residual branches; None for no limit.
            gain: Largest allowed |gamma| of CenterNorm; None for no limit.

        Raises:
            ValueError: If an argument is out of range.
        """
        if sigma <= 0.0:
            raise ValueError(f"sigma must be > 0, got {sigma}")
        if mode not in ("project", "soft"):
            raise ValueError(f"mode must be 'project' or 'soft', got {mode!r}")
        if not 0.0 < strength <= 1.0:
            raise ValueError(f"strength must lie in (0, 1], got {strength}")
        self.sigma, self.mode, self.strength = sigma, mode, strength
        self.operators = operators(model)
        self.tracker = SigmaTracker([op for op in self.operators if op.is_matrix])
        self.clamped: list[tuple[Tensor, float]] = []
        for module in model.modules():
            scale: Any = getattr(module, "residual_scale", None)
            weight: Any = getattr(module, "weight", None)
            if isinstance(module, WeightedResidual) and residual_scale is not None:
                self.clamped.append((scale, residual_scale))
            if isinstance(module, CenterNorm) and gain is not None:
                self.clamped.append((weight, gain))

    def before_step(self, update: int) -> None:
        """Do nothing; part of the interface of instruments."""

    @torch.no_grad()
    def after_step(self, update: int) -> None:
        """Bring the weights back towards or below the cap, on estimates of the singular values.

        Args:
            update: Number of updates made before the one that just ended.
        """
        weights = {op.name: whole(op.weight) for op in self.operators}
        sigmas = self.tracker.measure(weights)
        above = set(sigmas)
        if self.mode == "project":
            # estimates come from below: look closely at all that may lie above
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
    def enforce(self) -> None:
        """Project every weight exactly, in either mode; call it before weights are judged."""
        for op in self.operators:
            weight = whole(op.weight)
            if op.is_matrix:
                assign(op.weight, clip_singular_values(weight, self.sigma))
            else:
                assign(op.weight, self._shrink_groups(op, weight, exact=True))
        self._clamp()

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


class UpdateLimit:
    r"""Shortens updates that are large against the weight, in the spectral norm.

    .. math:: \Delta W \leftarrow \Delta W \min(1, s\, \sigma_1(W) / \sigma_1(\Delta W))

    The same as lowering the learning rate of that weight for this update. Weight decay is part of
    the update.

    Reference:
        Qi et al. 2025, "Taming Transformer without using learning rate warmup", arXiv:2505.21910.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        """Create the limit; it keeps a copy of the weights during an update.

        Args:
            model: The model inside DDP's or the compiler's wrapper.
            share: Largest allowed ratio s of the norms, > 0.

        Raises:
            ValueError: If ``share`` is not positive.
        """
        if share <= 0.0:
            raise ValueError(f"share must be > 0, got {share}")
        self.share = share
        self.operators = operators(model)
        self.weights = SigmaTracker(self.operators)
        self.updates = SigmaTracker(self.operators, steps=16)
        self._before: dict[str, Tensor] = {}

    def before_step(self, update: int) -> None:
        """Keep the weights.

        Args:
            update: Number of updates made so far.
        """
        self._before = {op.name: whole(op.weight).clone() for op in self.operators}

    @torch.no_grad()
    def after_step(self, update: int) -> None:
        """Shorten the updates that were too large.

        Args:
            update: Number of updates made before the one that just ended.
        """
        before, self._before = self._before, {}
        deltas = {op.name: whole(op.weight) - before[op.name] for op in self.operators}
        allowed = self.weights.measure(before)
        moved = self.updates.measure(deltas)
        for op in self.operators:
            limit = self.share * allowed[op.name]
            factor = (limit / moved[op.name].clamp_min(1e-30)).clamp(max=1.0)
            factor = torch.where(limit > 0.0, factor, 1.0)  # a zero weight has to start somewhere
            values = before[op.name] + factor.to(op.weight.dtype) * deltas[op.name]
            assign(op.weight, values)
