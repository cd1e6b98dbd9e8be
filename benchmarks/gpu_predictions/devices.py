"""Public figures of GPUs, and the time below which a step cannot fall with them."""

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.gpu_predictions.inductor import Kernel

LAUNCH_SECONDS = 2e-6  # assumed: what a kernel costs at least, however little it does
ADAMW_BYTES = 28  # per parameter: reads weight, gradient and two moments, writes all but one


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU: operations per second without sparsity, and bytes per second of its memory."""

    tensor_cores: float  # bfloat16
    vectors: float  # float32
    bandwidth: float
    source: str


DEVICES = {
    "A100": Device(
        tensor_cores=312e12,
        vectors=19.5e12,
        bandwidth=2.039e12,
        source="NVIDIA A100 datasheet, 80 GB SXM",
    ),
    "H100": Device(
        tensor_cores=989e12,
        vectors=67e12,
        bandwidth=3.35e12,
        source="NVIDIA H100 datasheet, SXM; half of the figure with sparsity",
    ),
    "B200": Device(
        tensor_cores=2250e12,
        vectors=80e12,
        bandwidth=8.0e12,
        source="NVIDIA Blackwell architecture technical brief, HGX B200, without sparsity",
    ),
}


def seconds(kernel: Kernel, device: Device) -> float:
    """Return the least time of a kernel: its traffic, its products or its launch."""
    rate = device.vectors if kernel.grouped else device.tensor_cores
    return max(kernel.bytes / device.bandwidth, kernel.products / rate, LAUNCH_SECONDS)


def step_seconds(kernels: Iterable[Kernel], parameters: int, device: Device) -> float:
    """Return the least time of a step: kernels one after the other, then fused AdamW."""
    update = ADAMW_BYTES * parameters / device.bandwidth
    return sum(seconds(kernel, device) for kernel in kernels) + update
