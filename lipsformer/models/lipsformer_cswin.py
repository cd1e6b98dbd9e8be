"""LipsFormer on the CSwin backbone.

The paper's LipsFormer-Tiny has 24 M parameters and 4.7 GMACs at 224 px.

Paper: Qi, Wang, Chen, Shi, Zhang, "LipsFormer: Introducing Lipschitz Continuity to Vision
Transformers", ICLR 2023, arXiv:2304.09856; backbone: Dong et al., "CSWin Transformer", CVPR 2022.

By default the models follow the paper's text; `official_compat=True` gives the numerics of the
released code, which its checkpoints need. docs/deviations.md lists the differences.
"""

import math
from typing import Any

import torch
from timm.layers import register_notrace_module
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from lipsformer.layers import (
    Arrangement,
    CenterNorm,
    DepthwiseConv2d,
    Linear,
    apply_linear,
    attend_in_windows,
    pad_to_even,
)
from lipsformer.models._fused import computed_at
from lipsformer.models._timm import create, model_cfg
from lipsformer.models.folding import fold_norm_behind, register_fold
from lipsformer.models.lipsformer import Device, LipsFormer, fit_window
from lipsformer.models.official_weights import (
    check_same_form,
    official_cswin_to_lipsformer,
    rename_earlier_version,
    unwrap,
)
from lipsformer.models.pretrained import register_with_weights

__all__ = ["LipsFormerCSwin"]


@computed_at("attn.branch")
class StripeAttention(nn.Module):
    """Attention in vertical and horizontal stripes, with LePE.

    `attention` selects its kind: scaled cosine attention or LipschitzNorm. The heads form two
    partitions: half of them attend within vertical stripes, half within horizontal ones. Without a
    split size there is one partition, and all heads attend over the whole map. LePE adds a
    depthwise 3x3 convolution of the values, zero padded at the edge of the stripe. Stripes have
    equal widths of at most the split size. Padded tokens are zeros after the projection.

    Shape:
        x: [B, H, W, C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.layers import ScaledCosineAttention
        >>> from lipsformer.models.lipsformer_cswin import StripeAttention
        >>> cores = torch.nn.ModuleList(ScaledCosineAttention(2) for _ in range(2))
        >>> attn = StripeAttention(8, num_heads=4, split_size=2, attention=cores)
        >>> attn(torch.zeros(1, 5, 7, 8)).shape
        torch.Size([1, 5, 7, 8])
    """

    ends_in = "linear"  # read by WeightedResidual, which passes its alpha as output_scale
    treats_samples_alone = True  # so that dropped samples need not enter

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
            split_size: Largest width of a stripe in tokens, at least 1; None attends over the whole
                map.
            attention: One attention per partition (two, or one without a split size), such as
                `ScaledCosineAttention`.
            official_compat: Divide each partition's output by the root of its number of heads.
            proj_drop: Dropout probability after the output projection.
            device: Device of the parameters.
            dtype: Data type of the parameters.

        Raises:
            ValueError: If the number of heads does not divide C, or is odd with a split size, or if
                the split size is below 1.
        """
        super().__init__()
        self.dim = dim
        self.split_size = split_size
        self.num_partitions = count_partitions(dim, num_heads, split_size)
        self.heads_per_partition = num_heads // self.num_partitions
        # the released code divides the attention's output by the root of the heads
        self.attn_factor = 1.0 / math.sqrt(self.heads_per_partition) if official_compat else 1.0
        self.qkv = Linear(dim, 3 * dim, device=device, dtype=dtype)
        self.attention = attention
        self.lepe = nn.ModuleList(
            DepthwiseConv2d(dim // self.num_partitions, 3, device=device, dtype=dtype)
            for _ in range(self.num_partitions)
        )
        self.proj = Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def stripe(self, partition: int, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) of the stripes of a partition on a map of the given size."""
        if self.split_size is None:
            return height, width
        if partition == 0:
            return height, fit_window(width, self.split_size)
        return fit_window(height, self.split_size), width

    def forward(self, x: Tensor, output_scale: Tensor | None = None) -> Tensor:
        """Attend within the stripes of `x`.

        Args:
            x: [B, H, W, C].
            output_scale: [C], multiplies the output.
        """
        x = self.attend(self.qkv(x))
        if self.attn_factor != 1.0:
            x = x * self.attn_factor
        return self.proj_drop(apply_linear(self.proj, x, output_scale=output_scale))

    def attend(self, qkv: Tensor) -> Tensor:
        """Attend with the projected tokens `qkv` ([B, H, W, 3 * C]); returns [B, H, W, C]."""
        arrangement = self.arrangement(qkv.shape[1], qkv.shape[2])
        qkv = qkv.unflatten(-1, (3, self.num_partitions, self.dim // self.num_partitions))
        return attend_in_windows(qkv, *arrangement)

    def arrangement(self, height: int, width: int) -> Arrangement:
        """Return the stripes, attentions and LePE of the partitions on a map."""
        partitions = range(self.num_partitions)
        stripes = [self.stripe(partition, height, width) for partition in partitions]
        return Arrangement(stripes, list(self.attention), lepes=list(self.lepe))


# FX cannot trace stripes that depend on the size of the map
register_notrace_module(StripeAttention)


def count_partitions(dim: int, num_heads: int, split_size: int | None) -> int:
    """Return the number of partitions of the heads: 2, or 1 for attention over the whole map.

    Args:
        dim: Number of channels.
        num_heads: Number of heads, which the partitions share evenly.
        split_size: Largest width of a stripe in tokens; None for the whole map.

    Raises:
        ValueError: If the numbers do not fit together.
    """
    if split_size is not None and split_size < 1:
        raise ValueError(f"split_size={split_size} must be at least 1, or None for the whole map")
    num_partitions = 1 if split_size is None else 2
    if num_heads < 1 or num_heads % num_partitions != 0 or dim % num_heads != 0:
        raise ValueError(
            f"num_heads={num_heads} must be a positive multiple of {num_partitions} that "
            f"divides dim={dim}"
        )
    return num_partitions


class ConvMerging(nn.Module):
    """Join 2x2 neighbors: convolution 2x2 with stride 2, then CenterNorm.

    Example:
        >>> import torch
        >>> from lipsformer.models.lipsformer_cswin import ConvMerging
        >>> ConvMerging(8, 16)(torch.zeros(1, 6, 4, 8)).shape
        torch.Size([1, 3, 2, 16])
    """

    def __init__(
        self, dim: int, out_dim: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        """Create the convolution and the norm.

        Args:
            dim: Number of channels C.
            out_dim: Number of channels of the output.
            device: Device of the parameters.
            dtype: Data type of the parameters.
        """
        super().__init__()
        self.conv = nn.Conv2d(dim, out_dim, 2, 2, device=device, dtype=dtype)
        self.norm = CenterNorm(out_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Turn `x` ([B, H, W, C]) into [B, ceil(H / 2), ceil(W / 2), out_dim]."""
        x = self.conv(pad_to_even(x).permute(0, 3, 1, 2))
        return self.norm(x.permute(0, 2, 3, 1))


class LipsFormerCSwin(LipsFormer):
    """LipsFormer with cross-shaped stripe attention and convolutional merging.

    The released code creates a norm after the attention and never uses it, so it does not
    exist here. There is no norm after the last stage either.

    Example:
        >>> import torch
        >>> from lipsformer.models import LipsFormerCSwin
        >>> small = {"embed_dim": 8, "depths": (1, 1), "num_heads": (2, 4)}
        >>> model = LipsFormerCSwin(**small, split_sizes=(2, None), num_classes=5)
        >>> model(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 5])
    """

    attn_norm = False
    final_norm = False
    downsample_layer = ConvMerging
    default_logit_scale = 12.0

    def __init__(
        self,
        *,
        embed_dim: int = 64,
        depths: tuple[int, ...] = (1, 2, 21, 1),
        num_heads: tuple[int, ...] = (2, 4, 8, 16),
        split_sizes: tuple[int | None, ...] = (1, 2, 7, None),
        residual_scale: float | None = None,
        official_compat: bool = False,
        **kwargs: Any,
    ) -> None:
        """Build the model.

        Args:
            embed_dim: Channels of the first stage, doubled at each further one.
            depths: Number of blocks of each stage.
            num_heads: Number of heads of each stage, even where there are stripes.
            split_sizes: Largest stripe width of each stage in tokens, at least 1; None for the
                whole map.
            residual_scale: Initial weight of the residual branches; None for 1 / (number of
                blocks), or 0.2 with `official_compat`.
            official_compat: Numerics of the released code: besides what `LipsFormer`
                says, the attention's output is divided by the root of the heads.
            **kwargs: Arguments of `LipsFormer`.

        Raises:
            ValueError: If there is not one number of heads and one split size for each stage, a
                number of heads does not fit the channels and the split size of its stage, or a
                split size is below 1.
        """
        if not len(num_heads) == len(split_sizes) == len(depths):
            raise ValueError(f"{num_heads=}, {split_sizes=} and {depths=} must be of one length")
        # set before super().__init__, which calls make_attn
        self.num_heads, self.split_sizes = num_heads, split_sizes
        if residual_scale is None and official_compat:
            residual_scale = 0.2
        super().__init__(
            embed_dim=embed_dim,
            depths=depths,
            residual_scale=residual_scale,
            official_compat=official_compat,
            **kwargs,
        )

    def make_attn(self, stage: int, block: int, dim: int) -> StripeAttention:
        """Build the stripe attention of one block of a stage, on maps of `dim` channels."""
        num_heads, split_size = self.num_heads[stage], self.split_sizes[stage]
        num_partitions = count_partitions(dim, num_heads, split_size)
        cores = nn.ModuleList(
            self.make_core(num_heads // num_partitions) for _ in range(num_partitions)
        )
        return StripeAttention(
            dim, num_heads, split_size, cores, self.official_compat, **self.proj_options
        )


def checkpoint_filter_fn(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Bring a checkpoint to this file's names.

    Accepts the checkpoints of this project and its earlier versions, those of the released code,
    and any of them inside a `model` or `state_dict` entry.

    Args:
        state_dict: Names to tensors, or a mapping that holds them.
        model: The model to be loaded.

    Raises:
        ValueError: If there are no weights, or if they were made with the other form of the
            attention, the paper's or the released code's.
    """
    state_dict = official_cswin_to_lipsformer(unwrap(state_dict))
    rename_earlier_version(state_dict)
    check_same_form(state_dict, model)
    return state_dict


def _create(
    variant: str, pretrained: bool, args: dict[str, Any], kwargs: dict[str, Any]
) -> LipsFormerCSwin:
    return create(LipsFormerCSwin, variant, pretrained, checkpoint_filter_fn, args, kwargs)


@register_fold(ConvMerging)
def _fold_conv_merging(merging: Any) -> None:
    fold_norm_behind(merging.conv, merging.norm)
    merging.norm = nn.Identity()


@register_fold(StripeAttention)
def _fold_stripes(attn: Any) -> None:
    weight = attn.proj.weight
    attn.proj.weight = nn.Parameter((weight.double() * attn.attn_factor).to(weight.dtype))
    attn.attn_factor = 1.0


default_cfgs = generate_default_cfgs(
    {
        "lipsformer_nano.untrained": model_cfg(input_size=(3, 32, 32), pool_size=(2, 2)),
        "lipsformer_tiny.untrained": model_cfg(),
        "lipsformer_small.untrained": model_cfg(),
        "lipsformer_base.untrained": model_cfg(),
    }
)


@register_with_weights
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
    return _create("lipsformer_nano", pretrained, args, kwargs)


@register_with_weights
def lipsformer_tiny(pretrained: bool = False, **kwargs: Any) -> LipsFormerCSwin:
    """LipsFormer-Tiny of the paper, 23.8 M parameters, 4.7 GMACs at 224 px."""
    args = {
        "embed_dim": 64,
        "depths": (1, 2, 21, 1),
        "num_heads": (2, 4, 8, 16),
        "split_sizes": (1, 2, 7, None),
    }
    return _create("lipsformer_tiny", pretrained, args, kwargs)


@register_with_weights
def lipsformer_small(pretrained: bool = False, **kwargs: Any) -> LipsFormerCSwin:
    """LipsFormer-Small, the block of Tiny on CSwin-Small: 37.5 M parameters, 7.4 GMACs."""
    args = {
        "embed_dim": 64,
        "depths": (2, 4, 32, 2),
        "num_heads": (2, 4, 8, 16),
        "split_sizes": (1, 2, 7, None),
    }
    return _create("lipsformer_small", pretrained, args, kwargs)


@register_with_weights
def lipsformer_base(pretrained: bool = False, **kwargs: Any) -> LipsFormerCSwin:
    """LipsFormer-Base, the block of Tiny on CSwin-Base: 83.0 M parameters, 16.2 GMACs."""
    args = {
        "embed_dim": 96,
        "depths": (2, 4, 32, 2),
        "num_heads": (4, 8, 16, 32),
        "split_sizes": (1, 2, 7, None),
    }
    return _create("lipsformer_base", pretrained, args, kwargs)
