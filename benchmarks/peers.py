"""Models that no name alone makes, for the option `--peer` of `benchmarks.models`."""

import timm
from torch import nn


def swin_nano() -> nn.Module:
    """timm's Swin in the shape of `lipsformer_swin_nano`, 32 px."""
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


def swin_tiny_windows_of_5() -> nn.Module:
    """timm's Swin-Tiny at 160 px with windows that need no padding, as `set_input_size` gives."""
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=160, window_size=5, drop_path_rate=0.2
    )


def lipsformer_swin_tiny_windows_of_5() -> nn.Module:
    """`lipsformer_swin_tiny` with the same windows."""
    return timm.create_model("lipsformer_swin_tiny", window_size=5, drop_path_rate=0.2)
