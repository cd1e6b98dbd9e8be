"""Weights in released checkpoints and those of earlier versions, under today's names."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

# (pattern, replacement), applied in order, for the parts of a block that both releases share
_BLOCK_RULES = (
    (r"\.dwconv_layers\.0\.", ".conv1.branch.depthwise."),
    (r"\.dwconv_layers\.1\.", ".conv2.branch.depthwise."),
    (r"\.nin\.", ".conv1.branch.pointwise."),
    (r"\.scale_layers\.0\.scale$", ".conv1.residual_scale"),
    (r"\.scale_layers\.1\.scale$", ".conv2.residual_scale"),
    (r"\.alpha1\.scale$", ".attn.residual_scale"),
    (r"\.alpha2\.scale$", ".mlp.residual_scale"),
    (r"\.mlp\.fc", ".mlp.branch.fc"),
    (r"^head\.", "head.fc."),
)
_SWIN_RULES = ((r"\.attn\.(?!residual_scale)", ".attn.branch."),)
_CSWIN_STEM_RULES = (
    (r"^stage1_conv_embed\.0\.", "patch_embed.proj."),
    (r"^stage1_conv_embed\.2\.", "patch_embed.norm."),
    (r"^merge(\d)\.", r"stages.\1.downsample."),
)
_CSWIN_BLOCK_RULES = (
    (r"\.qkv\.", ".attn.branch.qkv."),
    (r"\.proj\.(weight|bias)$", r".attn.branch.proj.\1"),
    (r"\.attns\.(\d)\.get_v\.", r".attn.branch.lepe.\1."),
)


def unwrap(checkpoint: Any) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, which may hold them in a `model` or `state_dict` entry.

    Args:
        checkpoint: Names to tensors, or a mapping that holds them.

    Raises:
        ValueError: If it holds no mapping of names to tensors.

    Example:
        >>> import torch
        >>> from lipsformer.models.official_weights import unwrap
        >>> unwrap({"model": {"head.bias": torch.zeros(2)}, "epoch": 3})
        {'head.bias': tensor([0., 0.])}
    """
    for key in ("model", "state_dict"):
        if isinstance(checkpoint, Mapping) and isinstance(checkpoint.get(key), Mapping):
            checkpoint = checkpoint[key]
    if not isinstance(checkpoint, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in checkpoint.items()
    ):
        raise ValueError(
            "it holds no mapping of names to tensors, neither at the top nor in an entry 'model' "
            "or 'state_dict'"
        )
    return dict(checkpoint)


def official_swin_to_lipsformer(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Rename the parameters of a released Swin checkpoint; any other is returned as it is.

    The released code downsamples at the end of a stage. This project downsamples at the start of
    the next stage, as timm does. The released 1x1 convolution is a linear layer here. Index buffers
    are dropped.

    Args:
        state_dict: Names to tensors.

    Returns:
        Today's names to tensors. A released 1x1 convolution loses its last two axes.

    Example:
        >>> import torch
        >>> from lipsformer.models.official_weights import official_swin_to_lipsformer
        >>> names = ("layers.0.blocks.1.dwconv_layers.0.weight", "layers.0.downsample.norm.weight")
        >>> list(official_swin_to_lipsformer(dict.fromkeys(names, torch.zeros(1))))
        ['stages.0.blocks.1.conv1.branch.depthwise.weight', 'stages.1.downsample.norm.weight']
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
        name = _rename(name, _SWIN_RULES + _BLOCK_RULES)
        converted[name] = _without_kernel_axes(name, tensor)
    return converted


def official_cswin_to_lipsformer(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Rename the parameters of a released CSwin checkpoint; any other is returned as it is.

    The norm after the attention, which the released code creates and never uses, is dropped.

    Args:
        state_dict: Names to tensors.

    Returns:
        Today's names to tensors. A released 1x1 convolution loses its last two axes.

    Example:
        >>> import torch
        >>> from lipsformer.models.official_weights import official_cswin_to_lipsformer
        >>> names = ("stage1_conv_embed.0.weight", "stage1.0.qkv.weight", "stage1.0.norm1.weight")
        >>> list(official_cswin_to_lipsformer(dict.fromkeys(names, torch.zeros(1))))
        ['patch_embed.proj.weight', 'stages.0.blocks.0.attn.branch.qkv.weight']
    """
    if not any(name.startswith("stage1_conv_embed.") for name in state_dict):
        return state_dict
    converted = {}
    for name, tensor in state_dict.items():
        if ".norm1." in name:
            continue
        if match := re.match(r"^stage(\d)\.(\d+)\.(.*)", name):
            name = f"stages.{int(match[1]) - 1}.blocks.{match[2]}.{match[3]}"
            name = _rename(name, _CSWIN_BLOCK_RULES + _BLOCK_RULES)
        else:
            name = _rename(name, _CSWIN_STEM_RULES + _BLOCK_RULES)
        converted[name] = _without_kernel_axes(name, tensor)
    return converted


def rename_earlier_version(state_dict: dict[str, Any], prefix: str = "") -> None:
    """Rename, in place, parameters saved before a weighted residual owned its branch.

    In a block, `attn.` becomes `attn.branch.` and `residual_attn.` becomes `attn.`. The
    other three branches are renamed in the same way.

    Args:
        state_dict: Names to tensors. Names of today's version stay as they are.
        prefix: Beginning of the model's names, such as "model.".

    Example:
        >>> import torch
        >>> from lipsformer.models.official_weights import rename_earlier_version
        >>> block = "stages.0.blocks.0."
        >>> names = (f"{block}attn.qkv.weight", f"{block}residual_attn.residual_scale")
        >>> state_dict = dict.fromkeys(names, torch.zeros(1))
        >>> rename_earlier_version(state_dict)
        >>> sorted(state_dict)
        ['stages.0.blocks.0.attn.branch.qkv.weight', 'stages.0.blocks.0.attn.residual_scale']
    """
    block = re.escape(prefix) + r"stages\.\d+\.blocks\.\d+\."
    if not any(re.match(block + r"residual_", name) for name in state_dict):
        return
    for name in list(state_dict):
        new = re.sub(rf"^({block})(conv1|conv2|attn|mlp)\.", r"\1\2.branch.", name)
        new = re.sub(rf"^({block})residual_(conv1|conv2|attn|mlp)\.", r"\1\2.", new)
        if new != name:
            state_dict[new] = state_dict.pop(name)


def check_same_form(state_dict: dict[str, Any], model: nn.Module) -> None:
    """Refuse weights trained with the other form of the attention (paper or released code).

    The paper's form saves the length of its normalized values with the weights.

    Args:
        state_dict: Names to tensors, in this project's names.
        model: The model to be loaded.

    Raises:
        ValueError: If the forms differ; the logits would be wrong without a sign of it.

    Example:
        >>> import torch
        >>> from lipsformer.models.official_weights import check_same_form
        >>> of_paper = {"attn.qkv.weight": torch.zeros(6, 2), "attn.value_scale": torch.ones(1)}
        >>> check_same_form(of_paper, torch.nn.Linear(2, 6))  # a model without value_scale
        Traceback (most recent call last):
        ValueError: the weights have the form of the paper, the model that of the released code: ...
    """
    suffix = ".value_scale"
    has_attention = any(name.endswith(".qkv.weight") for name in state_dict)
    weights_normalize = any(name.endswith(suffix) for name in state_dict)
    model_normalizes = any(name.endswith(suffix) for name in model.state_dict())
    names = {True: "paper", False: "released code"}
    if has_attention and weights_normalize != model_normalizes:
        raise ValueError(
            f"the weights have the form of the {names[weights_normalize]}, the model that of the "
            f"{names[model_normalizes]}: create it with official_compat={not weights_normalize}"
        )


def _rename(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _without_kernel_axes(name: str, tensor: Tensor) -> Tensor:
    """Turn the weight [out, in, 1, 1] of a released 1x1 convolution into that of a linear layer."""
    return tensor.reshape(tensor.shape[:2]) if name.endswith(".pointwise.weight") else tensor
