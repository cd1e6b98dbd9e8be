"""LipsFormer on a CSwin body: the paper's LipsFormer-Tiny (24 M parameters, 4.7 GMACs at 224 px).

Paper: Qi, Wang, Chen, Shi, Zhang, "LipsFormer: Introducing Lipschitz Continuity to Vision
Transformers", ICLR 2023, arXiv:2304.09856; body: Dong et al., "CSWin Transformer", CVPR 2022.

By default the models follow the paper's text; ``official_compat=True`` gives the numerics of the
authors' first published code, which its checkpoints need. The README tabulates the differences.
"""

import math
from typing import Any, Literal

import torch
from timm.layers import register_notrace_module
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from lipsformer.layers import (
    CenterNorm,
    DepthwiseConv2d,
    Linear,
    cosine_windows,
    fit_window,
    merge_heads,
    partition_heads,
)
from lipsformer.models.lipsformer import (
    Device,
    LipsFormer,
    make_attention,
    model_cfg,
    pad_to_even,
)
from lipsformer.models.official_weights import check_same_form, official_cswin_to_lipsformer

__all__ = ["LipsFormerCSwin"]


class StripeAttention(nn.Module):
    """Scaled cosine attention in vertical and horizontal stripes, with LePE.

    Half of the heads attend within vertical stripes, half within horizontal ones; without a split
    size all heads attend over the whole map. LePE adds a depthwise 3x3 convolution of the values,
    zero padded at the stripe's edge. Stripes have equal widths of at most the split size; padded
    tokens are zeros after the projection.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        split_size: int | None,
        attention: nn.ModuleList,
        official_compat: bool = False,
        proj_drop: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the projections and the LePE convolutions.

        Args:
            dim: Number of channels C.
            num_heads: Number of heads, a divisor of C.
            split_size: Largest width of a stripe in tokens; None attends over the whole map.
            attention: One attention per direction (two, or one without a split size).
            official_compat: Divide each direction's output by the root of its number of heads.
            proj_drop: Dropout probability after the output projection.
            device: Device of the parameters.
            dtype: Type of the parameters.
        """
        super().__init__()
        self.dim = dim
        self.split_size = split_size
        self.num_branches = 1 if split_size is None else 2
        self.num_heads = num_heads // self.num_branches
        self.output_scale = 1.0 / math.sqrt(self.num_heads) if official_compat else 1.0
        self.qkv = Linear(dim, 3 * dim, device=device, dtype=dtype)
        self.attention = attention
        self.lepe = nn.ModuleList(
            DepthwiseConv2d(dim // self.num_branches, 3, device=device, dtype=dtype)
            for _ in range(self.num_branches)
        )
        self.proj = Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def stripe(self, branch: int, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) of the stripes of a direction on a map of the given size."""
        if self.split_size is None:
            return height, width
        if branch == 0:
            return height, fit_window(width, self.split_size)
        return fit_window(height, self.split_size), width

    def attend(self, qkv: Tensor) -> Tensor:
        """Attend with the projected tokens ``qkv`` ([B, H, W, 3 * C]); returns [B, H, W, C]."""
        height, width = qkv.shape[1], qkv.shape[2]
        qkv = qkv.unflatten(-1, (3, self.num_branches, self.dim // self.num_branches))
        if not torch.jit.is_scripting():
            stripes = [self.stripe(branch, height, width) for branch in range(self.num_branches)]
            y = cosine_windows(qkv, stripes, list(self.attention), None, list(self.lepe))
            if y is not None:
                return y
        parts = qkv.unbind(4)
        outputs = []
        pairs = zip(self.attention, self.lepe)  # noqa: B905  (TorchScript knows no strict=)
        for branch, (attention, lepe) in enumerate(pairs):
            h, w = self.stripe(branch, height, width)
            q, k, v = partition_heads(parts[branch], (h, w), self.num_heads).unbind(0)
            # contiguous: as a view, the convolution would keep queries and keys for its backward
            position = lepe(v.transpose(1, 2).reshape(v.shape[0], h, w, -1).contiguous())
            position = position.reshape(v.shape[0], h * w, self.num_heads, -1).transpose(1, 2)
            outputs.append(merge_heads(attention(q, k, v) + position, (h, w), (height, width)))
        return torch.cat(outputs, dim=-1) if self.num_branches > 1 else outputs[0]

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Attend within the stripes of ``x`` ([B, H, W, C]), multiplied by ``scale`` ([C])."""
        x = self.attend(self.qkv(x))
        if self.output_scale != 1.0:
            x = x * self.output_scale
        return self.proj_drop(self.proj(x, scale=scale))


register_notrace_module(StripeAttention)  # the stripes depend on the size of the map


class ConvMerging(nn.Module):
    """Join 2x2 neighbours: convolution 2x2 with stride 2, then CenterNorm."""

    def __init__(
        self, dim: int, out_dim: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        """Create the convolution and the norm.

        Args:
            dim: Number of channels C.
            out_dim: Number of channels of the output.
            device: Device of the parameters.
            dtype: Type of the parameters.
        """
        super().__init__()
        self.conv = nn.Conv2d(dim, out_dim, 2, 2, device=device, dtype=dtype)
        self.norm = CenterNorm(out_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Turn ``x`` ([B, H, W, C]) into [B, ceil(H / 2), ceil(W / 2), out_dim]."""
        x = self.conv(pad_to_even(x).permute(0, 3, 1, 2))
        return self.norm(x.permute(0, 2, 3, 1))


class LipsFormerCSwin(LipsFormer):
    """LipsFormer with cross-shaped stripe attention and convolutional merging.

    The first published code creates a norm after the attention and never uses it; it does not
    exist here. There is no norm after the last stage either.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 64,
        depths: tuple[int, ...] = (1, 2, 21, 1),
        num_heads: tuple[int, ...] = (2, 4, 8, 16),
        split_sizes: tuple[int | None, ...] = (1, 2, 7, None),
        mlp_ratio: float = 4.0,
        attn: Literal["cosine", "lipschitznorm"] = "cosine",
        logit_scale: float = 12.0,
        learn_logit_scale: bool = False,
        value_scale: float = 1.0,
        residual_scale: float | None = None,
        official_compat: bool = False,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        weight_init: str = "",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build the model.

        Args:
            img_size: Nominal image size in pixels; every multiple of the patch size is accepted.
            patch_size: Side of a patch in pixels.
            in_chans: Number of image channels.
            num_classes: Number of classes; 0 leaves out the classifier.
            global_pool: timm's pooling name; "" keeps the map.
            embed_dim: Channels of the first stage, doubled at each further one.
            depths: Number of blocks of each stage.
            num_heads: Number of heads of each stage, even where there are stripes.
            split_sizes: Largest stripe width of each stage in tokens; None for the whole map.
            mlp_ratio: Hidden width of the MLP divided by the channels.
            attn: "cosine" for the paper's scaled cosine attention, "lipschitznorm" for dot products
                normalised by LipschitzNorm, which has neither tau nor nu.
            logit_scale: Temperature tau of the attention, in (0, 100].
            learn_logit_scale: Learn tau per head and block.
            value_scale: nu > 0, the length to which values are normalised.
            residual_scale: Initial weight of the residual branches; None for 1 / (number of
                blocks), or 0.2 with ``official_compat``.
            official_compat: Numerics of the first published code: values not normalised, the
                attention's output divided by the root of the heads, residual weights of 0.2 at the
                start, convolution biases at PyTorch's default.
            drop_rate: Dropout before the classifier.
            proj_drop_rate: Dropout after the attention's projection and the MLP.
            attn_drop_rate: Dropout of the attention weights.
            drop_path_rate: Drop path rate of the last block, rising linearly from 0.
            weight_init: "" for spectral initialisation, "skip" for none.
            device: Device of the parameters.
            dtype: Type of the parameters.

        Raises:
            ValueError: If an argument is out of range or would have no effect.
        """
        dd: dict[str, Any] = {"device": device, "dtype": dtype}

        def attn_layer(stage: int, dim: int) -> StripeAttention:
            split_size = split_sizes[stage]
            num_branches = 1 if split_size is None else 2
            attention = nn.ModuleList(
                make_attention(
                    attn,
                    num_heads[stage] // num_branches,
                    logit_scale=logit_scale,
                    learn_logit_scale=learn_logit_scale,
                    value_scale=value_scale,
                    official_compat=official_compat,
                    attn_drop=attn_drop_rate,
                    **dd,
                )
                for _ in range(num_branches)
            )
            return StripeAttention(
                dim,
                num_heads[stage],
                split_size,
                attention,
                official_compat=official_compat,
                proj_drop=proj_drop_rate,
                **dd,
            )

        if residual_scale is None:
            residual_scale = 0.2 if official_compat else 1.0 / sum(depths)
        super().__init__(
            attn_layer=attn_layer,
            downsample_layer=ConvMerging,
            attn_norm=False,
            final_norm=False,
            residual_scale=residual_scale,
            zero_conv_bias=not official_compat,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            embed_dim=embed_dim,
            depths=depths,
            mlp_ratio=mlp_ratio,
            drop_rate=drop_rate,
            proj_drop_rate=proj_drop_rate,
            drop_path_rate=drop_path_rate,
            weight_init=weight_init,
            **dd,
        )


def checkpoint_filter_fn(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Bring a checkpoint to this file's names.

    Accepts this project's checkpoints, the released code's and either inside a ``model`` or
    ``state_dict`` entry.

    Args:
        state_dict: Names to tensors, or a mapping that holds them.
        model: The model to be loaded.

    Raises:
        ValueError: If the weights were made by the released form of the attention and ``model``
            is in the paper's form, or the other way round.
    """
    state_dict = state_dict.get("model", state_dict)
    state_dict = state_dict.get("state_dict", state_dict)
    state_dict = official_cswin_to_lipsformer(state_dict)
    check_same_form(state_dict, model)
    return state_dict


def _create(variant: str, pretrained: bool, **kwargs: Any) -> LipsFormerCSwin:
    return build_model_with_cfg(
        LipsFormerCSwin,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": (0, 1, 2, 3), "flatten_sequential": True},
        **kwargs,
    )


default_cfgs = generate_default_cfgs(
    {
        "lipsformer_nano.untrained": model_cfg(input_size=(3, 32, 32), pool_size=(2, 2)),
        "lipsformer_tiny.untrained": model_cfg(),
        "lipsformer_small.untrained": model_cfg(),
        "lipsformer_base.untrained": model_cfg(),
    }
)


@register_model
def lipsformer_nano(pretrained: bool = False, **kwargs: Any) -> LipsFormerCSwin:
    """LipsFormer for images of 32 to 64 px and quick runs; not from the paper."""
    args = {
        "img_size": 32,
        "patch_size": 2,
        "embed_dim": 32,
        "depths": (1, 2, 4, 1),
        "num_heads": (2, 4, 8, 16),
        "split_sizes": (1, 2, 4, None),
    }
    return _create("lipsformer_nano", pretrained, **{**args, **kwargs})


@register_model
def lipsformer_tiny(pretrained: bool = False, **kwargs: Any) -> LipsFormerCSwin:
    """LipsFormer-Tiny of the paper, 23.8 M parameters, 4.7 GMACs at 224 px."""
    args = {"embed_dim": 64, "depths": (1, 2, 21, 1), "num_heads": (2, 4, 8, 16)}
    return _create("lipsformer_tiny", pretrained, **{**args, **kwargs})


@register_model
def lipsformer_small(pretrained: bool = False, **kwargs: Any) -> LipsFormerCSwin:
    """LipsFormer-Small, the block of Tiny on CSwin-Small: 37.5 M parameters, 7.4 GMACs."""
    args = {"embed_dim": 64, "depths": (2, 4, 32, 2), "num_heads": (2, 4, 8, 16)}
    return _create("lipsformer_small", pretrained, **{**args, **kwargs})


@register_model
def lipsformer_base(pretrained: bool = False, **kwargs: Any) -> LipsFormerCSwin:
    """LipsFormer-Base, the block of Tiny on CSwin-Base: 83.0 M parameters, 16.2 GMACs."""
    args = {"embed_dim": 96, "depths": (2, 4, 32, 2), "num_heads": (4, 8, 16, 32)}
    return _create("lipsformer_base", pretrained, **{**args, **kwargs})
