"""Turn timm's plain ViT, DeiT and Swin into their Lipschitz form."""

import inspect
import math
from typing import Any, Literal, cast

import torch
from timm.layers import (
    Attention,
    DropPath,
    LayerNorm,
    LayerNormFp32,
    LayerScale,
    Mlp,
    register_notrace_module,
)
from timm.models._input import update_model_args
from timm.models.swin_transformer import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    WindowAttention,
)
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from lipsformer._hooks import has_hooks, has_own_forward
from lipsformer.layers import CenterNorm, attend_in_windows, spectral_init_modules_
from lipsformer.layers.spectral import require_own_weights
from lipsformer.models._core import check_attn, make_core
from lipsformer.models.folded_layers import FrozenLinear
from lipsformer.models.folding import (
    fold_norm_before,
    register_fold,
    require_ending,
    require_kind,
    require_plain,
    require_single_use,
    scale_output,
)
from lipsformer.models.lipsformer_swin import fold_patch_merging

# The registered name of all converted models, whose argument `original` names timm's model.
CONVERTED = "converted_to_lipsformer"
# The norms that CenterNorm can replace. Their subclasses may normalize something else, as timm's
# LayerNorm2d does, whose channels come first.
NORMS = (nn.LayerNorm, LayerNorm, LayerNormFp32)


def _attend_in_one_row(qkv: Tensor, attention: nn.Module, bias: Tensor | None = None) -> Tensor:
    """Attend with every sequence of `qkv` ([B, N, 3 * C]) as a window of one row."""
    rows = qkv.unflatten(-1, (3, 1, -1)).unsqueeze(1)
    return attend_in_windows(rows, [(1, qkv.shape[1])], [attention], bias).squeeze(1)


def _attend_with_mask(qkv: Tensor, attention: Any, mask: Tensor | None) -> Tensor:
    """Attend over every sequence of `qkv` ([B, N, 3 * C]) with a mask that may differ for each."""
    qkv = qkv.unflatten(-1, (3, attention.num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return attention(q, k, v, mask).transpose(1, 2).flatten(2)


class CosineAttention(nn.Module):
    """Self-attention with the parameters and the call of timm's `Attention`.

    The name is that of the default kind: `attn` selects scaled cosine attention or LipschitzNorm.

    Shape: [B, N, C] to the same. Lipschitz constant: see `ScaledCosineAttention` and
    `LipschitzNormAttention`.

    Example:
        >>> import torch
        >>> from timm.layers import Attention
        >>> from lipsformer.models.timm_conversion import CosineAttention
        >>> CosineAttention(Attention(8, num_heads=2), "cosine")(torch.zeros(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    def __init__(self, original: Attention, attn: str, **options: Any) -> None:
        """Take over the projections of an attention.

        Args:
            original: Attention without query, key or output normalization and without gate.
            attn: "cosine" for `ScaledCosineAttention`, "lipschitznorm" for
                `LipschitzNormAttention`.
            **options: Arguments of `ScaledCosineAttention`.
        """
        super().__init__()
        weight = original.qkv.weight
        self.num_heads = original.num_heads
        self.head_dim = original.head_dim
        self.qkv = original.qkv
        dd: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.attention = make_core(attn, self.num_heads, original.attn_drop.p, **options, **dd)
        self.proj = original.proj
        self.proj_drop = original.proj_drop

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend over the tokens of `x` ([B, N, C]).

        Args:
            x: Tokens.
            attn_mask: Added to the scores, or True where to attend; broadcastable to
                [B, heads, N, N]. A query that may attend to no token gets 0.
            is_causal: Let token i attend to tokens 0 to i only.
        """
        qkv = self.qkv(x)
        if attn_mask is None and not is_causal:
            x = _attend_in_one_row(qkv, self.attention)
        else:
            if is_causal:  # takes the place of a mask, as in timm
                tokens = x.shape[1]
                attn_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
            x = _attend_with_mask(qkv, self.attention, attn_mask)
        return self.proj_drop(self.proj(x))


register_notrace_module(CosineAttention)  # FX cannot trace the choice of a kernel


class CosineWindowAttention(WindowAttention):
    """Attention in timm's Swin windows, shifted ones included.

    The name is that of the default kind: `attn` selects scaled cosine attention or LipschitzNorm.

    Shape: [B * num_windows, N, C] to the same. Lipschitz constant: see `ScaledCosineAttention`
    and `LipschitzNormAttention`.

    Example:
        >>> import torch
        >>> from timm.models.swin_transformer import WindowAttention
        >>> from lipsformer.models.timm_conversion import CosineWindowAttention
        >>> attn = CosineWindowAttention(WindowAttention(8, 2, window_size=3), "cosine")
        >>> attn(torch.zeros(4, 9, 8)).shape
        torch.Size([4, 9, 8])
    """

    def __init__(self, original: WindowAttention, attn: str, **options: Any) -> None:
        """Take over the projections and the table of biases of a window attention.

        Args:
            original: timm's window attention.
            attn: "cosine" for `ScaledCosineAttention`, "lipschitznorm" for
                `LipschitzNormAttention`.
            **options: Arguments of `ScaledCosineAttention`.
        """
        weight = original.qkv.weight
        dd: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        window_size = cast(tuple[int, int], original.window_size)
        super().__init__(original.dim, original.num_heads, window_size=window_size, **dd)
        self.qkv = original.qkv
        self.proj = original.proj
        self.proj_drop = original.proj_drop
        del self.attn_drop, self.softmax  # timm's, which are not called
        self.relative_position_bias_table = original.relative_position_bias_table
        self.attention = make_core(attn, self.num_heads, original.attn_drop.p, **options, **dd)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within the windows `x` ([B * num_windows, N, C]).

        Args:
            x: Tokens of the windows.
            mask: [num_windows, N, N], added to the scores of the shifted windows.
        """
        qkv = self.qkv(x)
        bias = self._get_rel_pos_bias().to(qkv.dtype)
        if mask is None:
            x = _attend_in_one_row(qkv, self.attention, bias)
        else:
            bias = bias + mask.unsqueeze(1).to(qkv.dtype)
            bias = bias.repeat(qkv.shape[0] // mask.shape[0], 1, 1, 1)
            x = _attend_with_mask(qkv, self.attention, bias)
        return self.proj_drop(self.proj(x))


register_notrace_module(CosineWindowAttention)  # FX cannot trace the choice of a kernel


def convert(
    model: nn.Module,
    *,
    value_scale: float = 1.0,
    residual_scale: float | None = None,
    spectral_init: bool = True,
    attn: Literal["cosine", "lipschitznorm"] = "cosine",
    logit_scale: float = 10.0,
    learn_logit_scale: bool = False,
) -> nn.Module:
    r"""Make a plain timm ViT, DeiT or Swin Lipschitz continuous, in place.

    LayerNorm becomes CenterNorm, dot-product attention scaled cosine attention, every residual
    branch gets a learnable weight per channel (timm's `LayerScale`), and the weights are
    initialized spectrally. Shapes, parameter names and the whole API of the class stay; names that
    are new are `ls1.gamma` and `ls2.gamma` (`drop_path1.0.gamma` and so on in Swin),
    `attn.attention.value_scale` and `attn.attention.log_logit_scale`. What takes the place of a
    frozen parameter is frozen. timm's `save_for_hf` and `local-dir:` rebuild the converted form
    of a model that `timm.create_model` made.

    Example:
        >>> import timm
        >>> import lipsformer
        >>> small = {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}
        >>> model = lipsformer.convert(timm.create_model("vit_tiny_patch16_224", **small))
        >>> type(model.norm).__name__
        'CenterNorm'

    Args:
        model: A `VisionTransformer` (DeiT included) of plain pre-norm blocks with learned or no
            position embedding, or a `SwinTransformer`.
        value_scale: nu, the length to which values are normalized, > 0.
        residual_scale: Initial weight of the branches; None for 1 / (number of blocks), or for the
            model's own `LayerScale` if `spectral_init` is False and it has one.
        spectral_init: Initialize the linear and convolution weights spectrally, and set gains to
            one and biases to zero. False keeps pretrained weights, gains and biases.
        attn: "cosine" for the paper's scaled cosine attention, "lipschitznorm" for dot products
            normalized by LipschitzNorm, which has neither tau nor nu.
        logit_scale: tau, which multiplies the cosines, in (0, 100].
        learn_logit_scale: Learn tau per head and block.

    Returns:
        The same model. Its methods stay timm's: a later `init_weights()` or
        `reset_classifier()` draws weights as timm does; `spectral_init_modules_` of
        `lipsformer.layers` draws them spectrally.

    Raises:
        TypeError: If the model or one of its layers has no Lipschitz form here; the model is left
            as it was.
        ValueError: If an argument is out of range, or has no effect with `attn`.

    Reference:
        Qi et al. 2023 (LipsFormer) for the four components; the converted backbone is ours.
    """
    options = {
        "logit_scale": logit_scale,
        "learn_logit_scale": learn_logit_scale,
        "value_scale": value_scale,
    }
    check_attn(attn, **options)
    if residual_scale is not None and not math.isfinite(residual_scale):
        raise ValueError(f"residual_scale={residual_scale} must be finite")
    make_core(attn, 1, 0.0, **options)  # raises if a number is out of range
    keep = not spectral_init
    keeps_scales = keep and residual_scale is None
    _check_convertible(model, keeps_scales)
    if spectral_init:
        require_own_weights(model)
    blocks = _blocks(model)
    scale = 1.0 / len(blocks) if residual_scale is None else residual_scale
    for block in blocks:
        in_vit = isinstance(block, Block)
        kind = CosineAttention if in_vit else CosineWindowAttention
        block.attn = _in_place_of(block.attn, kind(block.attn, attn, **options))
        for number, norm in ((1, block.norm1), (2, block.norm2)):
            weight = _layer_scale(norm, scale)
            place = f"ls{number}" if in_vit else f"drop_path{number}"
            held = getattr(block, place)
            if not in_vit:  # Swin has no place for the weight alone
                setattr(block, place, _in_place_of(held, nn.Sequential(weight, held)))
            elif not _is_kept(held, keeps_scales):
                setattr(block, place, weight)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(parent, name, _in_place_of(child, _center_norm(child, keep)))
    if spectral_init:
        spectral_init_modules_(model)
    _record(model, residual_scale=residual_scale, spectral_init=spectral_init, attn=attn, **options)
    return model


def _record(model: nn.Module, **arguments: Any) -> None:
    """Note for timm's formats how the model is built again, if timm built it."""
    known = getattr(model, "pretrained_cfg", None) or {}
    if "architecture" not in known:
        return
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(convert).parameters.items()
    }
    given = {name: value for name, value in arguments.items() if value != defaults[name]}
    update_model_args(model, original=known["architecture"], convert_args=given)
    rename_architecture(model)


def rename_architecture(model: Any) -> None:
    """Give a converted model the name under which its form is registered with timm."""
    model.pretrained_cfg = {**model.pretrained_cfg, "architecture": CONVERTED}
    model.default_cfg = model.pretrained_cfg  # timm's older name


def _blocks(model: nn.Module) -> list[Any]:
    if isinstance(model, VisionTransformer):
        return list(model.blocks)
    if isinstance(model, SwinTransformer):
        return [block for stage in cast(Any, model.layers) for block in stage.blocks]
    raise TypeError(
        f"{type(model).__name__} has no Lipschitz form here: convert a timm VisionTransformer "
        "(ViT, DeiT) or SwinTransformer"
    )


def _is_kept(scale: nn.Module, keeps_scales: bool) -> bool:
    """Return whether a ViT block keeps what follows a branch in the place of a layer scale."""
    return keeps_scales and isinstance(scale, LayerScale)


def _check_convertible(model: nn.Module, keeps_scales: bool) -> None:
    """Raise a `TypeError` if the model or one of its parts has no Lipschitz form here.

    Args:
        model: The model, which is left as it is.
        keeps_scales: Whether the model's own layer scales stay.
    """
    blocks = _blocks(model)
    for block in blocks:
        _check_block(block)
    require_single_use(model, "is not converted")
    if getattr(model, "attn_pool", None) is not None:
        raise TypeError("attention pooling is not converted: use global_pool='avg' or 'token'")
    norms = {norm for block in blocks for norm in (block.norm1, block.norm2)}
    replaced = {part for block in blocks for part in _replaced_parts(block, keeps_scales)}
    for name, module in model.named_modules():
        kind = type(module)
        is_norm = isinstance(module, nn.LayerNorm) or "norm" in kind.__name__.lower()
        if (is_norm or module in norms) and kind not in NORMS:
            raise TypeError(
                f"{name} is a {kind.__name__}: only LayerNorm over the channels of tokens, in the "
                "last dimension, is converted"
            )
        if isinstance(module, nn.LayerNorm) and module.weight is None:
            raise TypeError(f"{name} is a LayerNorm without gains, which is not converted")
        if module in replaced or kind in (*NORMS, Attention, WindowAttention):
            if has_hooks(module):
                raise TypeError(
                    f"{name} has hooks, which would be lost: register them after convert"
                )
            if has_own_forward(module):
                raise TypeError(
                    f"{name} has a forward function of its own, which would be lost: set it after "
                    "convert"
                )


def _check_block(block: Any) -> None:
    if type(block) not in (Block, SwinTransformerBlock):
        raise TypeError(f"{type(block).__name__} is not converted: only plain pre-norm blocks")
    attn = block.attn
    if type(attn) in (CosineAttention, CosineWindowAttention):
        raise TypeError("the model has been converted before")
    if type(attn) not in (Attention, WindowAttention):
        raise TypeError(f"{type(attn).__name__} is not converted: only plain attention")
    if isinstance(attn, Attention) and (
        attn.gate is not None
        or not isinstance(attn.q_norm, nn.Identity)
        or not isinstance(attn.norm, nn.Identity)
    ):
        raise TypeError("attention with a gate or norms of its own is not converted")
    if type(block.mlp) is not Mlp:
        raise TypeError(
            f"{type(block.mlp).__name__} is not converted: gated MLPs multiply two linear maps "
            "and have no Lipschitz constant; use timm's Mlp"
        )


def _replaced_parts(block: Any, keeps_scales: bool) -> list[nn.Module]:
    """Return the parts of a block's attention, and its layer scales, that are not taken over."""
    kept = ("qkv", "proj", "proj_drop")
    parts = [part for name, part in block.attn.named_children() if name not in kept]
    scales = (block.ls1, block.ls2) if isinstance(block, Block) else ()
    return parts + [scale for scale in scales if not _is_kept(scale, keeps_scales)]


def _layer_scale(norm: nn.LayerNorm, value: float) -> nn.Module:
    weight = norm.weight
    scale = LayerScale(norm.normalized_shape[0], value, device=weight.device, dtype=weight.dtype)
    return _in_place_of(norm, scale.requires_grad_(weight.requires_grad))


def _center_norm(norm: nn.LayerNorm, keep: bool) -> CenterNorm:
    weight = norm.weight
    made = CenterNorm(norm.normalized_shape[0], device=weight.device, dtype=weight.dtype)
    if keep:
        made.load_state_dict(norm.state_dict(), strict=False)  # some have no bias
    made.weight.requires_grad_(weight.requires_grad)
    bias = weight if norm.bias is None else norm.bias
    made.bias.requires_grad_(bias.requires_grad)
    return made


def _in_place_of(old: Any, new: nn.Module) -> nn.Module:
    """Give the new module the mode of the old one, and new parameters of attention its freezing."""
    new.training = old.training
    attention = getattr(new, "attention", None)
    if attention is not None:
        attention.training = old.training
        attention.requires_grad_(old.qkv.weight.requires_grad)
    return new


register_fold(PatchMerging)(fold_patch_merging)


@register_fold(Block)
def _fold_vit_block(block: Any) -> None:
    if isinstance(block.norm1, CenterNorm):
        _require_branches(block, CosineAttention)
        fold_norm_before(block.norm1, block.attn.qkv)
        fold_norm_before(block.norm2, block.mlp.fc1)
        _fold_scale(block.ls1, block.attn.proj)
        _fold_scale(block.ls2, block.mlp.fc2)
        block.norm1, block.norm2, block.ls1, block.ls2 = (nn.Identity() for _ in range(4))


@register_fold(SwinTransformerBlock)
def _fold_swin_block(block: Any) -> None:
    if isinstance(block.norm1, CenterNorm):
        _require_branches(block, CosineWindowAttention)
        if _keeps_zero_padding(block):
            fold_norm_before(block.norm1, block.attn.qkv)
            block.norm1 = nn.Identity()
        fold_norm_before(block.norm2, block.mlp.fc1)
        for path, last in ((block.drop_path1, block.attn.proj), (block.drop_path2, block.mlp.fc2)):
            require_kind(path, nn.Sequential)
            scale, *drops = path
            for drop in drops:
                require_kind(drop, DropPath, nn.Identity)
            _fold_scale(scale, last)
        block.norm2, block.drop_path1, block.drop_path2 = (nn.Identity() for _ in range(3))


def _require_branches(block: Any, kind: type[nn.Module]) -> None:
    """Raise unless a block has the branches that `convert` leaves in it, with what they end in."""
    require_kind(block.attn, kind)
    require_ending(block.attn, block.attn.proj_drop)
    require_kind(block.mlp, Mlp)
    require_ending(block.mlp, block.mlp.drop2)


def _fold_scale(scale: Any, last: nn.Linear) -> None:
    require_kind(scale, LayerScale)
    scale_output(last, scale.gamma)


@register_fold(Mlp)
def _fold_mlp(mlp: Any) -> None:
    if type(mlp.act) is nn.GELU and mlp.act.approximate == "none":
        require_plain(mlp.act)
        mlp.fc1, mlp.act = FrozenLinear(mlp.fc1, act_after=True), nn.Identity()


def _keeps_zero_padding(block: Any) -> bool:
    """Return whether folding norm1 leaves the output of timm's Swin block as it is.

    timm pads with zeros after the norm. A padded token gets the projection's bias, which the fold
    would move by W beta.
    """
    sizes = zip(block.input_resolution, block.window_size, strict=True)
    fits = not block.dynamic_mask and all(size % window == 0 for size, window in sizes)
    return fits or not block.norm1.bias.any()
