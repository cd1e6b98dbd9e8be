"""Cost of a model: parameters, multiply-adds, activations, memory, seconds per step."""

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer._modes import modes_restored


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Cost of one part of a model for one image.

    Attributes:
        name: Path of the part in the model; "(rest)" for everything that belongs to no part.
        parameters: Number of parameters.
        macs: Multiply-adds of convolutions, matrix products and attention.
        activations: Number of elements that these operators write. Attention counts as its two
            products, fused or not.
        output: Shape of the part's output without the batch; None if it is not a tensor.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.cost import part_costs
        >>> [(p.name, p.macs) for p in part_costs(torch.nn.Sequential(torch.nn.Linear(7, 5)),
        ...                                       torch.randn(1, 7))]
        [('0', 35)]
    """

    name: str
    parameters: int
    macs: int
    activations: int
    output: tuple[int, ...] | None


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters. A shared parameter counts once.

    Example:
        >>> from torch import nn
        >>> from lipsformer.analysis.cost import count_parameters
        >>> count_parameters(nn.Linear(3, 5))  # 3 * 5 + 5
        20
    """
    return sum(parameter.numel() for parameter in model.parameters())


def part_costs(model: nn.Module, images: Tensor) -> list[PartCost]:
    """Count the cost of every stage and of the other direct children of a timm model.

    fvcore traces the model once, in evaluation mode. Elementwise operators, norms and pooling do
    not count.

    Args:
        model: Any model, on a real device. Its `feature_info` tells which children contain stages.
        images: [1, 3, H, W], on the device of the model and of its dtype.

    Returns:
        The parts with parameters or multiply-adds, in order. Their sums are the model's totals.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.cost import part_costs
        >>> model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU())
        >>> (cost,) = part_costs(model, torch.randn(1, 7))
        >>> cost.parameters, cost.macs, cost.activations  # 7 * 5 + 5, 7 * 5, 5
        (40, 35, 5)
    """
    names = _part_names(model)
    outputs: dict[str, tuple[int, ...]] = {}

    def record_output(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor):  # While tracing, the sides of a shape are tensors.
                outputs[name] = tuple(int(side) for side in output.shape[1:])

        return hook

    with modes_restored(model), ExitStack() as hooks:
        for name in names:
            part = model.get_submodule(name)
            hooks.enter_context(part.register_forward_hook(record_output(name)))
        counts = _count_operators(model.eval(), images)
    counted: set[nn.Parameter] = set()
    parameters: dict[str, int] = {}
    for name in names:  # a shared parameter counts in its first part
        new = set(model.get_submodule(name).parameters()) - counted
        parameters[name] = sum(parameter.numel() for parameter in new)
        counted |= new
    parameters["(rest)"] = count_parameters(model) - sum(parameters.values())
    counts["(rest)"] = counts[""]
    for name in names:
        counts["(rest)"] = counts["(rest)"] - counts[name]  # Counters keep positive counts only.
    return [
        PartCost(
            name=name,
            parameters=parameters[name],
            macs=counts[name]["macs"],
            activations=counts[name]["activations"],
            output=outputs.get(name),
        )
        for name in [*names, "(rest)"]
        if parameters[name] or counts[name]["macs"]
    ]


def _count_operators(model: nn.Module, images: Tensor) -> dict[str, Counter[str]]:
    """Return `macs` and `activations` of every module, by name."""
    with warnings.catch_warnings():
        # fvcore uses TorchScript, which PyTorch has deprecated.
        warnings.simplefilter("ignore")
        from fvcore.nn import jit_handles
        from fvcore.nn.jit_analysis import JitModelAnalysis

        products = {
            "aten::_convolution": jit_handles.conv_flop_jit,
            "aten::addmm": jit_handles.addmm_flop_jit,
            "aten::bmm": jit_handles.bmm_flop_jit,
            "aten::einsum": jit_handles.einsum_flop_jit,
            "aten::linear": jit_handles.linear_flop_jit,
            "aten::matmul": jit_handles.matmul_flop_jit,
        }

        analysis = JitModelAnalysis(model, images)
        for operator, count_macs in products.items():
            analysis.set_op_handle(operator, _product_handle(count_macs))
        analysis.set_op_handle("aten::scaled_dot_product_attention", _attention_handle)
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        # With gradients, a model in evaluation mode uses plain operators, which a trace can see.
        with torch.enable_grad():
            return analysis.by_module_and_operator()


def _product_handle(count_macs: Callable[..., Any]) -> Callable[..., Counter[str]]:
    def handle(inputs: list[Any], outputs: list[Any]) -> Counter[str]:
        macs = count_macs(inputs, outputs)
        if isinstance(macs, Counter):  # of a convolution, by kind
            macs = sum(macs.values())
        return Counter(macs=int(macs), activations=_shape(outputs[0]).numel())

    return handle


def _attention_handle(inputs: list[Any], _: list[Any]) -> Counter[str]:
    query, key, value = map(_shape, inputs[:3])
    rows = query[:-1].numel()
    macs = rows * key[-2] * (query[-1] + value[-1])
    return Counter(macs=macs, activations=rows * (key[-2] + value[-1]))


def _shape(value: Any) -> torch.Size:
    return torch.Size(value.type().sizes())


def _part_names(model: nn.Module) -> list[str]:
    features = getattr(model, "feature_info", None)
    modules = [info["module"] for info in features] if isinstance(features, list) else []
    parents = {name.rpartition(".")[0] for name in modules}
    names = []
    for name, child in model.named_children():
        inner = [f"{name}.{inner}" for inner, _ in child.named_children()]
        names += inner if name in parents else [name]
    return names


class PeakMemory:
    """Context manager that measures the peak of memory in use, above the memory in use on entry.

    On a GPU it measures the memory of PyTorch's allocator. On the CPU it measures the resident set
    of the process, which includes the memory of libraries, on Linux only.

    Attributes:
        peak: Peak in bytes, set on exit; None if it cannot be measured.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.cost import PeakMemory
        >>> with PeakMemory(torch.device("cpu")) as memory:
        ...     work = torch.ones(1024)
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare to measure on `device`."""
        self.device = device
        self.peak: int | None = None

    def __enter__(self) -> "PeakMemory":
        """Start the measurement."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before: int | None = torch.cuda.memory_allocated(self.device)
        else:
            self._before = _resident_bytes("VmRSS")
            try:
                if self._before is not None:
                    Path("/proc/self/clear_refs").write_text("5")  # Resets VmHWM.
            except OSError:  # some containers do not allow it
                self._before = None
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
    """Return the median duration of a step in seconds.

    The device is synchronized before and after every step.

    Args:
        step: Function to time.
        device: Device on which it runs.
        warmup: Number of steps before the first timed step, at least 0.
        repeats: Number of timed steps, at least 1.

    Example:
        >>> import time, torch
        >>> from lipsformer.analysis.cost import median_seconds
        >>> cpu = torch.device("cpu")
        >>> median_seconds(lambda: time.sleep(0.01), cpu, warmup=1, repeats=3) > 0.009
        True
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


def saved_bytes(
    model: nn.Module,
    images: Tensor,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> int:
    """Return the number of bytes that a forward pass in training saves for the backward pass.

    Every storage counts once. Parameters, buffers and the images do not count.

    Args:
        model: The model. It runs once in training mode and is set back to its mode. Its gradients
            do not change, but running statistics, as those of BatchNorm, do.
        images: [B, 3, H, W], on the device of the model.
        autocast: Function that returns the context manager of the forward pass.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.cost import saved_bytes
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU())
        >>> saved_bytes(model, torch.randn(2, 3))  # the input of GELU: 2 * 4 numbers of 4 bytes
        32
    """
    known = {
        t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), images)
    }
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with modes_restored(model), torch.enable_grad(), hooks, autocast():
        # `output` keeps the graph alive, so that no storage is reused and counted as another.
        output = model.train()(images)
    del output
    return sum(kept.values())


def training_bytes(
    model: nn.Module,
    images: Tensor,
    *,
    micro_batch: int,
    ema: bool = False,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, int]:
    """Estimate the memory of training with AdamW.

    The saved activations are measured at batch sizes 2 and 3 and extrapolated linearly, because
    BatchNorm refuses to train on one image whose map is 1 x 1. Temporary memory of kernels and of
    the backward pass is not included. On a CPU in float32, without the memory that libraries had
    taken before::

        model                 image   batch   estimate    measured peak
        lipsformer_nano       32 px      64   0.145 GiB   0.242 GiB
        lipsformer_nano       32 px     256   0.475 GiB   0.768 GiB
        lipsformer_tiny      224 px       4   0.724 GiB   0.903 GiB
        lipsformer_swin_tiny 224 px       4   0.800 GiB   0.977 GiB

    Args:
        model: The model, on the device of the training. Its gradients do not change.
        images: [3, 3, H, W], on the same device.
        micro_batch: Number of images of a forward pass, at least 1.
        ema: True if an average of the weights is kept.
        autocast: Function that returns the context manager of the forward pass.

    Returns:
        Bytes by purpose, without purposes that need none. Their sum is the estimate.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.cost import training_bytes
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU())
        >>> training_bytes(model, torch.randn(3, 3), micro_batch=5)  # 16 parameters, 5 * 4 numbers
        {'weights': 64, 'gradients': 64, 'two moments, as of AdamW': 128,
         'kept for the backward pass': 80}
    """
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    learned = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    two, three = (saved_bytes(model, images[:number], autocast) for number in (2, 3))
    found = {
        "weights": weights,
        "gradients": learned,
        "two moments, as of AdamW": 2 * learned,
        "average of the weights": weights if ema else 0,
        "kept for the backward pass": two + (micro_batch - 2) * (three - two),
    }
    return {name: size for name, size in found.items() if size}
