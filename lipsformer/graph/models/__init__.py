"""Deep networks for node classification: a stack of layers between two linear maps.

Every model keeps its layers in ``layers``, each called as ``layer(x, edge_index)``, so that the
diagnostics can look at any of them.
"""

from .attention import DeepGAT, DeepGraphTransformer
from .baselines import GCN, GGNN
from .create import create_model
from .lips import LipsGAT, LipsGraphTransformer
from .residual import ResidualGAT, ResidualGCN, SpectralScale, default_bound
from .stack import GraphNet

__all__ = [
    "GCN",
    "GGNN",
    "DeepGAT",
    "DeepGraphTransformer",
    "GraphNet",
    "LipsGAT",
    "LipsGraphTransformer",
    "ResidualGAT",
    "ResidualGCN",
    "SpectralScale",
    "create_model",
    "default_bound",
]
