"""Let torch.compile's own compiler, Inductor, schedule the kernels of a graph for an absent H100.

Inductor asks the device for its properties only, so a stub in place of the device is enough. The
compiler is stopped when it has written the source of the kernels and would load them.
"""

# pyright: reportAttributeAccessIssue=false

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.memory import prepare_planning_info
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode
from torch._inductor.utils import OrderedSet, Placeholder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget

from benchmarks.counting import product_flops

# From "NVIDIA H100 Tensor Core GPU Architecture" and the table of compute capabilities in the
# CUDA C++ Programming Guide.
H100 = SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
    warp_size=32,
    gcnArchName="",
)


class Kernel(NamedTuple):
    """One kernel that Inductor writes, or one call of a library.

    Attributes:
        name: "fused" for Inductor's own kernels, else the operator of the library.
        bytes: Bytes read and written; every buffer counts once.
        products: Floating-point operations of a product, a convolution or attention.
        grouped: Whether it is a convolution in groups, which does not run on tensor cores.
    """

    name: str
    bytes: int
    products: int = 0
    grouped: bool = False


class Scheduled(Exception):
    """The kernels of a graph and its peak memory, raised to stop the compiler.

    Attributes:
        kernels: All kernels that a run of the graph launches.
        peak_bytes: The largest number of bytes in use, weights not included.
        sources: Python source of each different kernel that Inductor writes.
    """

    def __init__(self, kernels: list[Kernel], peak_bytes: int, sources: list[str]) -> None:
        """Keep the figures of a graph."""
        super().__init__(f"{len(kernels)} kernels")
        self.kernels, self.peak_bytes, self.sources = kernels, peak_bytes, sources


def schedule(graph: fx.GraphModule, backward: bool) -> Scheduled:
    """Return the kernels that a forward or a backward graph becomes.

    The graph moves to a fake GPU and is of no use afterwards.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
            node.meta = {"val": tree_map(_on_cuda, node.meta.get("val"))}
    graph.recompile()
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    try:
        with absent_gpu(), mode, tracing(TracingContext(mode)):
            compile_fx_inner(graph, inputs, is_backward=backward)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, Scheduled):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return cause
    raise AssertionError("the compiler was not stopped")


def _on_cuda(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")


@contextmanager
def absent_gpu() -> Iterator[None]:
    """Answer Inductor's questions about the device, and stop it when the sources are written."""
    stubs: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_compute_capability": lambda device=None: 90,
        "get_device_properties": lambda device=None: H100,
        "is_bf16_supported": lambda including_emulation=False: True,
    }
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    # without a device PyTorch would choose convolutions that ignore channels last
    cudnn = lambda *args, **kwargs: torch._C._ConvBackend.Cudnn  # noqa: E731
    with ExitStack() as stack:
        has_triton.cache_clear()  # it keeps its first answer, which may be from outside
        stack.callback(has_triton.cache_clear)
        for name, stub in stubs.items():
            stack.enter_context(patch.object(CudaInterface, name, staticmethod(stub)))
        for name in ("current_device", "get_device_properties"):
            stack.enter_context(patch.object(CudaInterface.Worker, name, staticmethod(stubs[name])))
        for name in ("current_device", "get_device_properties"):
            stack.enter_context(patch.object(torch.cuda, name, stubs[name]))
        stack.enter_context(
            patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        )
        stack.enter_context(patch.object(triton.runtime.driver, "_active", driver))
        stack.enter_context(patch.object(torch._C, "_select_conv_backend", cudnn))
        stack.enter_context(patch.object(GraphLowering, "codegen", _stop))
        stack.enter_context(config.patch(fx_graph_cache=False))
        yield


def _stop(graph: GraphLowering) -> None:
    """Fuse the operators of a graph, write the kernels, and raise the result."""
    graph.init_wrapper_code()
    graph._update_scheduler()
    scheduler = graph.scheduler
    peak, _ = prepare_planning_info(
        scheduler.nodes,
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        OrderedSet(graph.graph_inputs),
        OrderedSet(graph.get_output_names()),
    )
    kernels = [kernel for node in scheduler.nodes for kernel in _kernels(node)]
    wrapper: Any = graph.wrapper_code
    wrapper.push_codegened_graph(graph)
    scheduler.codegen()
    sources = [
        source.replace(str(Placeholder.DESCRIPTIVE_NAME), name).replace(
            str(Placeholder.KERNEL_NAME), "triton_"
        )
        for source, name in wrapper.src_to_kernel.items()
    ]
    raise Scheduled(kernels, peak, sources)


def _kernels(node: BaseSchedulerNode) -> list[Kernel]:
    """Return the kernel of a node of the schedule; none for views and parts of results."""
    size = node.get_read_write_buffers_sizes()
    if size == 0:
        return []
    if not isinstance(node, ExternKernelSchedulerNode):
        return [Kernel("fused", size)]
    operation: Any = node.node
    origins = [n for n in operation.get_origins() if n.op == "call_function"]
    for origin in origins:
        args, kwargs = tree_map(
            lambda value: value.meta["val"] if isinstance(value, fx.Node) else value,
            (origin.args, origin.kwargs),
        )
        products = product_flops(origin.target, args, kwargs, origin.meta["val"])
        if products is not None:
            name = str(origin.target)
            grouped = "convolution" in name and _groups(name, args) > 1
            return [Kernel(name, size, products, grouped or "depthwise" in name)]
    return [Kernel(str(getattr(operation, "op_overload", type(operation).__name__)), size)]


def _groups(name: str, args: Any) -> int:
    return args[-2] if "backward" in name else args[-1]
