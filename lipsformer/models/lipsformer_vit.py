"""LipsFormer on the plain pre-norm ViT backbone: timm's VisionTransformer in its Lipschitz form.

The components are the paper's (Qi et al., "LipsFormer", ICLR 2023). Putting them on this backbone
is ours, and no published figure belongs to it.
"""

from typing import Any, Literal

from timm.layers import to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from lipsformer._arguments import check_count, check_drop_path
from lipsformer.layers import spectral_init_modules_
from lipsformer.layers.spectral import require_own_weights
from lipsformer.models._timm import model_cfg
from lipsformer.models.pretrained import register_with_weights
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
        attn: Literal["cosine", "lipschitznorm"] = "cosine",
        logit_scale: float | None = None,
        learn_logit_scale: bool = False,
        weight_init: str = "",
        **kwargs: Any,
    ) -> None:
        """Build the model.

        Args:
            value_scale: nu > 0, the length to which values are normalized.
            residual_scale: Initial weight of the residual branches; None for 1 / (number of
                blocks).
            attn: "cosine" for the paper's scaled cosine attention, "lipschitznorm" for dot products
                normalized by LipschitzNorm, which has neither tau nor nu.
            logit_scale: tau, which multiplies the cosines, in (0, 100]; None for 10.
            learn_logit_scale: Learn tau per head and block.
            weight_init: "" for spectral initialization, "skip" for none.
            **kwargs: Arguments of `timm.models.VisionTransformer`.

        Raises:
            ValueError: If `weight_init` is neither, a number is out of range, or `attn` has no
                use for an argument.
        """
        if weight_init not in ("", "skip"):
            raise ValueError(f"weight_init must be '' or 'skip', got {weight_init!r}")
        check_drop_path("drop_path_rate", kwargs.get("drop_path_rate", 0.0))
        for name in ("depth", "in_chans"):
            check_count(name, kwargs.get(name, 1))  # timm's defaults are larger
        super().__init__(weight_init="skip", **kwargs)
        given: dict[str, Any] = {} if logit_scale is None else {"logit_scale": logit_scale}
        convert(
            self,
            value_scale=value_scale,
            residual_scale=residual_scale,
            spectral_init=False,
            attn=attn,
            learn_logit_scale=learn_logit_scale,
            **given,
        )
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialize tokens and positions as timm does, and the weights spectrally.

        Args:
            mode: Passed on to timm.
            needs_reset: Reset the other parameters and the buffers too, as after `to_empty`.

        Raises:
            TypeError: If a weight is computed from others. Nothing has been changed then.
        """
        require_own_weights(self)
        super().init_weights(mode, needs_reset)
        spectral_init_modules_(self)

    def no_weight_decay(self) -> set[str]:
        """Names of the tokens, of the position embedding and of the learned logit scales."""
        names = {name for name, _ in self.named_parameters() if name.endswith("log_logit_scale")}
        return {*super().no_weight_decay(), *names}

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Change the image size and the patch size; the weights of both are interpolated.

        Args:
            img_size: Side, or (height, width), in pixels; None keeps it.
            patch_size: Side, or (height, width), of a patch in pixels; None keeps it.

        Raises:
            ValueError: If the model would refuse images of this size.
        """
        embed = self.patch_embed
        height, width = to_2tuple(embed.img_size if img_size is None else img_size)
        rows, columns = to_2tuple(embed.patch_size if patch_size is None else patch_size)
        divides = height % rows == 0 and width % columns == 0
        # A model of a fixed size leaves out the rest of an image after the last patch.
        if (
            height < rows
            or width < columns
            or not (divides or embed.strict_img_size or embed.dynamic_img_pad)
        ):
            raise ValueError(
                f"img_size={(height, width)} is not a positive multiple of the patch size "
                f"{(rows, columns)}"
            )
        super().set_input_size(img_size, patch_size)  # pyright: ignore[reportArgumentType]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new, spectrally initialized one.

        Args:
            num_classes: Number of classes; 0 leaves out the classifier.
            global_pool: New pooling, None to keep it.
        """
        super().reset_classifier(num_classes, global_pool)
        spectral_init_modules_(self.head)


def _create(
    variant: str, pretrained: bool, args: dict[str, Any], kwargs: dict[str, Any]
) -> LipsFormerViT:
    kwargs = {**args, **kwargs}
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


@register_with_weights
def lipsformer_vit_tiny(pretrained: bool = False, **kwargs: Any) -> LipsFormerViT:
    """ViT-Tiny/16 in the Lipschitz form, 5.7 M parameters."""
    args = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("lipsformer_vit_tiny", pretrained, args, kwargs)


@register_with_weights
def lipsformer_vit_small(pretrained: bool = False, **kwargs: Any) -> LipsFormerViT:
    """ViT-Small/16 in the Lipschitz form, 22.1 M parameters."""
    args = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create("lipsformer_vit_small", pretrained, args, kwargs)


@register_with_weights
def lipsformer_vit_base(pretrained: bool = False, **kwargs: Any) -> LipsFormerViT:
    """ViT-Base/16 in the Lipschitz form, 86.6 M parameters."""
    args = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create("lipsformer_vit_base", pretrained, args, kwargs)
