"""Deep graph networks of Lipschitz-continuous layers, on PyTorch Geometric."""

try:
    import torch_geometric as _  # noqa: F401
except ModuleNotFoundError:
    raise ImportError(
        "lipsformer.graph needs PyTorch Geometric; install it with pip install 'lipsformer[graph]'"
    ) from None

from .conv import LipschitzGATConv, LipschitzTransformerConv, ScaledCosineConv
from .models import (
    GCN,
    GGNN,
    DeepGAT,
    DeepGraphTransformer,
    LipsGAT,
    LipsGraphTransformer,
    ResidualGAT,
    ResidualGCN,
    create_model,
)
from .norm import NeighborNorm

__all__ = [
    "GCN",
    "GGNN",
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
    "create_model",
]
