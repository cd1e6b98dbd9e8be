"""Models by name."""

import inspect
from collections.abc import Callable
from typing import Any

from .attention import DeepGAT, DeepGraphTransformer
from .baselines import GCN, GGNN
from .lips import LipsGAT, LipsGraphTransformer
from .residual import ResidualGAT, ResidualGCN
from .stack import GraphNet

__all__ = ["create_model"]

_MODELS: dict[str, Callable[..., GraphNet]] = {
    "gcn": GCN,
    "ggnn": GGNN,
    "deep_gat": DeepGAT,
    "deep_graph_transformer": DeepGraphTransformer,
    "residual_gcn": ResidualGCN,
    "residual_gat": ResidualGAT,
    "lips_gat": LipsGAT,
    "lips_graph_transformer": LipsGraphTransformer,
}


def create_model(
    name: str,
    in_channels: int,
    hidden_channels: int,
    out_channels: int,
    num_layers: int,
    **kwargs: Any,
) -> GraphNet:
    """Build the model called ``name``.

    Args:
        name: gcn, ggnn, deep_gat, deep_graph_transformer, residual_gcn, residual_gat, lips_gat or
            lips_graph_transformer.
        in_channels: Number of features.
        hidden_channels: Width of the layers, per head where there are heads.
        out_channels: Number of classes.
        num_layers: Number of layers, >= 1.
        **kwargs: Keyword arguments of the model's class.

    Raises:
        ValueError: If the name, an argument or ``num_layers`` is not known or possible.
    """
    if name not in _MODELS:
        raise ValueError(f"model {name!r} is not known; choose one of {', '.join(_MODELS)}")
    if num_layers < 1:
        raise ValueError(f"num_layers={num_layers} must be at least 1")
    signature = LipsGraphTransformer if name == "lips_gat" else _MODELS[name]
    allowed = inspect.getfullargspec(signature).kwonlyargs
    for key in kwargs:
        if key not in allowed:
            raise ValueError(f"{name} has no argument {key!r}; it takes {', '.join(allowed)}")
    return _MODELS[name](in_channels, hidden_channels, out_channels, num_layers, **kwargs)
