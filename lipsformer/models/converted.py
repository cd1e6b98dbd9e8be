"""The registered function with which timm builds any converted model again."""

from typing import Any, cast

import timm
from timm.models import build_model_with_cfg, swin_transformer, vision_transformer
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from lipsformer.models.pretrained import register_with_weights
from lipsformer.models.timm_conversion import convert, rename_architecture

__all__ = ["converted_to_lipsformer"]


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Bring a checkpoint to the sizes of the model, as timm does for the original."""
    if isinstance(model, SwinTransformer):
        return swin_transformer.checkpoint_filter_fn(state_dict, model)
    return vision_transformer.checkpoint_filter_fn(state_dict, cast(VisionTransformer, model))


@register_with_weights
def converted_to_lipsformer(
    pretrained: bool = False,
    *,
    original: str,
    convert_args: dict[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Build timm's model `original` and convert it with `lipsformer.convert`.

    Weights are those of a converted model. To convert the weights of the original, use
    `convert(timm.create_model(original, pretrained=True), spectral_init=False)`.

    Args:
        pretrained: Load the weights of the folder or repository that is opened.
        original: Name of timm's ViT, DeiT or Swin.
        convert_args: Arguments of `lipsformer.convert`.
        **kwargs: Arguments of the original and of timm's builder.

    Example:
        >>> import timm
        >>> import lipsformer
        >>> small = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
        >>> timm.create_model(
        ...     "converted_to_lipsformer", original="vit_tiny_patch16_224", **small
        ... ).num_classes
        3
    """

    def build(**arguments: Any) -> nn.Module:
        return convert(timm.create_model(original, **arguments), **convert_args or {})

    # as in timm's files of the two families
    features: dict[str, Any] = {"out_indices": 3, "feature_cls": "getter"}
    if timm.model_entrypoint(original).__module__ == swin_transformer.__name__:
        features = {"out_indices": (0, 1, 2, 3), "flatten_sequential": True}
    features["out_indices"] = kwargs.pop("out_indices", features["out_indices"])
    model = build_model_with_cfg(
        build,
        original,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=features,
        **kwargs,
    )
    rename_architecture(model)
    return model
