"""The core of an attention module, the part between its projections: softmax(scores) v.

The Swin, CSwin and ViT forms and the converted models of timm share it.
"""

from typing import Any

from torch import nn

from lipsformer.layers import LipschitzNormAttention, ScaledCosineAttention

# what ScaledCosineAttention takes and LipschitzNorm does not, with the defaults
COSINE_ONLY = {"logit_scale": 10.0, "learn_logit_scale": False, "value_scale": 1.0}


def check_attn(attn: str, **options: Any) -> None:
    """Raise a `ValueError` if an attention is unknown or would ignore one of its options.

    Args:
        attn: "cosine" or "lipschitznorm".
        **options: Arguments of `ScaledCosineAttention`. LipschitzNorm takes only their defaults.
    """
    if attn not in ("cosine", "lipschitznorm"):
        raise ValueError(f"attn must be 'cosine' or 'lipschitznorm', got {attn!r}")
    for name, default in COSINE_ONLY.items():
        if attn == "lipschitznorm" and options.get(name, default) != default:
            raise ValueError(
                f"{name}={options[name]!r} has no effect with attn='lipschitznorm', which has "
                "neither tau nor nu: leave it out"
            )


def make_core(attn: str, num_heads: int, attn_drop: float, **options: Any) -> nn.Module:
    """Build the attention that `attn` names.

    Args:
        attn: "cosine" or "lipschitznorm".
        num_heads: Number of heads.
        attn_drop: Dropout probability of the attention weights.
        **options: Further arguments of `ScaledCosineAttention`. They do not apply to LipschitzNorm,
            for which `check_attn` refuses other values than the defaults.
    """
    if attn == "lipschitznorm":
        return LipschitzNormAttention(num_heads, attn_drop)
    return ScaledCosineAttention(num_heads, attn_drop=attn_drop, **options)
