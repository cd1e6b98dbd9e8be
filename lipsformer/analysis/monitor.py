"""Instruments that watch training: singular values, scales, attention, gradients, the bound."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer.analysis.bounds import Domain, gathered_bound
from lipsformer.analysis.instrument import Instrument
from lipsformer.analysis.sigma import SigmaTracker, operators, residual_scale_of, whole
from lipsformer.layers import CenterNorm, ScaledCosineAttention

Write = Callable[[int, Mapping[str, float]], None]


class Monitor(Instrument):
    """Watches a model at an interval and hands a flat record to a callback.

    Keys of a record, ``<name>`` a parameter or module:
        ``sigma/<name>``: largest singular value (of a convolution: bound of its operator norm);
        ``update_ratio/<name>``: the same of the update, divided by that of the weight before it;
        ``grad_norm/<name>``: norm of the (clipped) gradient of a module's own parameters;
        ``residual_scale/<name>``, ``gain/<name>``: largest absolute value;
        ``attn_entropy/<name>``: mean over rows, nats, and ``max_score/<name>``, on the probe;
        ``bound_log10``: proved bound of the model, every ``bound_every`` records;
        ``seconds``: what the record cost.

    Under DDP and FSDP2 every rank must call both methods; ``write`` decides who writes.
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
        """Prepare the instruments.

        Args:
            model: The model inside DDP's or the compiler's wrapper.
            write: Called with the number of updates made and the record.
            every: Updates from one record to the next, >= 1.
            probe: A few inputs, always the same, for the attention; None leaves it out.
            domain: Inputs that the bound speaks about; None leaves the bound out.
            bound_every: Records from one bound to the next.

        Raises:
            ValueError: If ``every`` or ``bound_every`` is below 1.
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
        """Look at the gradients and keep the weights, if a record is due.

        Args:
            step: Number of steps made so far.
        """
        if step % self.every != 0:
            return
        started = time.perf_counter()
        squares: dict[str, list[Tensor]] = defaultdict(list)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                norm = whole(parameter.grad).float().norm()
                squares[name.rpartition(".")[0]].append(norm.square())
        self._pending = {
            f"grad_norm/{name}": torch.stack(its).sum().sqrt() for name, its in squares.items()
        }
        self._before = {op.name: whole(op.weight).clone() for op in self.operators}
        self._seconds = time.perf_counter() - started

    def after_step(self, step: int) -> None:
        """Measure and write the record, if one is due.

        Args:
            step: Number of steps made before the one that just ended, as in ``before_step``.
        """
        if step % self.every != 0:
            return
        started = time.perf_counter()
        record = self._pending
        record.update(self._sigmas())
        for name, module in self.model.named_modules():
            if (scale := residual_scale_of(module)) is not None:
                record[f"residual_scale/{name}"] = whole(scale).abs().amax()
            elif isinstance(module, CenterNorm):
                record[f"gain/{name}"] = whole(module.weight).abs().amax()
        if self.probe is not None:
            record.update(attention_statistics(self.model, self.probe))
        names = list(record)
        values = torch.stack([record[name].float() for name in names]).tolist()  # the one wait
        figures = dict(zip(names, values, strict=True))
        if self.domain is not None and step // self.every % self.bound_every == 0:
            figures["bound_log10"] = gathered_bound(self.model, self.domain).log10
        self._before, self._pending = {}, {}
        figures["seconds"] = self._seconds + time.perf_counter() - started
        self.write(step + 1, figures)

    def _sigmas(self) -> dict[str, Tensor]:
        now = {op.name: whole(op.weight) for op in self.operators}
        deltas = {name: weight - self._before[name] for name, weight in now.items()}
        old = self.weights.measure(self._before)
        new = self.weights.measure(now)
        moved = self.updates.measure(deltas)
        record = {f"sigma/{name}": sigma for name, sigma in new.items()}
        for name, sigma in moved.items():
            record[f"update_ratio/{name}"] = sigma / old[name].clamp_min(1e-30)
        return record


@torch.no_grad()
def attention_statistics(model: nn.Module, probe: Tensor) -> dict[str, Tensor]:
    """Return entropy and largest score of every scaled cosine attention on a few inputs.

    Args:
        model: Runs in evaluation mode and is put back.
        probe: Inputs, [B, ...].
    """
    record: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def look(module: Any, args: tuple[Tensor, ...]) -> None:
            q, k = module.normalize(args[0], args[1])
            scores = (q @ k.transpose(-2, -1)).float()
            if len(args) > 3 and args[3] is not None:
                scores = scores + args[3].float()
            log_attn = scores.log_softmax(-1)
            record[f"attn_entropy/{name}"] = -(log_attn.exp() * log_attn).sum(-1).mean()
            record[f"max_score/{name}"] = scores.amax()

        return look

    handles = [
        module.register_forward_pre_hook(keep(name))
        for name, module in model.named_modules()
        if isinstance(module, ScaledCosineAttention)
    ]
    training = model.training
    try:
        model.eval()
        with torch.compiler.set_stance("force_eager"):  # hooks would compile a graph of their own
            model(probe)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return record
