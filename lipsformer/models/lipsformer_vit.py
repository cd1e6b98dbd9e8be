"""LipsFormer on the plain pre-norm ViT backbone: timm's VisionTransformer in its Lipschitz form.

The components are the paper's (Qi et al., "LipsFormer", ICLR 2023). Putting them on this backbone
is ours, and no published figure belongs to it.
"""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from lipsformer.layers import spectral_init_modules_
from lipsformer.models._timm import model_cfg
from lipsformer.models.timm_conversion import convert

__all__ = ["LipsFormerViT"]


class LipsFormerViT(VisionTransformer):
    """timm's VisionTransformer with CenterNorm, scaled cosine attention and weighted residuals.

    Example:
        >>> import torch
        >>> from lipsformer.models import LipsFormerViT
        >>> small = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
        >>> LipsFormerViT(**small)(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 5])
    """

    def __init__(
        self,
        *,
        value_scale: float = 1.0,
        residual_scale: float | None = None,
        weight_init: str = "",
        **kwargs: Any,
    ) -> None:
        """Build the model.

        Args:
            value_scale: nu > 0, the length to which values are normalised.
            residual_scale: Initial weight of the residual branches; None for 1 / (number of
                blocks).
            weight_init: "" for spectral initialization, "skip" for none.
            **kwargs: Arguments of ``timm.models.VisionTransformer``.

        Raises:
            ValueError: If ``weight_init`` is neither.
        """
        if weight_init not in ("", "skip"):
            raise ValueError(f"weight_init must be '' or 'skip', got {weight_init!r}")
        super().__init__(weight_init="skip", **kwargs)
        convert(self, value_scale, residual_scale, spectral_init=False)
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialize tokens and positions as timm does, and the weights spectrally.

        Args:
            mode: Passed on to timm.
            needs_reset: Reset the other parameters and the buffers too, as after ``to_empty``.
        """
        super().init_weights(mode, needs_reset)
        spectral_init_modules_(self)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new, spectrally initialized one.

        Args:
            num_classes: Number of classes; 0 leaves out the classifier.
            global_pool: New pooling, None to keep it.
        """
        super().reset_classifier(num_classes, global_pool)
        spectral_init_modules_(self.head)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> LipsFormerViT:
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        LipsFormerViT,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )


def _cfg() -> dict[str, Any]:
    return model_cfg(pool_size=None, fixed_input_size=True, classifier="head")


default_cfgs = generate_default_cfgs(
    {
        "lipsformer_vit_tiny.untrained": _cfg(),
        "lipsformer_vit_small.untrained": _cfg(),
        "lipsformer_vit_base.untrained": _cfg(),
    }
)


@register_model
def lipsformer_vit_tiny(pretrained: bool = False, **kwargs: Any) -> LipsFormerViT:
    """ViT-Tiny/16 in the Lipschitz form, 5.7 M parameters."""
    args = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("lipsformer_vit_tiny", pretrained, **{**args, **kwargs})


@register_model
def lipsformer_vit_small(pretrained: bool = False, **kwargs: Any) -> LipsFormerViT:
    """ViT-Small/16 in the Lipschitz form, 22.1 M parameters."""
    args = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create("lipsformer_vit_small", pretrained, **{**args, **kwargs})


@register_model
def lipsformer_vit_base(pretrained: bool = False, **kwargs: Any) -> LipsFormerViT:
    """ViT-Base/16 in the Lipschitz form, 86.6 M parameters."""
    args = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create("lipsformer_vit_base", pretrained, **{**args, **kwargs})
