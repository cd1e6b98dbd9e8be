"""The door to the kernels for GPUs: Triton is imported at the first call, if it is installed."""

from torch import Tensor

from lipsformer.kernels.block import BlockTensors
from lipsformer.kernels.gpu_arguments import WindowArguments


def gpu_block(x: Tensor, tensors: BlockTensors, attention: WindowArguments) -> Tensor:
    """Apply a block of two convolution branches, attention and MLP.

    Args:
        x: [B, H, W, C].
        tensors: The parameters.
        attention: The attention between its projections.
    """
    from lipsformer.kernels.triton.block import apply_block

    return apply_block(x, tensors, attention)


def gpu_cosine_windows(qkv: Tensor, arguments: WindowArguments) -> Tensor:
    """Attend in windows without copies of queries, keys, values or scores.

    Args:
        qkv: [B, H, W, 3, P, C], queries, keys and values of one or two partitions of the heads.
        arguments: The attention.

    Returns:
        [B, H, W, P * C].
    """
    from lipsformer.kernels.triton.windows import cosine_windows

    return cosine_windows(qkv, *arguments)
