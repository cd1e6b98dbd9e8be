r"""Bounds of graph layers and graph models. Importing this file registers their rules.

A bound holds for the features of all nodes of one graph together, in the Frobenius norm. It depends
on the edges, so the domain carries them: see `graph_domain`. Proofs: docs/theorems.md.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import GCN2Conv, GCNConv, SumAggregation
from torch_geometric.nn.dense.linear import Linear as PygLinear
from torch_geometric.utils import scatter

from lipsformer.analysis.bounds.attention import (
    AttentionBound,
    HeadWeights,
    Window,
    attention_bound,
    check_core,
    max_abs_score,
    paths_gram,
)
from lipsformer.analysis.bounds.composition import (
    Bound,
    Domain,
    compose,
    max_abs,
    scale_output,
    simple_bound,
)
from lipsformer.analysis.bounds.core import (
    UnknownModuleError,
    bound_rule,
    chain,
    children_in_order,
    require_unchanged,
)
from lipsformer.analysis.bounds.layers import PASSIVE, bias_norm, linear_sigma_bound
from lipsformer.analysis.bounds.lipsformer import require_input_kept, require_same_shape
from lipsformer.analysis.bounds.rounding import log10_one_plus, outward, sigma_bound
from lipsformer.graph.cosine_conv import ScaledCosineConv
from lipsformer.graph.dropout import Dropout
from lipsformer.graph.edge_attention.csr import EdgeCSR, SortedEdges
from lipsformer.graph.edge_attention.messages import changed_messages
from lipsformer.graph.elu import ELU
from lipsformer.graph.gat_conv import LipschitzGATConv
from lipsformer.graph.gcn_conv import SparseGCN2Conv, SparseGCNConv
from lipsformer.graph.models import GCN2, ConvLayer, GraphNet
from lipsformer.graph.models.initial_residual import InitialResidualLayer
from lipsformer.graph.models.lips import AttentionBranch, LipsLayer
from lipsformer.graph.models.residual import ResidualLayer
from lipsformer.graph.norm import NodeNorm
from lipsformer.graph.operator_bounds import (
    adjacency_sigma_bound,
    attention_column_sum,
    gat_attention_bound,
    normalized_adjacency,
    takes_normalized_adjacency,
)
from lipsformer.graph.transformer_conv import LipschitzTransformerConv
from lipsformer.layers import LipschitzNormAttention


@dataclass(frozen=True, kw_only=True)
class GraphDomain(Domain):
    """The features of all nodes of one graph.

    Attributes:
        size: (V,), the number of nodes.
        radius: Largest 2-norm of the features of a node.
        edges: The edges.

    Example:
        >>> import torch
        >>> domain = graph_domain(torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
        >>> domain.tokens, domain.edges.csr.num_edges
        (3, 2)
    """

    edges: SortedEdges


def graph_domain(edge_index: Tensor, num_nodes: int, radius: float = math.inf) -> GraphDomain:
    """Return the domain of the features of one graph.

    Args:
        edge_index: [2, E]: sources and targets, integers in 0..num_nodes - 1. They are copied, so
            the domain stays as it is if they are changed in place.
        num_nodes: Number of nodes V, at least 1.
        radius: Largest 2-norm of the features of a node. Only attention on raw values or raw scores
            needs it.

    Raises:
        ValueError: If `num_nodes` is less than 1, or `edge_index` is no dense [2, E] of integers.
        IndexError: If an index is not that of a node.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import lipschitz_bound
        >>> from lipsformer.graph import LipsGAT
        >>> edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> bound = lipschitz_bound(LipsGAT(16, 8, 3, num_layers=2), graph_domain(edges, 3))
        >>> list(bound.parts)
        ['encoder', 'layers.0', 'layers.1', 'head']
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes={num_nodes} must be at least 1")
    dense = edge_index.layout is torch.strided and edge_index.dim() == 2 and len(edge_index) == 2
    if not dense or edge_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"edge_index is {edge_index.dtype} of shape {tuple(edge_index.shape)} "
            f"({edge_index.layout}): use sources and targets, [2, E], as a dense tensor of integers"
        )
    edges = SortedEdges(edge_index.clone(), num_nodes)
    assert edges.csr.num_edges == edge_index.shape[1]  # sorting checks the range of the indices
    return GraphDomain(size=(num_nodes,), radius=radius, edges=edges)


def _edges(module: nn.Module, domain: Domain) -> SortedEdges:
    if not isinstance(domain, GraphDomain):
        raise ValueError(
            f"the bound of {type(module).__name__} depends on the edges: pass "
            "lipsformer.analysis.bounds.graph.graph_domain(edge_index, num_nodes) as the domain"
        )
    return domain.edges


def _refuse(module: nn.Module, reason: str) -> UnknownModuleError:
    return UnknownModuleError(f"no Lipschitz bound is known for {type(module).__name__}: {reason}")


def _check_messages(module: Any, kind: Any) -> None:
    """Raise `UnknownModuleError` unless a layer sends the messages of its class and adds them."""
    reason = changed_messages(module, kind)
    if reason is not None:
        raise _refuse(module, reason)
    require_unchanged(module.aggr_module, SumAggregation)


def _weight(linear: Any, *, without_bias: bool = False) -> Tensor:
    if is_lazy(linear.weight):
        raise _refuse(linear, "it has no weight yet: run one batch through the model first")
    require_unchanged(linear, PygLinear, nn.Linear)
    if without_bias and linear.bias is not None:
        raise _refuse(linear, "use no bias before the messages, as PyG does")
    return linear.weight.detach().double()


def _check_sum(module: nn.Module, channels: int, shortcut: Tensor) -> None:
    """Raise `UnknownModuleError` unless the shortcut has as many channels as the attention."""
    if len(shortcut) != channels:
        raise _refuse(module, f"its shortcut has {len(shortcut)} channels instead of {channels}")


def _check_heads(module: Any, weight: Tensor, *vectors: Tensor) -> None:
    """Raise `UnknownModuleError` unless weight and score vectors have the shape of the heads."""
    shape = (module.heads, module.out_channels)
    if weight.shape[:2] != shape or any(vector.shape != (1, *shape) for vector in vectors):
        raise _refuse(module, f"its weights are not those of heads x channels {shape}")


def _bias(linear: Any) -> Tensor:
    bias = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
    return bias.detach().double()


def _spread(bias: Tensor | None, channels: int) -> Tensor | None:
    """Return the bias of a layer of PyG, which may be one number, for every channel."""
    return None if bias is None else bias.expand(channels)


def _product(*factors: Tensor) -> Tensor:
    """Return the product, which is 0 where any factor is 0, even if another is inf."""
    stacked = torch.stack(torch.broadcast_tensors(*factors))
    return torch.where((stacked == 0.0).any(0), 0.0, stacked.prod(0))


def _attention(
    value: float, domain: Domain, radius: float, scale: Tensor | None, channels: int
) -> Bound:
    """Return the bound of attention over edges, for which no paper states a theorem."""
    bound = simple_bound(value, domain, radius=radius, channels=channels)
    return scale_output(replace(bound, paper_log10=math.inf), scale)


@functools.lru_cache(maxsize=4)
def _adjacency(edges: SortedEdges) -> tuple[float, float]:
    """Return bounds of the 2-norm of the normalized adjacency and of its row sums."""
    index, weight = normalized_adjacency(edges.edge_index, edges.num_targets)
    rows = scatter(weight, index[1], dim_size=edges.num_targets)
    rounding = (int(edges.csr.ptr.diff().max()) + 8) * 2.0**-52
    norm = adjacency_sigma_bound(edges.edge_index, edges.num_targets)
    return norm, rows.max().item() * (1.0 + rounding)


@bound_rule(GCNConv, SparseGCNConv)
def _gcn(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    norm, row_sum = _adjacency(_edges(module, domain))
    _check_messages(module, GCNConv)
    if not takes_normalized_adjacency(module):
        raise _refuse(module, "use the default normalization, without cached edges")
    sigma = linear_sigma_bound(_weight(module.lin, without_bias=True), scale)
    radius = row_sum * sigma * domain.radius
    channels = len(module.lin.weight)
    radius += bias_norm(_spread(module.bias, channels), scale)
    return simple_bound(norm * sigma, domain, radius=radius, channels=channels)


@bound_rule(LipschitzGATConv)
def _gat(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    edges = _edges(module, domain)
    _check_messages(module, LipschitzGATConv)
    if module.lin is None or module.released_code or module.lin_edge is not None:
        raise _refuse(module, "use one kind of nodes, no edge features, and released_code=False")
    weight = _weight(module.lin, without_bias=True).unflatten(0, (module.heads, -1))
    _check_heads(module, weight, module.att_src, module.att_dst)
    norms = sigma_bound(weight)
    reach = _product(norms, norms.new_tensor(domain.radius))
    if module.score_norm is None:
        factor = _raw_gat_factor(module, edges, weight, reach)
    else:
        factor = gat_attention_bound(module, edges.edge_index, edges.num_targets).to(norms)
    gram = torch.einsum("h,hdi,hdj->ij", factor.square(), weight, weight)
    value, radius = _of_heads(module, gram, weight.shape[0] * weight.shape[1], reach)
    channels = len(weight.flatten(0, 1)) if module.concat else weight.shape[1]
    if module.res is not None:
        shortcut = _weight(module.res, without_bias=True)
        _check_sum(module, channels, shortcut)
        sigma = linear_sigma_bound(shortcut)
        value, radius = value + sigma, radius + sigma * domain.radius
    radius += bias_norm(_spread(module.bias, channels))
    return _attention(value, domain, radius, scale, channels)


def _raw_gat_factor(module: Any, edges: SortedEdges, weight: Tensor, reach: Tensor) -> Tensor:
    """Bound the attention of every head whose scores are not normalized, [heads].

    Args:
        module: The convolution.
        edges: Its edges.
        weight: Weights of the heads, [heads, out, in].
        reach: Largest lengths of the values of a head, [heads].
    """
    csr = edges.csr_with_self_loops if module.add_self_loops else edges.csr
    slope = max(abs(module.negative_slope), 1.0)  # in this order NaN stays NaN
    source, target = (
        slope * vector.detach().double().expand(1, *weight.shape[:2]).norm(dim=-1)[0]
        for vector in (module.att_src, module.att_dst)
    )
    root = attention_column_sum(csr, _product(source + target, reach)).sqrt()
    return root + _product(source * root + target, reach)


def _of_heads(module: Any, gram: Tensor, terms: int, lengths: Tensor) -> tuple[float, float]:
    """Return the bound of all heads together, and the largest length of their output.

    The mean of H heads is at most H^(-1/2) times their Frobenius norm.

    Args:
        module: The convolution, which concatenates its heads or takes their mean.
        gram: See `AttentionBound`.
        terms: See `AttentionBound`.
        lengths: Largest lengths of the values of a head, [heads].
    """
    value = AttentionBound(gram, terms, math.inf, 0.0).value
    if module.concat:
        return value, lengths.norm().item()
    return value / math.sqrt(module.heads), lengths.mean().item()


@bound_rule(LipschitzTransformerConv)
def _transformer(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    csr = _edges(module, domain).csr
    _check_messages(module, LipschitzTransformerConv)
    if module.released_code or module.lin_edge is not None or module.lin_beta is not None:
        raise _refuse(module, "use no edge features, no beta, and released_code=False")
    linears = (module.lin_query, module.lin_key, module.lin_value)
    query, key, value = (_weight(linear).unflatten(0, (module.heads, -1)) for linear in linears)
    for weight in (query, key, value):
        _check_heads(module, weight)
    norms = [sigma_bound(weight) for weight in (query, key, value)]
    reach = [_product(norm, norm.new_tensor(domain.radius)) for norm in norms]
    longest = [
        spread + _bias(linear).view(module.heads, -1).norm(dim=1)
        for spread, linear in zip(reach, linears, strict=True)
    ]
    if module.score_norm is None:
        factors = _raw_transformer_factors(csr, query.shape[1], reach, longest)
        gram = paths_gram(list(zip((query, key, value), norms, factors, strict=True)))
    else:
        squared = _normalized_transformer_factor(csr, query.shape[1], norms[0])
        stacked = torch.cat([query, key, value], dim=1)
        gram = torch.einsum("h,hdi,hdj->ij", squared, stacked, stacked)
    total, radius = _of_heads(module, gram, 3 * query.shape[0] * query.shape[1], longest[2])
    channels = value.shape[1] * (module.heads if module.concat else 1)
    if module.root_weight:
        shortcut = _weight(module.lin_skip)
        _check_sum(module, channels, shortcut)
        sigma = linear_sigma_bound(shortcut)
        total += sigma
        radius += sigma * domain.radius + bias_norm(module.lin_skip.bias)
    return _attention(total, domain, radius, scale, channels)


def _raw_transformer_factors(
    csr: EdgeCSR, channels: int, reach: list[Tensor], longest: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors of |dQ|, |dK| and |dV| for scores that are not normalized, [heads] each.

    Args:
        csr: The edges.
        channels: Number of channels of a head.
        reach: Largest lengths of queries, keys and values without their biases, [heads] each.
        longest: Their largest lengths.
    """
    kappa = 1.0 / math.sqrt(channels)
    mass = attention_column_sum(csr, kappa * _product(longest[0], longest[1]))
    shared = mass.clamp(max=csr.ptr_t.diff().max().item() / 2).sqrt()
    by_query = kappa * _product(reach[2], reach[1])
    by_key = kappa * _product(reach[2], longest[0], shared)
    return by_query, by_key, mass.sqrt()


def _normalized_transformer_factor(csr: EdgeCSR, channels: int, norms: Tensor) -> Tensor:
    """Return the squared factor of |(dQ, dK, dV)| for scores of LipschitzNorm, [heads].

    Args:
        csr: The edges.
        channels: Number of channels of a head.
        norms: A tensor of the shape and type of the result.
    """
    gain = torch.full_like(norms, 1.0 / math.sqrt(channels))
    root = attention_column_sum(csr, gain).sqrt()
    # Each row holds the coefficients of |dQ|, |dK| and |dV| in one case of the maximum.
    cases = torch.stack(
        [
            torch.stack([2 * gain, (1 + 0.5**0.5) * gain, root]),
            torch.stack([2 * gain, 0.5**0.5 * gain, gain + root]),
            torch.stack([gain, (1 + 0.5**0.5) * gain, gain + root]),
        ]
    )
    return cases.square().sum(1).amax(0)


@bound_rule(ScaledCosineConv)
def _cosine(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    csr = _edges(module, domain).csr_with_self_loops
    _check_messages(module, ScaledCosineConv)
    core = module.attention
    check_core(core, module.heads)
    if isinstance(core, LipschitzNormAttention) or core.log_logit_scale is not None:
        raise _refuse(module, "use scaled cosines with a fixed logit scale for all heads")
    projections = 1 if module.share_projection else 3
    shape = (projections, module.heads, -1)
    weight = _weight(module.lin).unflatten(0, shape).expand(3, -1, -1, -1)
    bias = _bias(module.lin).view(shape).expand(3, -1, -1)
    attended = attention_bound(
        core,
        HeadWeights(*weight, value_bias=bias[2]),
        Window(
            int(csr.ptr_t.diff().max()),  # a node takes part in at most so many neighborhoods
            domain.radius,
            mass=attention_column_sum(csr, max_abs_score(core)),
        ),
    )
    radius = math.sqrt(attended.radius_squared)
    return _attention(attended.value, domain, radius, scale, weight[2].flatten(0, 1).shape[0])


@bound_rule(Dropout)
def _dropout(module: nn.Module, domain: Domain, scale: Tensor | None) -> Bound:
    value = max_abs(scale)
    return simple_bound(value, domain, radius=value * domain.radius)


@bound_rule(nn.ELU, ELU)
def _elu(module: nn.ELU, domain: Domain, scale: Tensor | None) -> Bound:
    value = max(abs(module.alpha), 1.0) * max_abs(scale)  # in this order NaN stays NaN
    return simple_bound(value, domain, radius=value * domain.radius)


@bound_rule(ResidualLayer)
def _residual_layer(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    # ReLU is nonexpansive and keeps the length bound.
    domain = replace(domain, channels=module.conv.lin.weight.shape[1])
    layers = [("dropout", module.dropout), ("conv", module.conv)]
    bound = chain(layers, domain, moves_channels=False)
    if module.residual:
        require_input_kept(module.dropout, module.conv)
        require_same_shape(domain, bound.output)
        bound = replace(
            bound,
            log10=log10_one_plus(bound.log10),
            paper_log10=log10_one_plus(bound.paper_log10),
            output=replace(bound.output, radius=domain.radius + bound.output.radius),
        )
    return scale_output(bound, scale)


@bound_rule(ConvLayer)
def _conv_layer(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    ends = ("norm", "activation") if module.norm_first else ("activation", "norm")
    return children_in_order("dropout", "conv", *ends)(module, domain, scale)


bound_rule(NodeNorm)(children_in_order("norm"))
bound_rule(LipsLayer)(children_in_order("attn", "mlp"))


@bound_rule(AttentionBranch)
def _attention_branch(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    require_unchanged(module.dropout, Dropout, *PASSIVE)
    return children_in_order("norm", "conv", "proj")(module, domain, scale)


@bound_rule(GCN2)
def _gcn2(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    norm, row_sum = _adjacency(_edges(module, domain))
    encoder = chain([("encoder", module.encoder)], domain)
    value, radius = 1.0, encoder.output.radius
    for layer in module.layers:
        weight, alpha = _initial_residual(layer, encoder.output.channels)
        sigma = linear_sigma_bound(weight)
        value = outward(sigma * ((1.0 - alpha) * norm * value + alpha))
        radius = outward(sigma * ((1.0 - alpha) * row_sum * radius + alpha * encoder.output.radius))
    layers = simple_bound(value, encoder.output, radius=radius)
    head = chain([("head", module.head)], layers.output, scale)
    return compose(compose(encoder, layers, "layers"), head)


def _initial_residual(layer: Any, channels: int | None) -> tuple[Tensor, float]:
    """Return (1 - beta) I + beta W and alpha of a layer."""
    require_unchanged(layer, InitialResidualLayer)
    require_unchanged(layer.dropout, Dropout, *PASSIVE)
    conv = layer.conv
    require_unchanged(conv, SparseGCN2Conv)
    _check_messages(conv, GCN2Conv)
    weight, alpha, beta = conv.weight1.detach().double(), conv.alpha, conv.beta
    usual = conv.normalize and conv.add_self_loops and not conv.cached
    if not usual or conv.weight2 is not None or not 0.0 <= alpha <= 1.0:
        raise _refuse(conv, "use the default normalization, one weight, and alpha in [0, 1]")
    if weight.shape != (channels, channels):
        raise _refuse(conv, f"its weight has the shape {tuple(weight.shape)}")
    return (1.0 - beta) * torch.eye(len(weight)).to(weight) + beta * weight, alpha


@bound_rule(GraphNet)
def _graph_net(module: Any, domain: Domain, scale: Tensor | None) -> Bound:
    _edges(module, domain)
    layers = [(f"layers.{index}", layer) for index, layer in enumerate(module.layers)]
    parts = [("encoder", module.encoder), *layers, ("head", module.head)]
    return chain(parts, domain, scale)
