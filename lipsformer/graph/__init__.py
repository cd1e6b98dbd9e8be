"""Deep graph networks built of Lipschitz continuous layers, on PyTorch Geometric."""

try:
    import torch_geometric as _  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "lipsformer.graph needs PyTorch Geometric; install it with pip install 'lipsformer[graph]'",
        name="torch_geometric",
    ) from None

from lipsformer.graph.cosine_conv import ScaledCosineConv
from lipsformer.graph.edge_attention.csr import SortedEdges
from lipsformer.graph.gat_conv import LipschitzGATConv
from lipsformer.graph.gcn_conv import SparseGCNConv
from lipsformer.graph.models import (
    GCN,
    GCN2,
    GGNN,
    ClassicGNN,
    DeepGAT,
    DeepGraphTransformer,
    LipsGAT,
    LipsGraphTransformer,
    ResidualGAT,
    ResidualGCN,
    create_model,
)
from lipsformer.graph.norm import NeighborNorm
from lipsformer.graph.transformer_conv import LipschitzTransformerConv

__all__ = [
    "GCN",
    "GCN2",
    "GGNN",
    "ClassicGNN",
    "DeepGAT",
    "DeepGraphTransformer",
    "LipsGAT",
    "LipsGraphTransformer",
    "LipschitzGATConv",
    "LipschitzTransformerConv",
    "NeighborNorm",
    "ResidualGAT",
    "ResidualGCN",
    "ScaledCosineConv",
    "SortedEdges",
    "SparseGCNConv",
    "create_model",
]
