"""Time each kind of operator of a LipsFormer alone, and compare it with the limits of the machine.

    python -m benchmarks.roofline lipsformer_swin_tiny \
        --output benchmarks/results/roofline_swin_tiny_cpu.json --plot docs/images/roofline_cpu.png
    python -m benchmarks.roofline lipsformer_swin_tiny --device cuda --precision bf16 \
        --batch-size 128 --output benchmarks/results/roofline_swin_tiny_cuda.json
    python -m benchmarks.roofline --table benchmarks/results/roofline_*.json

One training step shows which operators run on which shapes. Each operator then runs alone, forward
and backward, on random inputs of these shapes that no cache holds. Its least traffic moves every
input, parameter, result and gradient once. No implementation moves fewer bytes if nothing stays in
a cache from one operator to the next. The roof is the least time on this machine: its operations
divided by the measured FLOP/s, or its least traffic divided by the measured bandwidth, whichever is
longer. The column "moved" divides the bytes that PyTorch's operators read and write for it by the
least traffic, so it shows what a fused kernel could save.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.counting import OperatorCounter
from benchmarks.machine import PRECISIONS, autocast, limits, machine, seconds_of
from benchmarks.records import markdown, run
from lipsformer._commands import documented_parser
from lipsformer.layers import CenterNorm, DepthwiseConv2d, WeightedResidual
from lipsformer.models.lipsformer_cswin import StripeAttention
from lipsformer.models.lipsformer_swin import WindowAttention

COLUMNS = (
    *("operator", "calls", "ms alone", "GFLOP", "MB", "FLOP/byte"),
    *("limit", "roof ms", "share of roof", "moved"),
)
KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv2d: "patch convolution",
    DepthwiseConv2d: "depthwise convolution",
    CenterNorm: "CenterNorm",
}


class Attention(nn.Module):
    """The part of an attention between its projections: normalize, attend in windows, LePE."""

    def __init__(self, module: WindowAttention | StripeAttention) -> None:
        """Take over the parameters of `module` except those of its projections."""
        super().__init__()
        self.bias = getattr(module, "relative_position_bias_table", None)
        self.lepe = getattr(module, "lepe", None)
        self.attend = module.attend

    def forward(self, qkv: Tensor) -> Tensor:
        """Attend with the projected tokens `qkv`."""
        return self.attend(qkv)


class Given(nn.Module):
    """A branch that returns a result computed before."""

    ends_in: str | None = None
    result: Tensor

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Return that result."""
        return self.result


class GivenScaled(Given):
    """A branch that takes the residual scale."""

    ends_in = "linear"
    forward = Given.forward  # WeightedResidual reads `ends_in` beside it


class GivenBeforeGelu(Given):
    """A branch whose last GELU the residual applies."""

    ends_in = "gelu"
    forward = Given.forward


class Sum(nn.Module):
    """The part of a weighted residual that follows its branch."""

    def __init__(self, residual: WeightedResidual) -> None:
        """Take over the scale of `residual`."""
        super().__init__()
        ends_in = getattr(residual.branch, "ends_in", None)
        self.given = {"linear": GivenScaled, "gelu": GivenBeforeGelu}.get(ends_in, Given)()
        self.sum = WeightedResidual(self.given, len(residual.residual_scale), 1.0)
        self.sum.residual_scale = residual.residual_scale
        self.train(residual.training)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Add `branch` to `x`."""
        self.given.result = branch
        return self.sum(x)


@dataclass
class Operator:
    """One call of a module, and how often the model makes it."""

    kind: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: int = 0

    def tensors(self) -> list[Tensor]:
        """Inputs and parameters."""
        given = [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]
        return [*given, *self.module.parameters()]

    def forward(self) -> Tensor:
        """Run the operator."""
        return self.module(*self.args, **self.kwargs)

    def backward(self, result: Tensor) -> None:
        """Compute the gradients of all inputs and parameters that require one."""
        wanted = [x for x in self.tensors() if x.requires_grad]
        # a residual whose branch is scaled already does not use its scale
        torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)


def operators(model: nn.Module, images: Tensor) -> list[Operator]:
    """Return the operators of a forward pass; calls with equal shapes count as one operator."""
    found: dict[Any, Operator] = {}

    def note(kind: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if kwargs.get("act_before"):
            kind += " with GELU"
        args, kwargs = tree_map(random_like, (tuple(args), dict(kwargs)))
        operator = Operator(kind, module, args, kwargs)
        key = (kind, repr([tuple(x.shape) for x in operator.tensors()]))
        found.setdefault(key, operator).calls += 1

    hooks = ExitStack()
    for parent in model.modules():
        if isinstance(parent, (WindowAttention, StripeAttention)):
            core = Attention(parent)
            look = lambda _, __, qkv, core=core: note("attention", core, (qkv,), {})  # noqa: E731
            hooks.enter_context(parent.qkv.register_forward_hook(look))
        if isinstance(parent, WeightedResidual):
            core = Sum(parent)
            kind = "residual with GELU" if core.given.ends_in == "gelu" else "residual"
            add = lambda _, args, y, kind=kind, core=core: note(kind, core, (args[0], y), {})  # noqa: E731
            hooks.enter_context(parent.branch.register_forward_hook(add))
        if isinstance(parent, nn.ModuleList):
            continue  # LePE is a part of the attention
        for module in parent.children():
            kind = next((KINDS[c] for c in type(module).__mro__ if c in KINDS), None)
            if kind is not None:
                hook = lambda m, args, kwargs, kind=kind: note(kind, m, args, kwargs)  # noqa: E731
                hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
    with hooks:
        model(images)
    return list(found.values())


def random_like(value: Any) -> Any:
    """Return random values of a tensor's shape, type and layout; return other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.randn_like(value).requires_grad_(value.requires_grad)


def cold_seconds(operator: Operator, device: torch.device, repeats: int) -> float:
    """Return the median duration of both passes, each with caches that hold no tensor of it."""
    other = torch.empty(2**26, device=device)
    results: list[Tensor] = []
    passes = (
        lambda: results.append(operator.forward()),
        lambda: operator.backward(results.pop()),
    )

    def cold(step: Callable[[], None]) -> float:
        other.zero_()
        return seconds_of(step, device)

    durations = [sum(cold(step) for step in passes) for _ in range(repeats + 1)]
    return statistics.median(durations[1:])


def traffic(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors and of the gradients that they require."""
    return sum(x.numel() * x.itemsize * (2 if x.requires_grad else 1) for x in tensors)


def measure(
    model: nn.Module, images: Tensor, precision: str, rates: dict[str, float], repeats: int
) -> dict[str, dict[str, float]]:
    """Return operations, bytes, least times and measured time of each kind in a training step."""
    totals: dict[str, dict[str, float]] = {}
    with autocast(images.device, precision):
        for operator in operators(model, images):
            with OperatorCounter() as counter:
                result = operator.forward()
                operator.backward(result)
            least = traffic([*operator.tensors(), result])
            roofs = (counter.flops / rates["flops_per_s"], least / rates["bytes_per_s"])
            own = {
                "calls": 1,
                "seconds": cold_seconds(operator, images.device, repeats),
                "flops": counter.flops,
                "bytes": least,
                "bytes_of_operators": counter.bytes,
                "compute_seconds": roofs[0],
                "memory_seconds": roofs[1],
                "roof_seconds": max(roofs),
            }
            total = totals.setdefault(operator.kind, dict.fromkeys(own, 0))
            for name, value in own.items():
                total[name] += operator.calls * value
    return dict(sorted(totals.items(), key=lambda item: -item[1]["seconds"]))


def step_seconds(model: nn.Module, images: Tensor, precision: str, repeats: int) -> float:
    """Return the median duration of the whole model's forward and backward pass."""

    def step() -> None:
        with autocast(images.device, precision):
            loss = model(images).float().square().mean()
        loss.backward()

    durations = []
    for _ in range(repeats + 1):
        model.zero_grad()
        durations.append(seconds_of(step, images.device))
    return statistics.median(durations[1:])


def table(record: dict[str, Any]) -> str:
    """Return the figures of one record as Markdown."""
    host, rates, options = record["machine"], record["limits"], record["options"]
    intro = (
        f"{options['model']}, {options['precision']}, batch {options['batch_size']}, "
        f"{options['img_size']} px, {host['device']} ({host['cpu']}, {host['threads']} threads), "
        f"{host['date']}: forward and backward {1e3 * record['step_seconds']:.0f} ms; limits "
        f"{rates['flops_per_s'] / 1e9:.0f} GFLOP/s, {rates['bytes_per_s'] / 1e9:.1f} GB/s"
    )
    kinds = record["operators"]
    total = {name: sum(own[name] for own in kinds.values()) for name in next(iter(kinds.values()))}
    rows = []
    for kind, own in [*kinds.items(), ("all", total)]:
        limit = "FLOP/s" if own["compute_seconds"] > own["memory_seconds"] else "bandwidth"
        cells = (
            *(f"{own['calls']}", f"{1e3 * own['seconds']:.0f}", f"{own['flops'] / 1e9:.1f}"),
            *(f"{own['bytes'] / 1e6:.0f}", f"{own['flops'] / own['bytes']:.1f}"),
            *("" if kind == "all" else limit, f"{1e3 * own['roof_seconds']:.0f}"),
            f"{own['roof_seconds'] / own['seconds']:.0%}",
            f"{own['bytes_of_operators'] / own['bytes']:.1f}",
        )
        rows.append((kind, *cells))
    return f"{intro}\n\n{markdown(COLUMNS, rows)}"


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw the FLOP/s of each kind of operator over its FLOP per byte, under the roof."""
    rates = record["limits"]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    intensity = [0.05, rates["flops_per_s"] / rates["bytes_per_s"], 1000.0]
    roof = [min(rates["flops_per_s"], rates["bytes_per_s"] * x) / 1e9 for x in intensity]
    axes.plot(intensity, roof, color="black", label="roof")
    for kind, own in record["operators"].items():
        point = (own["flops"] / own["bytes"], own["flops"] / own["seconds"] / 1e9)
        axes.plot(*point, "o", label=f"{kind}, {1e3 * own['seconds']:.0f} ms")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    options = record["options"]
    axes.set_title(f"{options['model']}, {options['precision']}, batch {options['batch_size']}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def record_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one model, and draw them if `--plot` is given."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    # no drop path: it would change the shapes from one step to the next
    model = timm.create_model(options.model, device=device).train()
    images = torch.randn(options.batch_size, 3, options.img_size, options.img_size, device=device)
    rates = limits(device, options.precision)
    kept = ("model", "precision", "batch_size", "img_size", "repeats")
    record = {
        "machine": machine(device),
        "limits": rates,
        "options": {name: getattr(options, name) for name in kept},
        "step_seconds": step_seconds(model, images, options.precision, options.repeats),
        "operators": measure(model, images, options.precision, rates, options.repeats),
    }
    if options.plot:
        plot(record, options.plot)
    return record


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__)
    parser.add_argument("model", nargs="?", default="lipsformer_swin_tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plot", type=Path, help="PNG file to write")
    run(parser, record_of, table)


if __name__ == "__main__":
    main()
