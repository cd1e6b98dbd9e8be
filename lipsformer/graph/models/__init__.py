"""Deep networks for node classification: a stack of layers between two linear maps.

Every model keeps its layers in `layers`, and each is called as `layer(x, edges)`, so that the
diagnostics can look at any of them. Those of `GCN2` also take the output of the encoder.
"""

from lipsformer.graph.models.attention import DeepGAT, DeepGraphTransformer
from lipsformer.graph.models.baselines import GCN, GGNN
from lipsformer.graph.models.classic import ClassicGNN
from lipsformer.graph.models.create import create_model
from lipsformer.graph.models.initial_residual import GCN2
from lipsformer.graph.models.lips import LipsGAT, LipsGraphTransformer
from lipsformer.graph.models.residual import ResidualGAT, ResidualGCN, default_bound
from lipsformer.graph.models.stack import ConvLayer, GraphNet

__all__ = [
    "GCN",
    "GCN2",
    "GGNN",
    "ClassicGNN",
    "ConvLayer",
    "DeepGAT",
    "DeepGraphTransformer",
    "GraphNet",
    "LipsGAT",
    "LipsGraphTransformer",
    "ResidualGAT",
    "ResidualGCN",
    "create_model",
    "default_bound",
]
