"""Instruments: objects that the engine calls around every optimizer step and before evaluation.

`Monitor` records figures. `SpectralCap` and `UpdateLimit` change the weights. `BoundCheck` compares
the proved bound of a model with a limit. The engine's `Instrument` protocol names the methods.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from lipsformer.analysis.attention_maps import probe_attention
from lipsformer.analysis.bounds import Domain, gathered_bound
from lipsformer.analysis.sigma import (
    Operator,
    SigmaTracker,
    assign,
    full_tensor,
    gain_of,
    operators,
    residual_scale_of,
)
from lipsformer.layers._checks import check_positive
from lipsformer.layers.spectral import clip_singular_values, conv_sigma_bound

Write = Callable[[int, Mapping[str, float]], None]


class _Instrument:
    """Base of the instruments: methods that do nothing, and the state of the sigma trackers.

    The trackers keep singular vectors from step to step. The vectors decide the last digits of
    records and of capped weights, so a run that is resumed needs them to continue exactly.
    """

    trackers: dict[str, SigmaTracker]

    def before_step(self, step: int) -> None:
        """Act before the optimizer step, when the gradients are final.

        Args:
            step: Number of optimizer steps completed before this one.
        """

    def after_step(self, step: int) -> None:
        """Act after the optimizer step, when the weights have changed.

        Args:
            step: Number of optimizer steps completed before this one: the same value as in
                `before_step`. `step + 1` steps have been completed.
        """

    def before_eval(self) -> Mapping[str, Mapping[str, float]]:
        """Act before the weights are evaluated or saved.

        Returns:
            Figures to add to the records of the evaluation, by kind of weights ("raw" or "ema").
        """
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors on which the next step depends."""
        return {
            f"{name}.{key}": vectors
            for name, tracker in self.trackers.items()
            for key, vectors in tracker.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state. Trackers that are missing in it start anew.

        Args:
            state: The result of `state_dict`.
        """
        for name, tracker in self.trackers.items():
            prefix = f"{name}."
            tracker.load_state_dict(
                {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            )


class Monitor(_Instrument):
    """Record figures of a model at an interval of steps and pass them to a callback.

    A record is flat. `<name>` is the name of a parameter or module:

    | key | value |
    |---|---|
    | `sigma/<name>` | largest singular value; for a convolution, a bound of its operator norm |
    | `update_ratio/<name>` | sigma of the update divided by sigma of the weight before it |
    | `grad_norm/<name>` | norm of the (clipped) gradient of a module's own parameters |
    | `residual_scale/<name>` | largest absolute weight of a residual branch |
    | `gain/<name>` | largest absolute gain of a CenterNorm |
    | `attn_entropy/<name>` | mean entropy of the attention's rows on the probe, in nats |
    | `max_score/<name>` | largest attention score on the probe |
    | `bound_log10` | proved bound of the model, in every `bound_every`-th record |
    | `seconds` | time that the record took |

    Under DDP and FSDP2 every rank must call `before_step` and `after_step`. The callback decides
    which rank writes.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.instruments import Monitor
        >>> layer = torch.nn.Linear(3, 2)
        >>> monitor = Monitor(layer, lambda completed, record: print(completed, sorted(record)))
        >>> monitor.before_step(0)  # call optimizer.step() between the two
        >>> monitor.after_step(0)
        1 ['seconds', 'sigma/weight', 'update_ratio/weight']
    """

    def __init__(
        self,
        model: nn.Module,
        write: Write,
        *,
        every: int = 200,
        probe: Tensor | None = None,
        domain: Domain | None = None,
        bound_every: int = 10,
    ) -> None:
        """Find the operators of the model.

        Args:
            model: The model without the wrappers of DDP or the compiler.
            write: Called with the number of completed steps and the record.
            every: Number of steps from one record to the next, >= 1.
            probe: A few inputs, on which the attention is measured; None leaves the attention out.
            domain: Domain of the bound; None leaves the bound out.
            bound_every: Number of records from one bound to the next, >= 1.

        Raises:
            ValueError: If `every` or `bound_every` is below 1.
        """
        if every < 1 or bound_every < 1:
            raise ValueError(f"every={every} and bound_every={bound_every} must be at least 1")
        self.model, self.write = model, write
        self.every, self.bound_every = every, bound_every
        self.probe, self.domain = probe, domain
        self.operators = operators(model)
        self.weights = SigmaTracker(self.operators)
        self.updates = SigmaTracker(self.operators)
        self.trackers = {"weights": self.weights, "updates": self.updates}
        self._before: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}
        self._seconds = 0.0

    def before_step(self, step: int) -> None:
        """Measure the gradients and copy the weights, if a record is due.

        Args:
            step: Number of optimizer steps completed before this one.
        """
        if step % self.every != 0:
            return
        started = time.perf_counter()
        squares: dict[str, list[Tensor]] = defaultdict(list)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                norm = full_tensor(parameter.grad).float().norm()
                squares[name.rpartition(".")[0]].append(norm.square())
        self._pending = {
            f"grad_norm/{name}": torch.stack(parts).sum().sqrt() for name, parts in squares.items()
        }
        self._before = {op.name: full_tensor(op.weight).clone() for op in self.operators}
        self._seconds = time.perf_counter() - started

    def after_step(self, step: int) -> None:
        """Measure the weights and write the record, if one is due.

        Args:
            step: Number of optimizer steps completed before this one, as in `before_step`.
        """
        if step % self.every != 0:
            return
        started = time.perf_counter()
        record = self._pending
        record.update(self._sigmas())
        for name, module in self.model.named_modules():
            if (scale := residual_scale_of(module)) is not None:
                record[f"residual_scale/{name}"] = full_tensor(scale).abs().amax()
            elif (gain := gain_of(module)) is not None:
                record[f"gain/{name}"] = full_tensor(gain).abs().amax()
        if self.probe is not None:
            record.update(probe_attention(self.model, self.probe))
        names = list(record)
        # The transfer of all values at once is the only time that the host waits for the device.
        values = torch.stack([record[name].float() for name in names]).tolist()
        figures = dict(zip(names, values, strict=True))
        if self.domain is not None and step // self.every % self.bound_every == 0:
            figures["bound_log10"] = gathered_bound(self.model, self.domain).log10
        self._before, self._pending = {}, {}
        figures["seconds"] = self._seconds + time.perf_counter() - started
        self.write(step + 1, figures)

    def _sigmas(self) -> dict[str, Tensor]:
        now = {op.name: full_tensor(op.weight) for op in self.operators}
        deltas = {name: weight - self._before[name] for name, weight in now.items()}
        old = self.weights.measure(self._before)
        new = self.weights.measure(now)
        moved = self.updates.measure(deltas)
        record = {f"sigma/{name}": sigma for name, sigma in new.items()}
        for name, sigma in moved.items():
            record[f"update_ratio/{name}"] = sigma / old[name].clamp_min(1e-30)
        return record


class SpectralCap(_Instrument):
    """Keep the norm of every linear operator, and optionally every scale, below a limit.

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
    ) -> None:
        """Find the weights to cap.

        Args:
            model: The model without the wrappers of DDP or the compiler.
            sigma: Largest allowed norm of a linear operator, > 0; None for no limit.
            mode: "project" or "soft".
            strength: Fraction of the excess that `soft` removes per step, in (0, 1].
            residual_scale: Largest allowed |alpha| of the residual branches; None for no limit.
            gain: Largest allowed |gamma| of CenterNorm; None for no limit.

        Raises:
            ValueError: If an argument is out of range, there is nothing to cap, or a weight cannot
                be followed.
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
        self.operators = [] if sigma is None else operators(model)
        if sigma is not None and not self.operators:
            raise ValueError(
                f"sigma={sigma} has no effect: the model has no nn.Linear or convolution"
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
        """Project every weight exactly, in both modes."""
        for op in self.operators:
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


class UpdateLimit(_Instrument):
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
            factor = (limit / moved[op.name].clamp_min(1e-30)).clamp(max=1.0)
            factor = torch.where(limit > 0.0, factor, 1.0)  # Otherwise a zero weight stays zero.
            values = before[op.name] + factor.to(op.weight.dtype) * deltas[op.name]
            assign(op.weight, values)


class BoundExceededError(RuntimeError):
    """The proved bound of a model exceeds its limit."""


class BoundCheck(_Instrument):
    """Compute the proved bounds of models before every evaluation, and compare them with a limit.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain
        >>> from lipsformer.analysis.instruments import BoundCheck
        >>> check = BoundCheck({"raw": torch.nn.Identity()}, Domain(size=()), limit=2.0)
        >>> f"{check.before_eval()['raw']['bound_log10']:.6f}"
        '0.000000'
    """

    def __init__(
        self, models: Mapping[str, nn.Module], domain: Domain, limit: float | None = None
    ) -> None:
        """Set models, domain and limit.

        Args:
            models: The models without the wrappers of DDP or the compiler, by kind of weights.
            domain: Domain of the bound.
            limit: Largest allowed bound, > 0; None for no limit.

        Raises:
            ValueError: If `limit` is not positive and finite.
        """
        if limit is not None:
            check_positive("limit", limit)
        self.models, self.domain, self.limit = models, domain, limit
        self.trackers = {}

    def before_eval(self) -> Mapping[str, Mapping[str, float]]:
        """Return `bound_log10` by kind of weights. FSDP2 may have sharded the models.

        Raises:
            BoundExceededError: If a bound exceeds the limit.
        """
        return {kind: {"bound_log10": self._log10(model)} for kind, model in self.models.items()}

    def _log10(self, model: nn.Module) -> float:
        log10 = gathered_bound(model, self.domain).log10
        if self.limit is not None and not log10 <= math.log10(self.limit):
            raise BoundExceededError(
                f"the proved Lipschitz bound is 10^{log10:.3f}, above the limit {self.limit:g}: "
                "tighten the caps or raise the limit"
            )
        return log10
