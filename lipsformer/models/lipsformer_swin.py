"""LipsFormer on the Swin backbone.

Paper: Qi, Wang, Chen, Shi, Zhang, "LipsFormer: Introducing Lipschitz Continuity to Vision
Transformers", ICLR 2023, arXiv:2304.09856. The windows are never shifted: the depthwise
convolutions carry information across them.

By default the models follow the paper's text; `official_compat=True` gives the numerics of the
authors' released code, which its checkpoints need. docs/deviations.md lists the differences.
"""

from typing import Any, cast

import torch
from timm.layers import (
    register_notrace_module,
    resize_rel_pos_bias_table,
    to_2tuple,
    trunc_normal_,
)
from timm.models import generate_default_cfgs
from timm.models._input import update_model_args
from torch import Tensor, nn

from lipsformer.layers import (
    Arrangement,
    CenterNorm,
    Linear,
    apply_linear,
    attend_in_windows,
    pad_to_even,
    relative_position_index,
)
from lipsformer.models._fused import computed_at
from lipsformer.models._timm import create, model_cfg
from lipsformer.models.folding import fold_norm_before, register_fold
from lipsformer.models.lipsformer import Device, LipsFormer, fit_window
from lipsformer.models.official_weights import (
    check_same_form,
    official_swin_to_lipsformer,
    rename_earlier_version,
    unwrap,
)
from lipsformer.models.pretrained import register_with_weights

__all__ = ["LipsFormerSwin"]


@computed_at("attn.branch")
class WindowAttention(nn.Module):
    """Attention inside windows, with a relative position bias.

    `attention` selects its kind: scaled cosine attention or LipschitzNorm. The map is cut into
    equal windows of at most `window_size` with the least padding. The bias depends only on the
    offset of two tokens, so one table serves every map. The projected tokens are padded with zeros
    and not masked: the score of a padded key is the bias alone, and its value is zero.

    Shape:
        x: [B, H, W, C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.layers import ScaledCosineAttention
        >>> from lipsformer.models.lipsformer_swin import WindowAttention
        >>> attn = WindowAttention(8, 2, window_size=3, attention=ScaledCosineAttention(2))
        >>> attn(torch.zeros(1, 5, 7, 8)).shape
        torch.Size([1, 5, 7, 8])
    """

    ends_in = "linear"  # read by WeightedResidual, which passes its alpha as output_scale
    treats_samples_alone = True  # so that dropped samples need not enter

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: int | tuple[int, int],
        attention: nn.Module,
        proj_drop: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the projections and the table of biases.

        Args:
            dim: Number of channels C.
            num_heads: Number of heads, a divisor of C.
            window_size: Largest side, or (height, width), of a window in tokens, each at least 1.
            attention: Called with q, k, v of shape [windows, heads, N, d] and a bias, such as
                `ScaledCosineAttention`.
            proj_drop: Dropout probability after the output projection.
            device: Device of the parameters.
            dtype: Data type of the parameters.

        Raises:
            ValueError: If the number of heads does not divide C, or a side of a window is below 1.
        """
        super().__init__()
        if num_heads < 1 or dim % num_heads != 0:
            raise ValueError(f"num_heads={num_heads} must be a positive divisor of dim={dim}")
        self.dim = dim
        self.num_heads = num_heads
        self.window_size = window_of(window_size)
        self.qkv = Linear(dim, 3 * dim, device=device, dtype=dtype)
        self.attention = attention
        self.proj = Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)
        h, w = self.window_size
        table = torch.empty((2 * h - 1) * (2 * w - 1), num_heads, device=device, dtype=dtype)
        self.relative_position_bias_table = nn.Parameter(table)
        self.register_buffer("relative_position_index", None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table of biases and fill the index."""
        trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Fill the index of the table; timm calls this after `to_empty`."""
        device = self.relative_position_bias_table.device
        self.relative_position_index = relative_position_index(self.window_size, device)

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any
    ) -> None:
        """Fill the index too, which no checkpoint holds: a model from the meta device lacks it."""
        super()._load_from_state_dict(*args)
        self.init_non_persistent_buffers()

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Change the largest window and interpolate the table of biases.

        Args:
            window_size: (height, width) in tokens.
        """
        h, w = window_size
        table = self.relative_position_bias_table
        with torch.no_grad():
            resized = resize_rel_pos_bias_table(
                table, window_size, ((2 * h - 1) * (2 * w - 1), self.num_heads), self.window_size
            )
        self.relative_position_bias_table = nn.Parameter(resized, table.requires_grad)
        self.window_size = window_size
        self.relative_position_index = relative_position_index(window_size, table.device)

    def window(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) of the windows on a map of the given size."""
        return fit_window(height, self.window_size[0]), fit_window(width, self.window_size[1])

    def position_bias(self, h: int, w: int) -> Tensor:
        """Return the bias [1, heads, h * w, h * w] of a window of h x w tokens."""
        index = self.relative_position_index[:h, :w, :h, :w].reshape(h * w, h * w)
        table = self.relative_position_bias_table
        return nn.functional.embedding(index, table).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x: Tensor, output_scale: Tensor | None = None) -> Tensor:
        """Attend within the windows of `x` ([B, H, W, C]).

        Args:
            x: [B, H, W, C].
            output_scale: [C], multiplies the output.
        """
        x = self.attend(self.qkv(x))
        return self.proj_drop(apply_linear(self.proj, x, output_scale=output_scale))

    def attend(self, qkv: Tensor) -> Tensor:
        """Attend with the projected tokens `qkv` ([B, H, W, 3 * C]); returns [B, H, W, C]."""
        arrangement = self.arrangement(qkv.shape[1], qkv.shape[2])
        return attend_in_windows(qkv.unflatten(-1, (3, 1, self.dim)), *arrangement)

    def arrangement(self, height: int, width: int) -> Arrangement:
        """Return the windows, attention and bias of the one group of heads on a map."""
        h, w = self.window(height, width)
        return Arrangement([(h, w)], [self.attention], self.position_bias(h, w))


# FX cannot trace windows that depend on the size of the map
register_notrace_module(WindowAttention)


def window_of(window_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) of a window, or raise a `ValueError` if a side is below 1."""
    window = cast(tuple[int, int], to_2tuple(window_size))
    if min(window) < 1:
        raise ValueError(f"window_size={window_size} must be at least 1 in each direction")
    return window


class PatchMerging(nn.Module):
    """Join 2x2 neighbors: concatenation, CenterNorm, linear layer without bias.

    Example:
        >>> import torch
        >>> from lipsformer.models.lipsformer_swin import PatchMerging
        >>> PatchMerging(8, 16)(torch.zeros(1, 6, 4, 8)).shape
        torch.Size([1, 3, 2, 16])
    """

    def __init__(
        self,
        dim: int,
        out_dim: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        norm: bool = True,
    ) -> None:
        """Create the norm and the reduction.

        Args:
            dim: Number of channels C.
            out_dim: Number of channels of the output.
            device: Device of the parameters.
            dtype: Data type of the parameters.
            norm: False leaves out CenterNorm.
        """
        super().__init__()
        self.norm = CenterNorm(4 * dim, device=device, dtype=dtype) if norm else nn.Identity()
        self.reduction = Linear(4 * dim, out_dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Turn `x` ([B, H, W, C]) into [B, ceil(H / 2), ceil(W / 2), out_dim]."""
        x = pad_to_even(x)
        batch, height, width, channels = x.shape
        # the released order of the four neighbors (row, column): (0, 0), (1, 0), (0, 1), (1, 1)
        x = x.reshape(batch, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 4, 2, 5)
        return self.reduction(self.norm(x.flatten(3)))


class LipsFormerSwin(LipsFormer):
    """LipsFormer with window attention, 2x2 merging and CenterNorm after every token mixer.

    Example:
        >>> import torch
        >>> from lipsformer.models import LipsFormerSwin
        >>> model = LipsFormerSwin(embed_dim=8, depths=(1, 1), num_heads=(1, 2), num_classes=5)
        >>> model(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 5])
    """

    downsample_layer = PatchMerging

    def __init__(
        self,
        *,
        embed_dim: int = 96,
        depths: tuple[int, ...] = (2, 2, 6, 2),
        num_heads: tuple[int, ...] = (3, 6, 12, 24),
        window_size: int | tuple[int, int] = 7,
        **kwargs: Any,
    ) -> None:
        """Build the model.

        Args:
            embed_dim: Channels of the first stage, doubled at each further one.
            depths: Number of blocks of each stage.
            num_heads: Number of heads of each stage.
            window_size: Largest side, or (height, width), of a window in tokens, each at least 1.
            **kwargs: Arguments of `LipsFormer`.

        Raises:
            ValueError: If there is not one number of heads for each stage, a number of heads does
                not divide the channels of its stage, or a side of a window is below 1.
        """
        if len(num_heads) != len(depths):
            raise ValueError(f"{num_heads=} and {depths=} must be of one length")
        # set before super().__init__, which calls make_attn
        self.num_heads, self.window_size = num_heads, window_size
        super().__init__(embed_dim=embed_dim, depths=depths, **kwargs)

    def make_attn(self, stage: int, block: int, dim: int) -> WindowAttention:
        """Build the window attention of one block of a stage, on maps of `dim` channels."""
        num_heads = self.num_heads[stage]
        attention = self.make_core(num_heads)
        return WindowAttention(dim, num_heads, self.window_size, attention, **self.proj_options)

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        window_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Change the nominal image size and the largest window.

        Args:
            img_size: Side, or (height, width), in pixels; None keeps it.
            window_size: Side, or (height, width), in tokens; None keeps it. The tables of biases
                are interpolated.

        Raises:
            ValueError: If a side of the image is not a positive multiple of the patch size, or one
                of the window is below 1.
        """
        window = None if window_size is None else window_of(window_size)
        super().set_input_size(img_size)
        if window is not None:
            for module in self.modules():
                if isinstance(module, WindowAttention):
                    module.set_window_size(window)
            update_model_args(self, window_size=window)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Bring a checkpoint to this file's names and window size.

    Accepts the checkpoints of this project and its earlier versions, those of the released code,
    and any of them inside a `model` or `state_dict` entry.

    Args:
        state_dict: Names to tensors, or a mapping that holds them.
        model: The model to be loaded.

    Raises:
        ValueError: If there are no weights, or if they were made with the other form of the
            attention, the paper's or the released code's.
    """
    state_dict = official_swin_to_lipsformer(unwrap(state_dict))
    rename_earlier_version(state_dict)
    check_same_form(state_dict, model)
    return fit_position_tables(state_dict, model)


def fit_position_tables(state_dict: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Interpolate the tables of biases to the windows of the model.

    Args:
        state_dict: Names to tensors.
        model: The model to be loaded, with `WindowAttention`.
    """
    fitted = dict(state_dict)
    for name in fitted:
        if name.endswith("relative_position_bias_table"):
            attn = model.get_submodule(name.rpartition(".")[0])
            assert isinstance(attn, WindowAttention)
            shape = attn.relative_position_bias_table.shape
            fitted[name] = resize_rel_pos_bias_table(fitted[name], attn.window_size, shape)
    return fitted


def _create(
    variant: str, pretrained: bool, args: dict[str, Any], kwargs: dict[str, Any]
) -> LipsFormerSwin:
    return create(LipsFormerSwin, variant, pretrained, checkpoint_filter_fn, args, kwargs)


@register_fold(PatchMerging)
def fold_patch_merging(merging: Any) -> None:
    """Fold the CenterNorm of a patch merging, ours or timm's, into its linear layer."""
    if isinstance(merging.norm, CenterNorm):
        fold_norm_before(merging.norm, merging.reduction)
        merging.norm = nn.Identity()


default_cfgs = generate_default_cfgs(
    {
        "lipsformer_swin_nano.untrained": model_cfg(input_size=(3, 32, 32), pool_size=(2, 2)),
        "lipsformer_swin_tiny.untrained": model_cfg(),
        "lipsformer_swin_small.untrained": model_cfg(),
        "lipsformer_swin_base.untrained": model_cfg(),
    }
)


@register_with_weights
def lipsformer_swin_nano(pretrained: bool = False, **kwargs: Any) -> LipsFormerSwin:
    """LipsFormer-Swin for images of 32 to 64 px and quick runs; not from the paper."""
    args = {
        "img_size": 32,
        "patch_size": 2,
        "embed_dim": 32,
        "depths": (1, 2, 4, 1),
        "num_heads": (2, 4, 8, 16),
        "window_size": 4,
    }
    return _create("lipsformer_swin_nano", pretrained, args, kwargs)


@register_with_weights
def lipsformer_swin_tiny(pretrained: bool = False, **kwargs: Any) -> LipsFormerSwin:
    """LipsFormer-Swin-Tiny, 30.9 M parameters, 5.0 GMACs at 224 px."""
    args = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)}
    return _create("lipsformer_swin_tiny", pretrained, args, kwargs)


@register_with_weights
def lipsformer_swin_small(pretrained: bool = False, **kwargs: Any) -> LipsFormerSwin:
    """LipsFormer-Swin-Small, 54.5 M parameters, 9.7 GMACs at 224 px."""
    args = {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)}
    return _create("lipsformer_swin_small", pretrained, args, kwargs)


@register_with_weights
def lipsformer_swin_base(pretrained: bool = False, **kwargs: Any) -> LipsFormerSwin:
    """LipsFormer-Swin-Base, 96.0 M parameters, 17.0 GMACs at 224 px."""
    args = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)}
    return _create("lipsformer_swin_base", pretrained, args, kwargs)
