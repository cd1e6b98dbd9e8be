"""Layers shared by the vision and the graph models; each states its Lipschitz constant."""

from lipsformer.layers.attention import (
    LipschitzNormAttention,
    ScaledCosineAttention,
    cosine_normalize,
)
from lipsformer.layers.conv import DepthwiseConv2d
from lipsformer.layers.linear import Linear
from lipsformer.layers.norm import CenterNorm
from lipsformer.layers.residual import WeightedResidual, kept_samples
from lipsformer.layers.spectral import largest_singular_value, spectral_init_
from lipsformer.layers.window import (
    fit_window,
    merge_heads,
    partition_heads,
    relative_position_index,
)
from lipsformer.layers.window_attention import cosine_windows

__all__ = [
    "CenterNorm",
    "DepthwiseConv2d",
    "Linear",
    "LipschitzNormAttention",
    "ScaledCosineAttention",
    "WeightedResidual",
    "cosine_normalize",
    "cosine_windows",
    "fit_window",
    "kept_samples",
    "largest_singular_value",
    "merge_heads",
    "partition_heads",
    "relative_position_index",
    "spectral_init_",
]
