"""The hierarchical body that the Swin and the CSwin form of LipsFormer share, with timm's API."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead, get_device_dtype, register_notrace_module, to_2tuple
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models._manipulate import checkpoint_seq
from torch import Tensor, nn

from lipsformer.layers import (
    CenterNorm,
    DepthwiseConv2d,
    Linear,
    LipschitzNormAttention,
    ScaledCosineAttention,
    WeightedResidual,
    kept_samples,
    spectral_init_,
)

Device = torch.device | str | None
PAPER_EPS = 1e-2  # the paper leaves it open; see ScaledCosineAttention
RELEASED_EPS = 1e-6  # within float32's rounding of the released code's max(length, 1e-12)


class PatchConv2d(nn.Conv2d):
    """Convolution whose output is channels last whatever the images' layout.

    So no block has to transpose, and training need not keep a copy of the images.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.contiguous(memory_format=torch.channels_last)
        return F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class PatchEmbed(nn.Module):
    """Embed non-overlapping patches: strided convolution, then CenterNorm, channels last."""

    def __init__(
        self,
        patch_size: int,
        in_chans: int,
        dim: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the projection.

        Args:
            patch_size: Side of a patch in pixels, kernel and stride of the convolution.
            in_chans: Number of image channels.
            dim: Number of channels C of a token.
            device: Device of the parameters.
            dtype: Type of the parameters.
        """
        super().__init__()
        self.patch_size = patch_size
        self.proj = PatchConv2d(in_chans, dim, patch_size, patch_size, device=device, dtype=dtype)
        self.norm = CenterNorm(dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Turn images [B, 3, H, W] into tokens [B, H / p, W / p, C]."""
        height, width = x.shape[-2], x.shape[-1]
        if height % self.patch_size != 0 or width % self.patch_size != 0:
            raise ValueError(
                f"image size {height}x{width} is not a multiple of the patch size "
                f"{self.patch_size}: resize or pad the images"
            )
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


register_notrace_module(PatchEmbed)  # the check of the size raises


class ConvBranch(nn.Module):
    """Depthwise 7x7 convolution, the first branch with GELU and a 1x1 convolution more.

    The 1x1 convolution is a linear layer over the channels. The GELU that ends either branch is
    applied by the weighted residual. Shape: [B, H, W, C] to the same.
    """

    def __init__(
        self, dim: int, pointwise: bool, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        """Create the convolutions.

        Args:
            dim: Number of channels C.
            pointwise: Add GELU and the 1x1 convolution.
            device: Device of the parameters.
            dtype: Type of the parameters.
        """
        super().__init__()
        self.depthwise = DepthwiseConv2d(dim, 7, device=device, dtype=dtype)
        self.pointwise = Linear(dim, dim, device=device, dtype=dtype) if pointwise else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the branch to ``x`` ([B, H, W, C])."""
        x = self.depthwise(x)
        if self.pointwise is not None:
            x = self.pointwise(x, gelu=True)
        return x


class Mlp(nn.Module):
    """Two linear layers with GELU between them, over the channels.

    Shape: [B, H, W, C] to the same.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        drop: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the layers.

        Args:
            dim: Number of channels C.
            hidden_dim: Width between the layers.
            drop: Dropout probability after the second layer.
            device: Device of the parameters.
            dtype: Type of the parameters.
        """
        super().__init__()
        self.fc1 = Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.fc2 = Linear(hidden_dim, dim, device=device, dtype=dtype)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Apply the layers to ``x`` ([B, H, W, C]); ``scale`` ([C]) multiplies the output."""
        return self.drop(self.fc2(self.fc1(x), gelu=True, scale=scale))


class LipsFormerBlock(nn.Module):
    """Two convolution branches, attention and MLP, each entering by a weighted residual shortcut.

    CenterNorm follows the MLP's sum and, in the Swin form, the attention's; nothing is normalised
    before a branch. Shape: [B, H, W, C] to the same.
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
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the branches.

        Args:
            dim: Number of channels C.
            attn: Attention on [B, H, W, C], projections included, called with a second argument
                [C] that multiplies its output.
            attn_norm: Apply CenterNorm after the attention's sum.
            residual_scale: Initial weight of every branch.
            mlp_ratio: Hidden width of the MLP divided by C.
            proj_drop: Dropout probability after the MLP.
            drop_path: Drop path rate, the same for every branch.
            device: Device of the parameters.
            dtype: Type of the parameters.
        """
        super().__init__()

        def residual() -> WeightedResidual:
            return WeightedResidual(dim, residual_scale, drop_path, device=device, dtype=dtype)

        self.conv1 = ConvBranch(dim, pointwise=True, device=device, dtype=dtype)
        self.residual_conv1 = residual()
        self.conv2 = ConvBranch(dim, pointwise=False, device=device, dtype=dtype)
        self.residual_conv2 = residual()
        self.attn = attn
        self.residual_attn = residual()
        self.norm1 = CenterNorm(dim, device=device, dtype=dtype) if attn_norm else nn.Identity()
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop, device=device, dtype=dtype)
        self.residual_mlp = residual()
        self.norm2 = CenterNorm(dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to ``x`` ([B, H, W, C])."""
        mask = self.residual_conv1.draw_mask(x)
        x = self.residual_conv1(x, self.conv1(kept_samples(x, mask)), mask, gelu=True)
        mask = self.residual_conv2.draw_mask(x)
        x = self.residual_conv2(x, self.conv2(kept_samples(x, mask)), mask, gelu=True)
        mask = self.residual_attn.draw_mask(x)
        branch = self.attn(kept_samples(x, mask), self.residual_attn.residual_scale)
        x = self.norm1(self.residual_attn(x, branch, mask, scaled=True))
        mask = self.residual_mlp.draw_mask(x)
        branch = self.mlp(kept_samples(x, mask), self.residual_mlp.residual_scale)
        return self.norm2(self.residual_mlp(x, branch, mask, scaled=True))


register_notrace_module(LipsFormerBlock)  # the samples that are computed are drawn at run time


class LipsFormerStage(nn.Module):
    """Downsampling (but for the first stage), then blocks."""

    def __init__(self, downsample: nn.Module, blocks: list[LipsFormerBlock]) -> None:
        """Join the parts.

        Args:
            downsample: Module from [B, H, W, C] to [B, H / 2, W / 2, 2 C], or an identity.
            blocks: The blocks in order.
        """
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the stage to ``x`` ([B, H, W, C])."""
        x = self.downsample(x)
        if self.grad_checkpointing and self.training and not torch.jit.is_scripting():
            return checkpoint_seq(self.blocks, x)
        return self.blocks(x)


class LipsFormer(nn.Module):
    """LipsFormer on either body; the subclasses choose attention and downsampling.

    Tokens are channels last throughout and every image size that is a multiple of the patch size
    is accepted at run time.
    """

    def __init__(
        self,
        *,
        attn_layer: Callable[[int, int], nn.Module],
        downsample_layer: Callable[..., nn.Module],
        attn_norm: bool,
        final_norm: bool,
        residual_scale: float,
        zero_conv_bias: bool,
        img_size: int | tuple[int, int],
        patch_size: int,
        in_chans: int,
        num_classes: int,
        global_pool: str,
        embed_dim: int,
        depths: tuple[int, ...],
        mlp_ratio: float,
        drop_rate: float,
        proj_drop_rate: float,
        drop_path_rate: float,
        weight_init: str,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        """Build the stages; see the subclasses for the arguments that they share.

        Args:
            attn_layer: Called with (stage, channels), returns the attention of one block.
            downsample_layer: Called with (channels in, channels out, device=, dtype=).
            attn_norm: Apply CenterNorm after the attention's sum.
            final_norm: Apply CenterNorm after the last stage.
            residual_scale: Initial weight of every residual branch.
            zero_conv_bias: Start convolution biases at zero instead of PyTorch's default.
            img_size: Nominal image size in pixels, a multiple of the patch size.
            patch_size: Side of a patch in pixels.
            in_chans: Number of image channels.
            num_classes: Number of classes; 0 leaves out the classifier.
            global_pool: timm's pooling name; "" keeps the map.
            embed_dim: Channels of the first stage, doubled at each further one.
            depths: Number of blocks of each stage.
            mlp_ratio: Hidden width of the MLP divided by the channels.
            drop_rate: Dropout before the classifier.
            proj_drop_rate: Dropout after the attention's projection and the MLP.
            drop_path_rate: Drop path rate of the last block, rising linearly from 0.
            weight_init: "" for spectral initialisation, "skip" for none.
            device: Device of the parameters.
            dtype: Type of the parameters.
        """
        super().__init__()
        if weight_init not in ("", "skip"):
            raise ValueError(f"weight_init must be '' or 'skip', got {weight_init!r}")
        if any(side % patch_size != 0 for side in to_2tuple(img_size)):
            raise ValueError(f"img_size={img_size} is not a multiple of patch_size={patch_size}")
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.output_fmt = "NHWC"
        self.embed_dim = embed_dim
        self.num_features = embed_dim * 2 ** (len(depths) - 1)
        self.zero_conv_bias = zero_conv_bias
        self.feature_info: list[dict[str, Any]] = []

        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim, **dd)
        num_blocks = sum(depths)
        drop_path = [drop_path_rate * i / max(num_blocks - 1, 1) for i in range(num_blocks)]
        stages = []
        for stage, depth in enumerate(depths):
            dim = embed_dim * 2**stage
            first = sum(depths[:stage])
            blocks = [
                LipsFormerBlock(
                    dim,
                    attn_layer(stage, dim),
                    attn_norm=attn_norm,
                    residual_scale=residual_scale,
                    mlp_ratio=mlp_ratio,
                    proj_drop=proj_drop_rate,
                    drop_path=rate,
                    **dd,
                )
                for rate in drop_path[first : first + depth]
            ]
            downsample = downsample_layer(dim // 2, dim, **dd) if stage > 0 else nn.Identity()
            stages.append(LipsFormerStage(downsample, blocks))
            self.feature_info.append(
                {"num_chs": dim, "reduction": patch_size * 2**stage, "module": f"stages.{stage}"}
            )
        self.stages = nn.Sequential(*stages)
        self.norm = CenterNorm(self.num_features, **dd) if final_norm else nn.Identity()
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

    @torch.jit.ignore()
    def init_weights(self, needs_reset: bool = True) -> None:
        """Spectral initialisation of every linear and convolution weight; biases zero.

        Args:
            needs_reset: Reset the other parameters and the buffers too, as after ``to_empty``.
        """
        if needs_reset:
            for module in self.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()  # pyright: ignore[reportCallIssue]
        spectral_init_modules_(self, zero_conv_bias=self.zero_conv_bias)

    @torch.jit.ignore()
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are scales, gains, biases or position tables."""
        names = ("residual_scale", "relative_position_bias_table", "log_logit_scale")
        return {
            name
            for name, parameter in self.named_parameters()
            if parameter.ndim == 1 or name.endswith(names)
        }

    @torch.jit.ignore()
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that sort parameters into stem and blocks, for layer-wise decay."""
        blocks = [
            (r"^stages\.(\d+)\.downsample", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm", (99999,)),
        ]
        return {"stem": r"^patch_embed", "blocks": r"^stages\.(\d+)" if coarse else blocks}

    @torch.jit.ignore()
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass of training."""
        for stage in self.stages:
            assert isinstance(stage, LipsFormerStage)
            stage.grad_checkpointing = enable

    def set_input_size(self, img_size: int | tuple[int, int] | None = None) -> None:
        """Change the nominal image size; no weight depends on it.

        Args:
            img_size: Side, or (height, width), in pixels; None keeps it.
        """
        if img_size is not None:
            update_model_input_size(self, img_size)

    @torch.jit.ignore()
    def get_classifier(self) -> nn.Module:
        """Return the classifier."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new, spectrally initialised one.

        Args:
            num_classes: Number of classes; 0 leaves out the classifier.
            global_pool: New pooling, None to keep it.
        """
        self.num_classes = num_classes
        dd: dict[str, Any] = get_device_dtype(self)
        self.head.reset(num_classes, global_pool, in_features=self.num_features, **dd)
        self.head_hidden_size = self.head.num_features
        spectral_init_modules_(self.head.fc)
        if global_pool is not None:
            self.global_pool = global_pool

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the stages' outputs, and the final features unless only the former are wanted.

        Args:
            x: Images [B, 3, H, W].
            indices: Stages to return: the last n if an int, all if None.
            norm: Apply the final CenterNorm to the last stage's output.
            stop_early: Stop after the last stage wanted.
            output_fmt: "NCHW" or "NHWC", the layout of the intermediates.
            intermediates_only: Return the list alone.

        Raises:
            ValueError: If ``output_fmt`` is neither.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt!r}")
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        last = len(self.stages) - 1
        x = self.patch_embed(x)
        intermediates = []
        index = -1
        for index, stage in enumerate(self.stages[: max_index + 1] if stop_early else self.stages):
            x = stage(x)
            if index in take_indices:
                y = self.norm(x) if norm and index == last else x
                intermediates.append(y.permute(0, 3, 1, 2) if output_fmt == "NCHW" else y)
        if intermediates_only:
            return intermediates
        return (self.norm(x) if index == last else x), intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what is not needed for the given stages' outputs.

        Args:
            indices: Stages to keep reachable: the last n if an int.
            prune_norm: Drop the final CenterNorm.
            prune_head: Drop the classifier and the pooling.

        Returns:
            The indices of the stages that are returned.
        """
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        shortened = max_index < len(self.stages) - 1
        self.stages = self.stages[: max_index + 1]
        if prune_norm or shortened:
            self.norm = nn.Identity()
        if shortened:
            self.num_features = self.head_hidden_size = self.feature_info[max_index]["num_chs"]
        if prune_head or shortened:
            self.reset_classifier(0, "")
        return take_indices

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map [B, H / 32, W / 32, C], normalised where the body does so."""
        return self.norm(self.stages(self.patch_embed(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool a feature map and classify it, or stop before the classifier.

        Args:
            x: [B, H, W, C] from ``forward_features``.
            pre_logits: Return the pooled features.
        """
        return self.head(x, pre_logits=True) if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images [B, 3, H, W]; returns logits [B, num_classes]."""
        return self.forward_head(self.forward_features(x))


def spectral_init_modules_(module: nn.Module, zero_conv_bias: bool = True) -> None:
    """Initialise the linear and convolution weights of a module spectrally, and zero the biases.

    Args:
        module: Searched with all its descendants.
        zero_conv_bias: False leaves the biases of convolutions as they are.
    """
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d, DepthwiseConv2d)):
            spectral_init_(layer.weight)
            if layer.bias is not None and (zero_conv_bias or isinstance(layer, nn.Linear)):
                nn.init.zeros_(layer.bias)


def make_attention(
    attn: Literal["cosine", "lipschitznorm"],
    num_heads: int,
    *,
    logit_scale: float,
    learn_logit_scale: bool,
    value_scale: float,
    official_compat: bool,
    attn_drop: float,
    device: Device,
    dtype: torch.dtype | None,
) -> nn.Module:
    """Return the attention on q, k and v that a model's arguments ask for.

    Args:
        attn: "cosine" for the paper's attention, "lipschitznorm" for LipschitzNorm.
        num_heads: Number of heads.
        logit_scale: Temperature tau of the cosine attention.
        learn_logit_scale: Learn tau.
        value_scale: Length nu of the normalised values.
        official_compat: Leave the values as they are.
        attn_drop: Dropout of the attention weights.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        ValueError: If ``attn`` is unknown or an argument would have no effect.
    """
    if attn not in ("cosine", "lipschitznorm"):
        raise ValueError(f"attn must be 'cosine' or 'lipschitznorm', got {attn!r}")
    if attn == "lipschitznorm":
        if official_compat or learn_logit_scale or value_scale != 1.0:
            raise ValueError(
                "attn='lipschitznorm' has neither tau nor nu nor a released form here: leave out "
                "official_compat, learn_logit_scale and value_scale"
            )
        return LipschitzNormAttention(num_heads, attn_drop=attn_drop)
    if official_compat and value_scale != 1.0:
        raise ValueError(
            f"value_scale={value_scale} has no effect with official_compat=True, whose values "
            "are not normalised: leave one of them out"
        )
    return ScaledCosineAttention(
        num_heads,
        logit_scale=logit_scale,
        learn_logit_scale=learn_logit_scale,
        value_scale=None if official_compat else value_scale,
        eps=RELEASED_EPS if official_compat else PAPER_EPS,
        attn_drop=attn_drop,
        device=device,
        dtype=dtype,
    )


def pad_to_even(x: Tensor) -> Tensor:
    """Pad a map [B, H, W, C] with zeros at the bottom and the right to even height and width."""
    return F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))


def model_cfg(url: str = "", **kwargs: Any) -> dict[str, Any]:
    """Return timm's default configuration of a LipsFormer.

    Args:
        url: Address of the weights, "" for none.
        **kwargs: Fields that differ.
    """
    return {
        "url": url,
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head.fc",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2304.09856",
        "paper_name": "LipsFormer: Introducing Lipschitz Continuity to Vision Transformers",
        "origin_url": "https://github.com/IDEA-Research/LipsFormer",
        **kwargs,
    }
