"""What a model costs: parameters, multiply-adds, activations, memory and images per second."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_FUSED_ATTENTION = {
    getattr(torch.ops.aten, name)
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
}


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Cost of one part of a model for one image.

    Attributes:
        name: Path of the part in the model; "(rest)" for what no part holds.
        parameters: Number of parameters.
        macs: Multiply-adds of convolutions, matrix products and attention.
        activations: Elements that these write. Attention counts as its two products, fused or not.
        output: Shape of the part's output without the batch, None if it is not a tensor.
    """

    name: str
    parameters: int
    macs: int
    activations: int
    output: tuple[int, ...] | None


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, a shared one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def part_costs(model: nn.Module, images: Tensor) -> list[PartCost]:
    """Count the cost of every stage and of the other direct children of a timm model.

    The model runs once, in evaluation mode; nothing is counted for elementwise operators, norms
    and pooling. On the meta device nothing is computed either.

    Args:
        model: Any model; its ``feature_info`` tells which of its children hold stages.
        images: [1, 3, H, W], on the model's device and of its type.

    Returns:
        The parts that cost anything, in order; their sums are the model's totals.
    """
    names = _part_names(model)
    macs, activations = dict.fromkeys([*names, "(rest)"], 0), dict.fromkeys([*names, "(rest)"], 0)
    outputs: dict[str, tuple[int, ...]] = {}
    stack = ["(rest)"]

    def record(op_macs: int, op_activations: int) -> None:
        macs[stack[-1]] += op_macs
        activations[stack[-1]] += op_activations

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    def leave(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            stack.pop()
            if isinstance(output, Tensor):
                outputs[name] = tuple(output.shape[1:])

        return hook

    handles = []
    training = model.training
    for name, module in model.named_modules():
        part = next((n for n in names if name == n or name.startswith(n + ".")), None)
        if part is not None:
            # the deepest modules too: a model may call them past their parent
            handles.append(module.register_forward_pre_hook(enter(part)))
            handles.append(module.register_forward_hook(leave(name)))
    try:
        with torch.no_grad(), _OperatorCounter(record):
            model.eval()(images)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    parameters = {name: count_parameters(model.get_submodule(name)) for name in names}
    parameters["(rest)"] = count_parameters(model) - sum(parameters.values())
    return [
        PartCost(
            name=name,
            parameters=parameters[name],
            macs=macs[name],
            activations=activations[name],
            output=outputs.get(name),
        )
        for name in [*names, "(rest)"]
        if parameters[name] or macs[name]
    ]


class _OperatorCounter(TorchDispatchMode):
    """Report (multiply-adds, elements written) of every convolution, matrix product, attention."""

    def __init__(self, record: Callable[[int, int], None]) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        counted = packet in flop_registry or packet in _FUSED_ATTENTION
        if not counted:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if packet in _FUSED_ATTENTION:
            query, key, value = args[:3]
            scores = query.shape[:-1].numel() * key.shape[-2]
            written = query.shape[:-1].numel() * value.shape[-1]
            self.record(scores * (query.shape[-1] + value.shape[-1]), scores + written)
        elif counted:
            self.record(flop_registry[packet](*args, **kwargs, out_val=result) // 2, result.numel())
        return result


def _part_names(model: nn.Module) -> list[str]:
    features = getattr(model, "feature_info", None)
    modules = [info["module"] for info in features] if isinstance(features, list) else []
    holders = {name.rpartition(".")[0] for name in modules}
    names = []
    for name, child in model.named_children():
        inner = [f"{name}.{inner}" for inner, _ in child.named_children()]
        names += inner if name in holders else [name]
    return names


class PeakMemory:
    """Context that measures the most memory held at once, above what was held on entry.

    On a GPU it is what the allocator hands out; on the CPU the resident set of the process, which
    includes what the libraries allocate (Linux only).

    Attributes:
        peak: Bytes, set on leaving; None where it cannot be measured.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare to measure on ``device``."""
        self.device = device
        self.peak: int | None = None

    def __enter__(self) -> "PeakMemory":
        """Start to measure."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before: int | None = torch.cuda.memory_allocated(self.device)
        else:
            self._before = _resident_bytes("VmRSS")
            if self._before is not None:
                Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        return self

    def __exit__(self, *_: object) -> None:
        """Read the peak."""
        if self.device.type == "cuda":
            peak: int | None = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = _resident_bytes("VmHWM")
        if peak is not None and self._before is not None:
            self.peak = peak - self._before


def _resident_bytes(field: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    fields: Mapping[str, str] = dict(
        line.split(":", 1) for line in status.read_text().splitlines() if ":" in line
    )
    return int(fields[field].split()[0]) * 1024


def median_seconds(
    step: Callable[[], Any], device: torch.device, *, warmup: int = 3, repeats: int = 10
) -> float:
    """Median duration of a step in seconds; the device is idle before and after each one.

    Args:
        step: What to time.
        device: Where it runs.
        warmup: Number of steps before the first one that is timed.
        repeats: Number of timed steps.
    """
    durations = []
    for index in range(warmup + repeats):
        _synchronize(device)
        start = time.perf_counter()
        step()
        _synchronize(device)
        if index >= warmup:
            durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
