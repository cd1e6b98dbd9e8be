"""Names of the released code's checkpoints, translated to this project's."""

import re
from typing import Any

from torch import Tensor, nn

# (pattern, replacement) for the parts that the two released bodies share, inside a block
_BLOCK_RULES = (
    (r"\.dwconv_layers\.0\.", ".conv1.depthwise."),
    (r"\.dwconv_layers\.1\.", ".conv2.depthwise."),
    (r"\.nin\.", ".conv1.pointwise."),
    (r"\.scale_layers\.0\.scale$", ".residual_conv1.residual_scale"),
    (r"\.scale_layers\.1\.scale$", ".residual_conv2.residual_scale"),
    (r"\.alpha1\.scale$", ".residual_attn.residual_scale"),
    (r"\.alpha2\.scale$", ".residual_mlp.residual_scale"),
    (r"^head\.", "head.fc."),
)
_CSWIN_RULES = (
    (r"^stage1_conv_embed\.0\.", "patch_embed.proj."),
    (r"^stage1_conv_embed\.2\.", "patch_embed.norm."),
    (r"^merge(\d)\.", r"stages.\1.downsample."),
    (r"\.qkv\.", ".attn.qkv."),
    (r"\.proj\.(weight|bias)$", r".attn.proj.\1"),
    (r"\.attns\.(\d)\.get_v\.", r".attn.lepe.\1."),
)


def official_swin_to_lipsformer(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Rename the parameters of a released Swin checkpoint; any other is returned as it is.

    The released code downsamples at the end of a stage, this project (as timm) at the start of the
    next; its 1x1 convolution is a linear layer here; index buffers are dropped.

    Args:
        state_dict: Names to tensors.
    """
    if not any(name.endswith(".dwconv_layers.0.weight") for name in state_dict):
        return state_dict
    converted = {}
    for name, tensor in state_dict.items():
        if name.endswith("relative_position_index"):
            continue
        if match := re.match(r"^layers\.(\d+)\.downsample\.(.*)", name):
            name = f"stages.{int(match[1]) + 1}.downsample.{match[2]}"
        name = re.sub(r"^layers\.", "stages.", name)
        converted.update([_rename(name, tensor, _BLOCK_RULES)])
    return converted


def official_cswin_to_lipsformer(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Rename the parameters of a released CSwin checkpoint; any other is returned as it is.

    The norm after the attention, which the released code creates and never uses, is dropped.

    Args:
        state_dict: Names to tensors.
    """
    if not any(name.startswith("stage1_conv_embed.") for name in state_dict):
        return state_dict
    converted = {}
    for name, tensor in state_dict.items():
        if ".norm1." in name:
            continue
        if match := re.match(r"^stage(\d)\.(\d+)\.(.*)", name):
            name = f"stages.{int(match[1]) - 1}.blocks.{match[2]}.{match[3]}"
            converted.update([_rename(name, tensor, _CSWIN_RULES[3:] + _BLOCK_RULES)])
        else:
            converted.update([_rename(name, tensor, _CSWIN_RULES[:3] + _BLOCK_RULES)])
    return converted


def check_same_form(state_dict: dict[str, Any], model: nn.Module) -> None:
    """Refuse weights trained with the other form of the attention (paper or released code).

    The paper's form saves the length of its normalised values with the weights.

    Args:
        state_dict: Names to tensors, in this project's names.
        model: The model to be loaded.

    Raises:
        ValueError: If the forms differ; the logits would be wrong without a sign of it.
    """
    suffix = ".value_scale"
    has_blocks = any(name.endswith("attn.qkv.weight") for name in state_dict)
    weights_normalise = any(name.endswith(suffix) for name in state_dict)
    model_normalises = any(name.endswith(suffix) for name in model.state_dict())
    names = {True: "paper", False: "released code"}
    if has_blocks and weights_normalise != model_normalises:
        raise ValueError(
            f"the weights have the form of the {names[weights_normalise]}, the model that of the "
            f"{names[model_normalises]}: create it with official_compat={not weights_normalise}"
        )


def _rename(name: str, tensor: Tensor, rules: tuple[tuple[str, str], ...]) -> tuple[str, Tensor]:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    if name.endswith("conv1.pointwise.weight"):
        tensor = tensor.flatten(1)
    return name, tensor
