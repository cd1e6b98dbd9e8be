"""Models of other projects in the shape of one of ours, for `benchmarks.models`."""

import timm
from torch import nn


def swin_nano() -> nn.Module:
    """timm's Swin in the shape of ``lipsformer_swin_nano``, 32 px."""
    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        patch_size=2,
        embed_dim=32,
        depths=(1, 2, 4, 1),
        num_heads=(2, 4, 8, 16),
        window_size=4,
        drop_path_rate=0.2,
    )
