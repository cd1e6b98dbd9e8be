"""The instrument that records figures of the weights, the gradients and the attention."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lipsformer._sharding import full_tensor
from lipsformer.analysis.attention_maps import probe_attention
from lipsformer.analysis.bounds import Domain, gathered_bound
from lipsformer.analysis.instruments.base import InstrumentBase
from lipsformer.analysis.sigma import SigmaTracker, gain_of, operators, residual_scale_of

Write = Callable[[int, Mapping[str, float]], None]


class Monitor(InstrumentBase):
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
            least = torch.finfo(sigma.dtype).tiny
            record[f"update_ratio/{name}"] = sigma / old[name].clamp_min(least)
        return record
