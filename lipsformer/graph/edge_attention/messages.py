"""Decide when a layer has to send messages, and when one fused pass over the edges will do."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, SumAggregation

from lipsformer import kernels
from lipsformer.kernels import dispatch

__all__ = ["changed_messages", "why_messages"]

_MAX_EDGES = 2**31 - 2**24  # positions are int32, and self loops are added
_HOOKED = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
_DEFINED = ("message", "aggregate", "message_and_aggregate", "edge_update", "update")
_GENERATED = ("propagate", "edge_updater")  # PyG replaces these in every class by generated code
_DEVICES = ("cpu", "cuda") if find_spec("triton") else ("cpu",)


def why_messages(
    conv: Any,
    kind: type[MessagePassing],
    edge_index: Tensor,
    source: Tensor,
    target: Tensor | None,
    *,
    size: tuple[int, int] | None = None,
    edge_features: bool = False,
    attention_weights: bool = False,
) -> str | None:
    """Return why a layer has to compute message by message, or None if one fused pass will do.

    Args:
        conv: The layer.
        kind: The class that defines the layer's messages. Subclasses may override them.
        edge_index: The edges, [2, E].
        source: Representations of the source nodes, [S, C].
        target: Representations of the target nodes, [T, C], or None if they have none.
        size: The numbers of source and target nodes that the caller asked for.
        edge_features: Whether the call has edge features.
        attention_weights: Whether the call returns the attention weights.

    Example:
        >>> import torch
        >>> from lipsformer.graph import LipschitzGATConv
        >>> from lipsformer.graph.edge_attention.messages import why_messages
        >>> conv, x = LipschitzGATConv(4, 2), torch.randn(2, 4)
        >>> pair = torch.tensor([[0, 1], [1, 0]])
        >>> why_messages(conv, LipschitzGATConv, pair, x, x) is None
        True
        >>> why_messages(conv, LipschitzGATConv, pair, x, x, attention_weights=True)
        'the attention weights are returned'
    """
    dropped = getattr(conv, "dropout", 0.0) >= 1  # a GCNConv has neither
    released = getattr(conv, "released_code", False)
    return (
        _unsupported_context(source)
        or changed_messages(conv, kind)
        or ("every attention weight is dropped" if dropped else None)
        or ("released_code computes the maxima per edge" if released else None)
        or _unsupported_edges(edge_index, source, target, size)
        or ("edge features enter the scores" if edge_features else None)
        or ("the attention weights are returned" if attention_weights else None)
    )


def _unsupported_context(x: Tensor) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile needs plain operators"
    if torch.jit.is_tracing():
        return "torch.jit.trace needs plain operators"
    if (transform := kernels.active_transform()) is not None:
        return transform
    if torch._C._len_torch_dispatch_stack() > 0:
        return "something records the operators or replaces the tensors"
    if x.is_cuda and not dispatch.ENABLED:
        return "LIPSFORMER_NATIVE=0 switches the kernels off"
    if x.device.type not in _DEVICES:
        return f"there is no kernel for {x.device.type}"
    return None


def changed_messages(conv: Any, kind: type[MessagePassing]) -> str | None:
    """Return why a layer sends other messages than `kind` defines, or None if it sends the same.

    Args:
        conv: The layer.
        kind: The class that defines the messages.

    Example:
        >>> from lipsformer.graph import LipschitzGATConv
        >>> from lipsformer.graph.edge_attention.messages import changed_messages
        >>> changed_messages(LipschitzGATConv(4, 2), LipschitzGATConv) is None
        True
        >>> changed_messages(LipschitzGATConv(4, 2, flow="target_to_source"), LipschitzGATConv)
        'messages flow from target to source'
    """
    name = type(conv).__name__
    for step in _HOOKED:
        if getattr(conv, f"_{step}_forward_hooks") or getattr(conv, f"_{step}_forward_pre_hooks"):
            return f"a hook watches {step}"
    for step in _DEFINED:
        method = getattr(conv, step)  # of the class, or set on the instance
        if getattr(method, "__func__", method) is not getattr(kind, step):
            return f"{name} overrides {step}"
    # PyG names the module of the code that it generates after the class for which it does so.
    generated = [f"{cls.__module__}_{cls.__name__}_" for cls in type(conv).__mro__]
    for step in _GENERATED:
        if not getattr(conv, step).__module__.startswith((MessagePassing.__module__, *generated)):
            return f"{name} overrides {step}"
    if conv.explain:
        return "an explainer watches the messages"
    if not isinstance(conv.aggr_module, SumAggregation):
        return "the messages are not summed"
    if conv.flow != "source_to_target":
        return "messages flow from target to source"
    if conv.decomposed_layers != 1:
        return "the layer is decomposed"
    return None


def _unsupported_edges(
    edge_index: Tensor, source: Tensor, target: Tensor | None, size: tuple[int, int] | None
) -> str | None:
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided:
        return "the edges are not a dense tensor"
    if edge_index.dtype is not torch.int64 or edge_index.dim() != 2 or len(edge_index) != 2:
        return "the edges are not [2, E] in int64"
    if not 0 < edge_index.size(1) < _MAX_EDGES:
        return f"there are {edge_index.size(1)} edges"
    if target is None:
        return "the targets have no representations"
    if size is not None and tuple(size) != (source.size(0), target.size(0)):
        return f"size={size} is not the number of inputs"
    return None
