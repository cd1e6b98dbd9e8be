"""Layers shared by the vision and the graph models; each states its Lipschitz constant."""

from lipsformer._renamed import renamed
from lipsformer.layers.center_norm import CenterNorm
from lipsformer.layers.contractive import (
    FoldShift,
    JoinTokens,
    orthogonalize,
)
from lipsformer.layers.conv import DepthwiseConv2d
from lipsformer.layers.cosine_attention import ScaledCosineAttention, cosine_normalize
from lipsformer.layers.linear import Linear, apply_linear
from lipsformer.layers.lipschitz_norm import LipschitzNormAttention
from lipsformer.layers.residual import WeightedResidual
from lipsformer.layers.spectral import (
    largest_singular_value,
    spectral_init_,
    spectral_init_modules_,
)
from lipsformer.layers.window_attention import attend_in_windows
from lipsformer.layers.windows import (
    Arrangement,
    merge_heads,
    pad_to_even,
    partition_heads,
    relative_position_index,
)

__all__ = [
    "Arrangement",
    "CenterNorm",
    "DepthwiseConv2d",
    "FoldShift",
    "JoinTokens",
    "Linear",
    "LipschitzNormAttention",
    "ScaledCosineAttention",
    "WeightedResidual",
    "apply_linear",
    "attend_in_windows",
    "cosine_normalize",
    "largest_singular_value",
    "merge_heads",
    "orthogonalize",
    "pad_to_even",
    "partition_heads",
    "relative_position_index",
    "spectral_init_",
    "spectral_init_modules_",
]

__getattr__ = renamed(__name__)
