"""How a processor computes the formulas of `lipsformer.layers` faster, with the same results.

Every function takes tensors and numbers. A layer asks `usable` first and otherwise computes its
formula with PyTorch's operators. `center` decides that itself.

Example:
    >>> import torch
    >>> from lipsformer import kernels
    >>> x, weight = torch.ones(1, 2, 3, dtype=torch.float64), torch.ones(5, 3, dtype=torch.float64)
    >>> kernels.usable("linear", x, weight, training=True)  # float64 has no kernel
    False
"""

from lipsformer.kernels.attention import normalize_rows, recomputed_attention
from lipsformer.kernels.block import BlockTensors, block
from lipsformer.kernels.depthwise import DEPTHWISE_SIZES, depthwise_conv, depthwise_gelu
from lipsformer.kernels.dispatch import (
    active_transform,
    gpu_switched_off,
    log,
    product_dtype,
    usable,
)
from lipsformer.kernels.elu import elu
from lipsformer.kernels.fold_shift import fold_shift
from lipsformer.kernels.gpu import gpu_block, gpu_cosine_windows
from lipsformer.kernels.gpu_arguments import (
    GPU_DEPTHWISE_SIZE,
    MAX_GPU_TOKENS,
    MAX_GPU_TOKENS_WITH_BIAS,
    WindowArguments,
)
from lipsformer.kernels.linear import fused_linear
from lipsformer.kernels.node_terms import node_terms
from lipsformer.kernels.pointwise import (
    center,
    center_affine,
    fork,
    gelu_residual,
    residual,
)
from lipsformer.kernels.product import pack_weight, packed_linear
from lipsformer.kernels.recording import CannotRecordError, Recorder
from lipsformer.kernels.verdict import (
    TIMED_SAMPLES,
    TRIAL_SAMPLES,
    passes_trial,
    restore_verdicts,
    stored_verdict,
    verdicts,
)
from lipsformer.kernels.windows import MAX_WINDOW_TOKENS, Partition, cosine_windows

__all__ = [
    "DEPTHWISE_SIZES",
    "GPU_DEPTHWISE_SIZE",
    "MAX_GPU_TOKENS",
    "MAX_GPU_TOKENS_WITH_BIAS",
    "MAX_WINDOW_TOKENS",
    "TIMED_SAMPLES",
    "TRIAL_SAMPLES",
    "BlockTensors",
    "CannotRecordError",
    "Partition",
    "Recorder",
    "WindowArguments",
    "active_transform",
    "block",
    "center",
    "center_affine",
    "cosine_windows",
    "depthwise_conv",
    "depthwise_gelu",
    "elu",
    "fold_shift",
    "fork",
    "fused_linear",
    "gelu_residual",
    "gpu_block",
    "gpu_cosine_windows",
    "gpu_switched_off",
    "log",
    "node_terms",
    "normalize_rows",
    "pack_weight",
    "packed_linear",
    "passes_trial",
    "product_dtype",
    "recomputed_attention",
    "residual",
    "restore_verdicts",
    "stored_verdict",
    "usable",
    "verdicts",
]
