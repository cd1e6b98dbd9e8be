"""Layers shared by the vision and the graph models; each states its Lipschitz constant."""

from lipsformer.kernels.windows import cosine_windows
from lipsformer.layers.center_norm import CenterNorm
from lipsformer.layers.conv import DepthwiseConv2d
from lipsformer.layers.cosine_attention import (
    LipschitzNormAttention,
    ScaledCosineAttention,
    cosine_normalize,
)
from lipsformer.layers.linear import Linear
from lipsformer.layers.residual import WeightedResidual, kept_samples
from lipsformer.layers.spectral import largest_singular_value, spectral_init_
from lipsformer.layers.windows import (
    fit_window,
    merge_heads,
    partition_heads,
    relative_position_index,
)

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
