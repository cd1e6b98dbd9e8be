"""Instruments that steer training: spectral caps, and a limit on the size of an update."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from lipsformer.analysis.bounds import Domain, gathered_bound
from lipsformer.analysis.instrument import Instrument
from lipsformer.analysis.sigma import (
    Operator,
    SigmaTracker,
    assign,
    operators,
    residual_scale_of,
    whole,
)
from lipsformer.layers import CenterNorm
from lipsformer.layers.spectral import clip_singular_values, conv_sigma_bound


class SpectralCap(Instrument):
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
        sigma: float | None = None,
        *,
        mode: Literal["project", "soft"] = "project",
        strength: float = 0.1,
        residual_scale: float | None = None,
        gain: float | None = None,
    ) -> None:
        """Create the cap.

        Args:
            model: The model inside DDP's or the compiler's wrapper.
            sigma: Largest allowed norm of a linear operator, > 0; None for no limit.
            mode: "project" or "soft".
            strength: Share of the excess that ``soft`` takes back per update, in (0, 1].
            residual_scale: Largest allowed |alpha| of the residual branches; None for no limit.
            gain: Largest allowed |gamma| of CenterNorm; None for no limit.

        Raises:
            ValueError: If an argument is out of range.
        """
        for name, limit in (("sigma", sigma), ("residual_scale", residual_scale), ("gain", gain)):
            if limit is not None and limit <= 0.0:
                raise ValueError(f"{name} must be > 0, got {limit}")
        if mode not in ("project", "soft"):
            raise ValueError(f"mode must be 'project' or 'soft', got {mode!r}")
        if not 0.0 < strength <= 1.0:
            raise ValueError(f"strength must lie in (0, 1], got {strength}")
        self.sigma = math.inf if sigma is None else sigma
        self.mode, self.strength = mode, strength
        self.operators = [] if sigma is None else operators(model)
        self.tracker = SigmaTracker([op for op in self.operators if op.is_matrix])
        self.trackers = {"weights": self.tracker}
        self.clamped: list[tuple[Tensor, float]] = []
        for module in model.modules():
            if residual_scale is not None and (alpha := residual_scale_of(module)) is not None:
                self.clamped.append((alpha, residual_scale))
            if gain is not None and isinstance(module, CenterNorm):
                self.clamped.append((module.weight, gain))

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Bring the weights back towards or below the cap, on estimates of the singular values.

        Args:
            step: Number of steps made before the one that just ended.
        """
        weights = {op.name: whole(op.weight) for op in self.operators}
        sigmas = self.tracker.measure(weights)
        above = set(sigmas)
        if self.mode == "project" and sigmas:
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
    def before_eval(self) -> Mapping[str, Mapping[str, float]]:
        """Project every weight exactly, in either mode."""
        for op in self.operators:
            weight = whole(op.weight)
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


class UpdateLimit(Instrument):
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
        self.updates = SigmaTracker(self.operators)
        self.trackers = {"weights": self.weights, "updates": self.updates}
        self._before: dict[str, Tensor] = {}

    def before_step(self, step: int) -> None:
        """Keep the weights.

        Args:
            step: Number of steps made so far.
        """
        self._before = {op.name: whole(op.weight).clone() for op in self.operators}

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Shorten the updates that were too large.

        Args:
            step: Number of steps made before the one that just ended.
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


class BoundExceededError(RuntimeError):
    """The proved bound of a model lies above the stated one."""


class BoundCheck(Instrument):
    """Measures the proved bound of a model before every evaluation and compares it with a limit."""

    def __init__(
        self, models: Mapping[str, nn.Module], domain: Domain, limit: float | None = None
    ) -> None:
        """Create the check.

        Args:
            models: The models that are evaluated, inside the wrappers, by kind of their weights.
            domain: Inputs for which the bound holds.
            limit: Largest allowed bound, > 0; None only measures.
        """
        self.models, self.domain, self.limit = models, domain, limit
        self.trackers = {}

    def before_eval(self) -> Mapping[str, Mapping[str, float]]:
        """Return ``bound_log10`` by kind of weights; FSDP2 may have sharded them.

        Raises:
            BoundExceededError: If a bound exceeds the limit.
        """
        return {kind: {"bound_log10": self._measure(model)} for kind, model in self.models.items()}

    def _measure(self, model: nn.Module) -> float:
        log10 = gathered_bound(model, self.domain).log10
        if self.limit is not None and not log10 <= math.log10(self.limit):
            raise BoundExceededError(
                f"the proved Lipschitz bound is 10^{log10:.3f}, above the stated {self.limit:g}: "
                "tighten the caps or raise the limit"
            )
        return log10
