"""Create models by name."""

import inspect
from collections.abc import Callable
from typing import Any

from lipsformer.graph.models.attention import DeepGAT, DeepGraphTransformer
from lipsformer.graph.models.baselines import GCN, GGNN
from lipsformer.graph.models.classic import ClassicGNN
from lipsformer.graph.models.initial_residual import GCN2
from lipsformer.graph.models.lips import LipsGAT, LipsGraphTransformer
from lipsformer.graph.models.residual import ResidualGAT, ResidualGCN
from lipsformer.graph.models.stack import GraphNet

__all__ = ["create_model"]

_MODELS: dict[str, Callable[..., GraphNet]] = {
    "gcn": GCN,
    "gcn2": GCN2,
    "classic": ClassicGNN,
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
    """Build the model called `name`.

    Args:
        name: gcn, gcn2, classic, ggnn, deep_gat, deep_graph_transformer, residual_gcn,
            residual_gat, lips_gat or lips_graph_transformer.
        in_channels: Number of features.
        hidden_channels: Width of the layers, or of each head in models with heads.
        out_channels: Number of classes.
        num_layers: Number of layers, >= 1.
        **kwargs: Keyword arguments of the model's class.

    Example:
        >>> from lipsformer.graph import create_model
        >>> type(create_model("deep_gat", 16, 8, 3, num_layers=5, norm="lipschitznorm")).__name__
        'DeepGAT'

    Raises:
        ValueError: If the name or an argument is unknown, or if `num_layers` is less than 1.
    """
    if name not in _MODELS:
        raise ValueError(f"model {name!r} is not known; choose one of {', '.join(_MODELS)}")
    allowed = _keyword_arguments(_MODELS[name])
    for key in kwargs:
        if key not in allowed:
            raise ValueError(f"{name} has no argument {key!r}; it takes {', '.join(allowed)}")
    return _MODELS[name](in_channels, hidden_channels, out_channels, num_layers, **kwargs)


def _keyword_arguments(cls: Any) -> list[str]:
    """Return the keyword arguments of a class and those that its `**kwargs` passes on."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        spec = inspect.getfullargspec(base.__init__)
        names |= dict.fromkeys(spec.kwonlyargs)
        if spec.varkw is None:
            break
    return list(names)
