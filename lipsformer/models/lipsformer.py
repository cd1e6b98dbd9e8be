"""The block, the stages and the base model of LipsFormer, to be read beside the paper.

Paper: Qi et al., "LipsFormer: Introducing Lipschitz Continuity to Vision Transformers", ICLR 2023,
arXiv:2304.09856. `lipsformer_swin.py` and `lipsformer_cswin.py` add the attention and the
downsampling of their backbones. Tokens are channels last throughout.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from timm.layers import ClassifierHead
from timm.models._manipulate import checkpoint_seq
from torch import Tensor, nn

from lipsformer._arguments import check_count, check_depths, check_drop_path
from lipsformer.layers import (
    CenterNorm,
    DepthwiseConv2d,
    Linear,
    WeightedResidual,
    apply_linear,
    spectral_init_modules_,
)
from lipsformer.layers._residual_kernels import declared
from lipsformer.layers.spectral import require_own_weights
from lipsformer.models._core import check_attn, make_core
from lipsformer.models._fused import computed_at, in_one_call
from lipsformer.models._timm import TimmInterface, check_img_size
from lipsformer.models.embed import ConvStem, PatchEmbed
from lipsformer.models.folded_layers import FoldedConv, FoldedResidual, FrozenLinear
from lipsformer.models.folding import register_fold, require_ending, require_plain

Device = torch.device | str | None
DEFAULT_EPS = 1e-2  # the paper leaves eps open; ScaledCosineAttention explains this value
# The released code divides by max(|x|, 1e-12). In float32, |x|^2 + 1e-6 is rounded to |x|^2 if |x|
# is at least 6, so that the two differ only for shorter tokens.
RELEASED_EPS = 1e-6


@computed_at("conv1.branch", "conv2.branch")
class ConvBranch(nn.Module):
    r"""Convolution branch: a depthwise 7x7 convolution with GELU, and a 1x1 convolution with GELU.

    .. math:: f(x) = \mathrm{GELU}(W\, \mathrm{GELU}(w * x)) \quad\text{or}\quad
        f(x) = \mathrm{GELU}(w * x)

    The first branch of a block has the 1x1 convolution, which is a linear layer over the channels.
    The second branch has only the depthwise convolution.

    Shape:
        x: [B, H, W, C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.models.lipsformer import ConvBranch
        >>> ConvBranch(dim=8, pointwise=True)(torch.zeros(1, 5, 7, 8)).shape
        torch.Size([1, 5, 7, 8])
    """

    ends_in = "gelu"  # read by WeightedResidual, which may compute the last GELU itself
    treats_samples_alone = True  # so that dropped samples need not enter

    def __init__(self, dim: int, pointwise: bool, **dd: Any) -> None:
        """Create the convolutions.

        Args:
            dim: Number of channels C.
            pointwise: Add the 1x1 convolution and its GELU.
            **dd: `device` and `dtype` of the parameters.
        """
        super().__init__()
        self.depthwise = DepthwiseConv2d(dim, 7, **dd)
        self.pointwise = Linear(dim, dim, **dd) if pointwise else None

    def forward(self, x: Tensor, last_gelu: bool = True) -> Tensor:
        """Apply the branch to `x` ([B, H, W, C]), with or without its last GELU."""
        x = self.depthwise(x)
        if self.pointwise is not None:
            x = apply_linear(self.pointwise, x, act_before=True)  # the GELU between the two
        return F.gelu(x) if last_gelu else x


@computed_at("mlp.branch")
class Mlp(nn.Module):
    r"""Two linear layers with GELU between them, over the channels.

    .. math:: f(x) = W_2\, \mathrm{GELU}(W_1 x + b_1) + b_2

    Shape:
        x: [B, H, W, C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.models.lipsformer import Mlp
        >>> Mlp(dim=8, hidden_dim=32)(torch.zeros(1, 5, 7, 8)).shape
        torch.Size([1, 5, 7, 8])
    """

    ends_in = "linear"  # read by WeightedResidual, which passes its alpha as output_scale
    treats_samples_alone = True  # so that dropped samples need not enter

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0, **dd: Any) -> None:
        """Create the layers.

        Args:
            dim: Number of channels C.
            hidden_dim: Width between the layers, at least 1.
            drop: Dropout probability after the second layer.
            **dd: `device` and `dtype` of the parameters.

        Raises:
            ValueError: If `hidden_dim` is below 1.
        """
        super().__init__()
        check_count("hidden_dim", hidden_dim)
        self.fc1 = Linear(dim, hidden_dim, **dd)
        self.fc2 = Linear(hidden_dim, dim, **dd)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, output_scale: Tensor | None = None) -> Tensor:
        """Apply the layers to `x` ([B, H, W, C]) and multiply by `output_scale` ([C])."""
        x = apply_linear(self.fc2, self.fc1(x), act_before=True, output_scale=output_scale)
        return self.drop(x)


@computed_at("")
class LipsFormerBlock(nn.Module):
    """Two convolution branches, attention and MLP, each a weighted residual.

    CenterNorm follows the MLP's sum and, on Swin, the attention's sum. Nothing is normalized before
    a branch.

    Shape:
        x: [B, H, W, C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.models.lipsformer import LipsFormerBlock
        >>> block = LipsFormerBlock(8, torch.nn.Identity(), attn_norm=True, residual_scale=0.1)
        >>> block(torch.zeros(1, 5, 7, 8)).shape
        torch.Size([1, 5, 7, 8])
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        attn_norm: bool,
        residual_scale: float,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        **dd: Any,
    ) -> None:
        """Create the branches.

        Args:
            dim: Number of channels C.
            attn: Attention on [B, H, W, C], projections included.
            attn_norm: Apply CenterNorm after the attention's sum.
            residual_scale: Initial weight of every branch.
            mlp_ratio: Hidden width of the MLP divided by C.
            proj_drop: Dropout probability after the MLP.
            drop_path: Drop path rate, the same for every branch.
            **dd: `device` and `dtype` of the parameters.
        """
        super().__init__()

        def residual(branch: nn.Module) -> WeightedResidual:
            return WeightedResidual(branch, dim, residual_scale, drop_path, **dd)

        self.conv1 = residual(ConvBranch(dim, pointwise=True, **dd))
        self.conv2 = residual(ConvBranch(dim, pointwise=False, **dd))
        self.attn = residual(attn)
        self.norm1 = CenterNorm(dim, **dd) if attn_norm else nn.Identity()
        self.mlp = residual(Mlp(dim, int(dim * mlp_ratio), drop=proj_drop, **dd))
        self.norm2 = CenterNorm(dim, **dd)

    @in_one_call
    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to `x` ([B, H, W, C])."""
        x = self.conv1(x)
        x = self.conv2(x)
        x = self.norm1(self.attn(x))
        return self.norm2(self.mlp(x))


class LipsFormerStage(nn.Module):
    """Downsampling, except in the first stage, and then blocks.

    Example:
        >>> import torch
        >>> from lipsformer.models.lipsformer import LipsFormerStage, Mlp
        >>> from lipsformer.models.lipsformer_swin import PatchMerging
        >>> LipsFormerStage(PatchMerging(4, 8), [Mlp(8, 32)])(torch.zeros(1, 6, 10, 4)).shape
        torch.Size([1, 3, 5, 8])
    """

    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Create the stage.

        Args:
            downsample: From [B, H, W, C] to [B, H / 2, W / 2, C']; an identity in the first stage.
            blocks: Blocks of C' channels.
        """
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the stage to `x` ([B, H, W, C])."""
        x = self.downsample(x)
        if self.grad_checkpointing and self.training:
            return checkpoint_seq(self.blocks, x)
        return self.blocks(x)


class LipsFormer(TimmInterface):
    """LipsFormer on a hierarchical backbone.

    A subclass adds a backbone: it sets the class attributes and implements `make_attn`. Every
    image size that is a multiple of the patch size is accepted at run time.

    Example:
        >>> import torch
        >>> from lipsformer.models.lipsformer import LipsFormer
        >>> class WithoutAttention(LipsFormer):
        ...     def make_attn(self, stage, block, dim):
        ...         return torch.nn.Identity()
        >>> model = WithoutAttention(embed_dim=8, depths=(2,), num_classes=5)
        >>> model(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 5])
    """

    attn_norm: ClassVar[bool] = True  # CenterNorm after the attention's sum
    final_norm: ClassVar[bool] = True  # CenterNorm after the last stage
    default_logit_scale: ClassVar[float] = 10.0  # tau without `logit_scale`
    # called with (channels in, channels out, device=, dtype=)
    downsample_layer: ClassVar[Callable[..., nn.Module]]

    def __init__(
        self,
        *,
        embed_dim: int,
        depths: tuple[int, ...],
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        stem: Literal["patch", "conv"] = "patch",
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        mlp_ratio: float = 4.0,
        attn: Literal["cosine", "lipschitznorm"] = "cosine",
        logit_scale: float | None = None,
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
            embed_dim: Channels of the first stage, doubled at each further one.
            depths: Number of blocks of each stage, at least 0 each and 1 in all.
            img_size: Nominal image size in pixels, a positive multiple of the patch size.
            patch_size: Side of a patch in pixels.
            stem: "patch" for the paper's patches, "conv" for a 3x3 convolution with GELU before
                them.
            in_chans: Number of image channels.
            num_classes: Number of classes; 0 leaves out the classifier.
            global_pool: timm's pooling name; "" keeps the map.
            mlp_ratio: Hidden width of the MLP divided by the channels.
            attn: "cosine" for the paper's scaled cosine attention, "lipschitznorm" for dot products
                normalized by LipschitzNorm, which has neither tau nor nu.
            logit_scale: tau, which multiplies the cosines, in (0, 100]; None for 10, or 12 on
                CSwin.
            learn_logit_scale: Learn tau per head and block.
            value_scale: nu > 0, the length to which values are normalized.
            residual_scale: Initial weight of the residual branches; None for 1 / (number of
                blocks).
            official_compat: Numerics of the released code: the values are not normalized and
                convolution biases start at PyTorch's default.
            drop_rate: Dropout before the classifier.
            proj_drop_rate: Dropout after the attention's projection and the MLP.
            attn_drop_rate: Dropout of the attention weights.
            drop_path_rate: Drop path rate of the last block, rising linearly from 0.
            weight_init: "" for spectral initialization, "skip" for none. "unit_norm", which is not
                in the paper, also starts CenterNorm with the constant 1 instead of d / (d - 1).
            device: Device of the parameters.
            dtype: Data type of the parameters.

        Raises:
            ValueError: If a name is unknown, a number is out of range, the image size is not a
                multiple of the patch size, or a setting has no effect.
        """
        super().__init__()
        check_depths(depths)
        _check_settings(img_size, patch_size, in_chans, stem, drop_path_rate, weight_init)
        _check_attention(attn, logit_scale, learn_logit_scale, value_scale, official_compat)
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.output_fmt = "NHWC"
        self.unit_norm = weight_init == "unit_norm"
        self.embed_dim = embed_dim
        self.num_features = embed_dim * 2 ** (len(depths) - 1)
        self.official_compat, self.attn = official_compat, attn
        self.attn_options: dict[str, Any] = {
            "logit_scale": self.default_logit_scale if logit_scale is None else logit_scale,
            "learn_logit_scale": learn_logit_scale,
            "value_scale": None if official_compat else value_scale,
            "eps": RELEASED_EPS if official_compat else DEFAULT_EPS,
            "attn_drop": attn_drop_rate,
            **dd,
        }
        self.proj_options = {"proj_drop": proj_drop_rate, **dd}  # for the modules of make_attn

        embed = ConvStem if stem == "conv" else PatchEmbed
        self.patch_embed = embed(patch_size, in_chans, embed_dim, **dd)
        self.stages = self._make_stages(
            depths,
            drop_path_rate,
            dd,
            residual_scale=1.0 / sum(depths) if residual_scale is None else residual_scale,
            mlp_ratio=mlp_ratio,
            proj_drop=proj_drop_rate,
        )
        self.feature_info = [
            {"num_chs": embed_dim * 2**i, "reduction": patch_size * 2**i, "module": f"stages.{i}"}
            for i in range(len(depths))
        ]
        self.norm = CenterNorm(self.num_features, **dd) if self.final_norm else nn.Identity()
        self.head = ClassifierHead(
            self.num_features,
            num_classes,
            pool_type=global_pool,
            drop_rate=drop_rate,
            input_fmt=self.output_fmt,
            **dd,
        )
        self.head_hidden_size = self.head.num_features
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    def _make_stages(
        self, depths: tuple[int, ...], drop_path_rate: float, dd: dict[str, Any], **options: Any
    ) -> nn.Sequential:
        """Build all stages.

        Args:
            depths: Number of blocks of each stage.
            drop_path_rate: Drop path rate of the last block, rising linearly from 0.
            dd: `device` and `dtype` of the parameters.
            **options: Arguments that every `LipsFormerBlock` gets.
        """
        num_blocks, blocks_before = sum(depths), 0
        stages = []
        for stage, depth in enumerate(depths):
            dim = self.embed_dim * 2**stage
            blocks = [
                LipsFormerBlock(
                    dim,
                    self.make_attn(stage, block, dim),
                    attn_norm=self.attn_norm,
                    drop_path=drop_path_rate * (blocks_before + block) / max(num_blocks - 1, 1),
                    **options,
                    **dd,
                )
                for block in range(depth)
            ]
            blocks_before += depth
            downsample = nn.Identity()
            if stage > 0:
                downsample = type(self).downsample_layer(dim // 2, dim, **dd)
            stages.append(LipsFormerStage(downsample, blocks))
        return nn.Sequential(*stages)

    def make_attn(self, stage: int, block: int, dim: int) -> nn.Module:
        """Build the attention of one block on [B, H, W, C]; `block` counts within the stage."""
        raise NotImplementedError

    def make_core(self, num_heads: int) -> nn.Module:
        """Build the attention that `attn` names, which `make_attn` puts between projections."""
        return make_core(self.attn, num_heads, **self.attn_options)

    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialize every linear and convolution weight spectrally and set the biases to zero.

        With `official_compat` the biases of convolutions keep PyTorch's random values.

        Args:
            needs_reset: Reset all other parameters and the buffers first, as after `to_empty`.

        Raises:
            TypeError: If a weight is computed from others. Nothing has been changed then.
        """
        require_own_weights(self)
        if needs_reset:
            self._reset_modules()
        spectral_init_modules_(self, zero_conv_bias=not self.official_compat)
        if self.unit_norm:
            for module in self.modules():
                if isinstance(module, CenterNorm):
                    module.reset_parameters(unit=True)


def _check_settings(
    img_size: int | tuple[int, int],
    patch_size: int,
    in_chans: int,
    stem: str,
    drop_path_rate: float,
    weight_init: str,
) -> None:
    if weight_init not in ("", "unit_norm", "skip"):
        raise ValueError(f"weight_init must be '', 'unit_norm' or 'skip', got {weight_init!r}")
    if stem not in ("patch", "conv"):
        raise ValueError(f"stem must be 'patch' or 'conv', got {stem!r}")
    if not isinstance(patch_size, int):
        raise ValueError(f"patch_size={patch_size} must be one integer, because patches are square")
    check_count("patch_size", patch_size)
    check_count("in_chans", in_chans)
    check_img_size(img_size, patch_size)
    check_drop_path("drop_path_rate", drop_path_rate)


def _check_attention(
    attn: str,
    logit_scale: float | None,
    learn_logit_scale: bool,
    value_scale: float,
    official_compat: bool,
) -> None:
    given = {} if logit_scale is None else {"logit_scale": logit_scale}
    check_attn(attn, **given, learn_logit_scale=learn_logit_scale, value_scale=value_scale)
    if attn == "lipschitznorm" and official_compat:
        raise ValueError("attn='lipschitznorm' has no released form: leave out official_compat")
    if official_compat and value_scale != 1.0:
        raise ValueError(
            f"value_scale={value_scale} has no effect with official_compat=True, whose values "
            "are not normalized: leave one of them out"
        )


def fit_window(size: int, max_window: int) -> int:
    """Return the side of the equal windows that cover `size` with the least padding.

    The side is the smallest one that needs no more windows than `max_window` does: 24 in windows
    of at most 7 gives 6, and 16 gives 6 (three windows, two rows of padding instead of five).

    Args:
        size: Extent of the feature map in tokens, >= 1.
        max_window: Largest allowed side in tokens, >= 1.
    """
    num_windows = (size + max_window - 1) // max_window
    return (size + num_windows - 1) // num_windows


@register_fold(LipsFormerBlock)
def _fold_block(block: Any) -> None:
    """Fold what is affine in a block, and the GELUs into the depthwise convolutions before them.

    Both convolution branches end in GELU, so their residual scales stay. One pass computes GELU,
    scale and sum. Attention whose class does not say that it ends in a linear layer stays as it is.
    """
    block.conv1, block.conv2 = _fold_conv(block.conv1), _fold_conv(block.conv2)
    mlp = getattr(block.mlp, "branch", block.mlp)
    if type(mlp) is not Mlp:
        kind = f"{type(mlp).__module__}.{type(mlp).__name__}"
        raise TypeError(f"its MLP is a {kind}, and only LipsFormer's own is folded")
    require_ending(mlp, mlp.drop)
    attn = getattr(block.attn, "branch", block.attn)
    if declared(attn, "ends_in") == "linear":
        require_ending(attn, getattr(attn, "proj_drop", nn.Identity()))
        block.attn = FoldedResidual(block.attn, attn.proj, block.norm1)
        block.norm1 = nn.Identity()
    block.mlp = FoldedResidual(block.mlp, mlp.fc2, block.norm2)
    block.mlp.branch = nn.Sequential(FrozenLinear(mlp.fc1, act_after=True), FrozenLinear(mlp.fc2))
    block.norm2 = nn.Identity()


def _fold_conv(residual: Any) -> nn.Module:
    """Return the residual of a convolution branch with the first GELU in the convolution.

    A branch that a user put in its place stays as it is.
    """
    branch = getattr(residual, "branch", None)
    if type(branch) is not ConvBranch or type(branch.depthwise) is not DepthwiseConv2d:
        return residual
    require_plain(residual, branch)
    if branch.pointwise is None:
        return FoldedConv(branch.depthwise, residual.residual_scale)
    residual.branch = _FoldedConvBranch(branch.depthwise, branch.pointwise)
    return residual


class _FoldedConvBranch(nn.Module):
    """The convolution branch with a 1x1 convolution, its first GELU in the depthwise one."""

    ends_in = "gelu"

    def __init__(self, depthwise: DepthwiseConv2d, pointwise: nn.Module) -> None:
        super().__init__()
        self.depthwise, self.pointwise = FoldedConv(depthwise), pointwise

    def forward(self, x: Tensor, last_gelu: bool = True) -> Tensor:
        x = self.pointwise(self.depthwise(x))
        return F.gelu(x) if last_gelu else x
