"""Trace a training step with the operators that a GPU would take, on fake tensors of the CPU.

Fake tensors have shapes, strides and types but no values, so a batch of 128 images costs nothing.
PyTorch cannot differentiate fake CUDA tensors without a device. CPU tensors therefore take their
place, and `CudaOperators` makes the choices that depend on the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import lipsformer  # noqa: F401  (registers the models)
from benchmarks.counting import OperatorCounter
from benchmarks.gpu_predictions.host import HostReads
from lipsformer.kernels import dispatch
from lipsformer.kernels.triton import block

# What autocast computes in float32, and in the widest type of its inputs, on CUDA only. The list of
# operators that it computes in bfloat16 is the same on CPUs as far as these models go.
IN_FLOAT32 = {
    *{"exp", "log", "pow", "__pow__", "prod", "reciprocal", "rsqrt", "norm", "sum", "cumsum"},
    *{"softmax", "log_softmax", "layer_norm", "group_norm"},
}
IN_WIDEST = {"addcdiv", "addcmul", "dot"}


class CudaOperators(TorchFunctionMode):
    """Context manager that takes the operators of a GPU: autocast's types and fused attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with its inputs in the types that autocast gives them on CUDA."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention:
            return cuda_attention(*args, **kwargs)
        if name in IN_FLOAT32 or (name in IN_WIDEST and torch.float32 in map(_dtype, args)):
            args = [value.float() if _dtype(value) is torch.bfloat16 else value for value in args]
        return func(*args, **kwargs)


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, Tensor) else None


def cuda_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute attention under autocast with the kernel that PyTorch chooses on an A100 or newer.

    This is FlashAttention without a mask. A mask that learns needs the memory-efficient kernel,
    for which PyTorch pads the rows of the mask to a multiple of 16.
    """
    q, k, v = (x.bfloat16() for x in (q, k, v))
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    mask, columns = attn_mask.bfloat16(), attn_mask.shape[-1]
    if columns % 8 != 0:
        mask = F.pad(mask, (0, -columns % 16))[..., :columns]
    mask = mask.expand(*q.shape[:3], columns)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, mask, True, dropout_p, is_causal, scale=scale)[0]


class Step(nn.Module):
    """The loss of a model under bfloat16 autocast."""

    def __init__(self, model: nn.Module) -> None:
        """Take over the model."""
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor]:
        """Return the cross entropy, in a tuple as the compiler wants it."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(images)
        return (F.cross_entropy(logits.float(), labels),)


class Traced(NamedTuple):
    """A step to trace: the model and its inputs, all fake."""

    step: Step
    images: Tensor
    labels: Tensor

    @property
    def parameters(self) -> int:
        """Number of parameters that learn."""
        return sum(p.numel() for p in self.step.parameters() if p.requires_grad)


def build(name: str, drop_path_rate: float = 0.0, **options: Any) -> nn.Module:
    """Build a timm model without values, by default without drop path, which Swin would have.

    Not all of timm's models can be built of fake tensors, so they start on the meta device.
    """
    with torch.device("meta"):
        return timm.create_model(name, drop_path_rate=drop_path_rate, **options)


@contextmanager
def cuda_step(model: nn.Module, shape: Sequence[int]) -> Iterator[Traced]:
    """Prepare a step, and trace inside this context as on a GPU.

    Args:
        model: A model on the meta device. It moves to the CPU and has no values there either.
        shape: [batch, channels, height, width] of the images.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        patch.object(dispatch, "device_type", lambda x: "cuda"),  # the kernels of a GPU
        patch.object(block, "_forward", block.block_forward),  # each kernel is counted
        patch.object(block, "_backward", block.block_backward),
        mode,
    ):
        model = model.train().to_empty(device="cpu")
        images = torch.empty(*shape).contiguous(memory_format=torch.channels_last)
        labels = torch.empty(shape[0], dtype=torch.long)
        with CudaOperators():
            yield Traced(Step(model), images, labels)


def eager(traced: Traced) -> dict[str, Any]:
    """Count operators, bytes and products of a step without compilation, and what it saves."""
    step, images, labels = traced.step, traced.images, traced.labels
    known = {t.untyped_storage()._cdata for t in (*step.parameters(), *step.buffers(), images)}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    optimizer = torch.optim.AdamW(step.parameters(), fused=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with HostReads() as reads:
        with OperatorCounter() as forward, hooks:
            (loss,) = step(images, labels)
        with OperatorCounter() as backward:
            loss.backward()
        optimizer.step()  # the first update creates the moments
        with OperatorCounter() as update:
            optimizer.step()
    counts = {"forward": forward, "backward": backward, "optimizer": update}
    return {
        "operators": {part: count.operators for part, count in counts.items()},
        "bytes": {part: count.bytes for part, count in counts.items()},
        "products": {part: count.products for part, count in counts.items()},
        "saved_bytes": sum(tensor.untyped_storage().nbytes() for tensor in saved.values()),
        "host_reads": dict(reads),
    }


class Graphs(NamedTuple):
    """The forward and the backward graph of a compiled step."""

    forward: fx.GraphModule
    backward: fx.GraphModule

    def saved(self) -> list[Tensor]:
        """Return the tensors, all fake, that the forward graph keeps for the backward graph.

        Those that do not depend on the images, such as weights in bfloat16, are left out.
        """
        inputs = [node for node in self.forward.graph.nodes if node.op == "placeholder"]
        depends = {inputs[-2]}  # the images; the labels come last
        for node in self.forward.graph.nodes:
            if depends.intersection(node.all_input_nodes):
                depends.add(node)
        (outputs,) = next(n for n in self.forward.graph.nodes if n.op == "output").args
        return [node.meta["val"] for node in outputs[1:] if node in depends - {inputs[-2]}]


def graphs(traced: Traced) -> Graphs:
    """Split the graph of a step into forward and backward, as `torch.compile` does."""
    found: list[Graphs] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Graphs:
        joint_graph_passes(joint)
        options["compiler"] = "inductor"
        found.append(Graphs(*min_cut_rematerialization_partition(joint, inputs, **options)))
        return found[0]

    step: Any = traced.step
    keep: Any = lambda graph, _: graph.forward  # noqa: E731
    aot_module_simplified(
        step,
        (traced.images, traced.labels),
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    return found[0]
