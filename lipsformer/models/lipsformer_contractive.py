"""LipsFormer whose layers all have the Lipschitz constant 1, for certificates.

The components are the paper's attention (Qi et al., "LipsFormer", ICLR 2023) in windows, with a
residual that keeps the constant 1, between orthogonal linear layers. There are no norms: an
orthogonal layer keeps the length of every change. Shifts of channels in the place of convolutions
are those of Wu et al. 2018, "Shift: A Zero FLOP, Zero Parameter Alternative to Spatial
Convolutions", arXiv:1711.08141. The combination is ours, and no published figure belongs to it.
"""

import math
from typing import Any, cast

import torch
from timm.layers import ClassifierHead, register_notrace_module, to_2tuple
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from lipsformer._arguments import check_count, check_depths, check_fraction, check_positive
from lipsformer.layers import FoldShift, JoinTokens, Linear, ScaledCosineAttention
from lipsformer.layers.contractive import orthogonal_parts
from lipsformer.layers.spectral import require_own_weights
from lipsformer.models._timm import TimmInterface, create, model_cfg
from lipsformer.models.embed import PatchEmbed
from lipsformer.models.lipsformer import LipsFormerStage
from lipsformer.models.lipsformer_swin import PatchMerging, WindowAttention, checkpoint_filter_fn
from lipsformer.models.pretrained import register_with_weights

__all__ = ["LipsFormerContractive"]


class ContractiveResidual(nn.Module):
    r"""Mix the last channels with a window attention, so that the constant stays 1.

    .. math:: y = [x_1, (1 - a) x_2 + \frac{a}{L} f(x_2)], \quad
        L = \nu \epsilon^{-1/2} (\tau \sqrt{1 + \min(m, N/2)} + \sqrt m)

    Here f is scaled cosine attention in windows of N tokens with normalized values, and m bounds
    the column sums of its attention matrices (Theorem 9). The constant of f is at most L if the
    projections of queries, keys and values and the output projection have norms of at most 1. Then
    the constant of y is 1, because :math:`x_1` does not enter f. The weight a in [least, 1] and the
    position biases, on which m depends, are learned.

    Shape:
        x: [B, H, W, C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.layers import ScaledCosineAttention
        >>> from lipsformer.models.lipsformer_contractive import ContractiveResidual
        >>> from lipsformer.models.lipsformer_swin import WindowAttention
        >>> attn = WindowAttention(8, 1, window_size=4, attention=ScaledCosineAttention(1))
        >>> ContractiveResidual(attn, dim=8)(torch.zeros(1, 4, 4, 24)).shape
        torch.Size([1, 4, 4, 24])

    Reference:
        Theorem 31 of docs/theorems.md.
    """

    def __init__(
        self,
        branch: WindowAttention,
        dim: int,
        least: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the weight a.

        Args:
            branch: f, on maps of `dim` channels, with a `ScaledCosineAttention` that has a fixed
                logit scale and normalizes its values.
            dim: Number of channels of f, at the end of those of the input.
            least: Smallest weight a, in [0, 1]. Training for margins tends to turn attention off,
                because a mean of values is shorter than the values.
            device: Device of the parameter.
            dtype: Data type of the parameter.

        Raises:
            ValueError: If `least` is not in [0, 1].
        """
        super().__init__()
        check_fraction("least", least)
        self.branch = branch
        self.dim = dim
        self.least = least
        self.mix = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight a to the middle of its interval."""
        nn.init.constant_(self.mix, 0.5 * (self.least + 1.0))

    def weight(self) -> Tensor:
        """Return the weight a that applies."""
        return self.mix.clamp(self.least, 1.0)

    def divisor(self, height: int, width: int) -> Tensor:
        """Return L on a map of the given size, in the precision of the table of biases."""
        h, w = self.branch.window(height, width)
        core: Any = self.branch.attention
        bias = self.branch.position_bias(h, w)[0]
        p = bias.double().softmax(-1)  # in float32 both p and the exponential may underflow
        mass = (p / (p + (1.0 - p) * math.exp(-2.0 * core.tau()))).sum(-2)
        mass = mass.amax((0, 1))  # amax without axes has no form in ONNX
        scores = (1.0 + mass.clamp(max=h * w / 2)).sqrt()
        return ((core.tau() * scores + mass.sqrt()) * (core.value_scale * core.eps**-0.5)).to(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the last channels of `x` ([B, H, W, C])."""
        kept, x = x.tensor_split([x.shape[-1] - self.dim], dim=-1)
        a = self.weight()
        factor = (a / self.divisor(x.shape[1], x.shape[2])).expand(self.dim)
        mixed = self.branch(x, output_scale=factor)
        return torch.cat([kept, torch.addcmul(mixed, x, (1.0 - a).to(x.dtype))], dim=-1)


register_notrace_module(ContractiveResidual)  # FX cannot trace windows that depend on the map


class ContractiveBlock(nn.Module):
    r"""Two orthogonal layers with a fold and a shift, and attention on some channels between them.

    .. math:: y = \phi(W_2\, A(\phi(W_1 x + b_1)) + b_2)

    Here :math:`\phi` is `FoldShift` and A a `ContractiveResidual`.

    Shape:
        x: [B, H, W, C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.models.lipsformer_contractive import ContractiveBlock
        >>> ContractiveBlock(16, torch.nn.Identity())(torch.zeros(1, 4, 4, 16)).shape
        torch.Size([1, 4, 4, 16])
    """

    def __init__(self, dim: int, attn: nn.Module, **dd: Any) -> None:
        """Create the layers.

        Args:
            dim: Number of channels C, a multiple of 8.
            attn: Attention with its residual, on [B, H, W, C]; an identity for none.
            **dd: `device` and `dtype` of the parameters.
        """
        super().__init__()
        self.fc1 = Linear(dim, dim, **dd)
        self.act1 = FoldShift()
        self.attn = attn
        self.fc2 = Linear(dim, dim, **dd)
        self.act2 = FoldShift()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to `x` ([B, H, W, C])."""
        x = self.attn(self.act1(self.fc1(x)))
        return self.act2(self.fc2(x))


class LipsFormerContractive(TimmInterface):
    """LipsFormer of layers with the constant 1, up to the classifier.

    The constant is 1 as long as every matrix has norms of at most 1, which
    `lipschitz.orthogonal=true` keeps during training. All tokens of the last stage enter the
    classifier, so the image size is fixed.

    Example:
        >>> import torch
        >>> from lipsformer.models import LipsFormerContractive
        >>> sizes = {"dims": (128, 256), "depths": (1, 1), "window_size": (4, 4)}
        >>> model = LipsFormerContractive(img_size=16, num_classes=5, **sizes)
        >>> model(torch.zeros(1, 3, 16, 16)).shape
        torch.Size([1, 5])
    """

    def __init__(
        self,
        *,
        dims: tuple[int, ...] = (48, 192, 384),
        depths: tuple[int, ...] = (1, 3, 3),
        attn_share: float = 0.25,
        attn_least: float = 0.0,
        head_dim: int = 32,
        window_size: tuple[int, ...] = (4, 8, 4),
        logit_scale: float = 0.25,
        eps: float = 16.0,
        img_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_chans: int = 3,
        num_classes: int = 10,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        weight_init: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build the model.

        Args:
            dims: Channels of each stage, multiples of 8.
            depths: Number of blocks of each stage.
            attn_share: Share of the channels on which a block attends, in [0, 1]; 0 for a model
                without attention.
            attn_least: Smallest weight a of attention in its residual, in [0, 1].
            head_dim: Smallest number of channels of a head; a block has as many heads as then fit
                into its channels of attention, at least one, and they must divide these channels.
            window_size: Largest side of a window in tokens, for each stage.
            logit_scale: tau, which multiplies the cosines.
            eps: Smoothing constant of the normalization of queries, keys and values. The values are
                normalized to the length eps^(1/2), so that short values keep theirs.
            img_size: Image size in pixels, a multiple of the patch size times 2 per further stage.
            patch_size: Side of a patch in pixels.
            in_chans: Number of image channels.
            num_classes: Number of classes; 0 leaves out the classifier.
            global_pool: timm's pooling name, for the single joined token; "" keeps [B, 1, 1, C].
            drop_rate: Dropout before the classifier.
            weight_init: "" for orthogonal initialization, "skip" for none.
            device: Device of the parameters.
            dtype: Data type of the parameters.

        Raises:
            ValueError: Unless `dims`, `depths` and `window_size` have one length, the image
                size is a multiple of `patch_size * 2 ** (number of stages - 1)`, every other
                argument is in its range, and the heads divide the channels of attention.
        """
        super().__init__()
        _check_stages(dims, depths, window_size, img_size, patch_size)
        check_fraction("attn_share", attn_share)
        check_fraction("attn_least", attn_least)
        check_count("head_dim", head_dim)
        check_count("in_chans", in_chans)
        check_positive("eps", eps)
        if weight_init not in ("", "skip"):
            raise ValueError(f"weight_init must be '' or 'skip', got {weight_init!r}")
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        height, width = cast(tuple[int, int], to_2tuple(img_size))
        reduction = patch_size * 2 ** (len(dims) - 1)
        self.num_classes, self.in_chans, self.global_pool = num_classes, in_chans, global_pool
        self.output_fmt, self.img_size = "NHWC", (height, width)
        self.attn_share, self.attn_least, self.head_dim = attn_share, attn_least, head_dim
        self.logit_scale, self.eps = logit_scale, eps
        self.feature_info: list[dict[str, Any]] = []
        self.patch_embed = PatchEmbed(patch_size, in_chans, dims[0], norm=False, **dd)
        stages = []
        for stage, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            downsample = nn.Identity()
            if stage > 0:
                downsample = PatchMerging(dims[stage - 1], dim, norm=False, **dd)
            window = window_size[stage]
            attns = [self._make_window_attention(dim, window, dd) for _ in range(depth)]
            blocks = [ContractiveBlock(dim, attn, **dd) for attn in attns]
            stages.append(LipsFormerStage(downsample, blocks))
            self.feature_info.append(
                {"num_chs": dim, "reduction": patch_size * 2**stage, "module": f"stages.{stage}"}
            )
        self.stages = nn.Sequential(*stages)
        self.norm = JoinTokens()
        self.num_features = dims[-1] * (height // reduction) * (width // reduction)
        self.head = ClassifierHead(
            self.num_features, num_classes, global_pool, drop_rate, input_fmt="NHWC", **dd
        )
        self.head_hidden_size = self.head.num_features
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    def _make_window_attention(self, dim: int, window_size: int, dd: dict[str, Any]) -> nn.Module:
        """Build the attention of a block with its residual, or an identity for none.

        Raises:
            ValueError: Unless the number of heads, `max(1, attended // head_dim)`, divides the
                number of channels on which the block attends.
        """
        attended = round(dim * self.attn_share)
        if attended == 0:
            return nn.Identity()
        heads = max(1, attended // self.head_dim)
        if attended % heads != 0:
            raise ValueError(
                f"head_dim={self.head_dim} makes {heads} heads of the {attended} channels on which "
                f"a block of {dim} attends, which {heads} does not divide: change head_dim or "
                "attn_share"
            )
        value_scale = math.sqrt(self.eps)
        core = ScaledCosineAttention(
            heads, self.logit_scale, value_scale=value_scale, eps=self.eps, **dd
        )
        attention = WindowAttention(attended, heads, window_size, core, **dd)
        return ContractiveResidual(attention, attended, self.attn_least, **dd)

    @torch.no_grad()
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialize every matrix orthogonally, and set the biases to zero.

        Args:
            needs_reset: Reset all other parameters and the buffers first, as after `to_empty`.

        Raises:
            TypeError: If a weight is computed from others. Nothing has been changed then.
        """
        require_own_weights(self)
        if needs_reset:
            self._reset_modules()
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)) and not module.weight.is_meta:
                for part in orthogonal_parts(f"{name}.weight", module.weight):
                    values = torch.empty(part.shape, device=part.device)
                    part.copy_(nn.init.orthogonal_(values))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @torch.no_grad()
    def restart_attention(self) -> None:
        """Let every attention begin as a mean over near tokens, with the weight a of its start.

        The output projection undoes that of the values, and the bias is minus twice the squared
        distance of two tokens. For models whose training turned attention off.
        """
        for module in self.modules():
            if isinstance(module, ContractiveResidual):
                module.reset_parameters()
                attention = module.branch
                rows, columns = (
                    torch.arange(1 - side, side).square() for side in attention.window_size
                )
                bias = -2.0 * (rows[:, None] + columns).flatten()[:, None]
                attention.relative_position_bias_table.copy_(
                    bias.expand_as(attention.relative_position_bias_table)
                )
                attention.proj.weight.copy_(attention.qkv.weight.chunk(3)[2].T)
                for layer in (attention.qkv, attention.proj):
                    nn.init.zeros_(layer.bias)

    def set_input_size(self, img_size: int | tuple[int, int] | None = None) -> None:
        """Refuse another image size: the classifier has a weight for every token.

        Args:
            img_size: Side, or (height, width), in pixels; None keeps it.

        Raises:
            ValueError: If it is not the size with which the model was built.
        """
        if img_size is not None and to_2tuple(img_size) != self.img_size:
            raise ValueError(f"{img_size=} must be {self.img_size}: build a model of that size")

    def forward_features(self, x: Tensor) -> Tensor:
        """Return all tokens of the last stage as one, [B, 1, 1, H' W' C]."""
        check_size(x, self.img_size)
        return super().forward_features(x)


def _check_stages(
    dims: tuple[int, ...],
    depths: tuple[int, ...],
    window_size: tuple[int, ...],
    img_size: int | tuple[int, int],
    patch_size: int,
) -> None:
    """Raise a `ValueError` if the stages do not fit each other or the image."""
    if not len(dims) == len(depths) == len(window_size):
        raise ValueError(f"{dims=}, {depths=} and {window_size=} must be of one length")
    check_depths(depths)
    check_count("patch_size", patch_size)
    reduction = patch_size * 2 ** (len(dims) - 1)
    sides = cast(tuple[int, int], to_2tuple(img_size))
    if any(side < 1 or side % reduction != 0 for side in sides):
        raise ValueError(
            f"img_size={img_size} is not a positive multiple of {reduction}, which is "
            "patch_size * 2 ** (number of stages - 1)"
        )
    if any(dim < 8 or dim % 8 != 0 for dim in dims):
        raise ValueError(f"dims={dims} must be positive multiples of 8")


# FX cannot trace the check. timm's `register_notrace_function` would work only in the file that
# defines `forward`.
@torch.fx.wrap
def check_size(images: Tensor, img_size: tuple[int, int]) -> None:
    """Raise a `ValueError` unless `images` ([B, C, H, W]) have the size of the model."""
    size = images.shape[-2], images.shape[-1]
    if size != img_size:
        raise ValueError(f"image size {size} must be {img_size}: resize or pad the images")


default_cfgs = generate_default_cfgs(
    {
        "lipsformer_contractive_nano.untrained": model_cfg(
            input_size=(3, 32, 32), pool_size=None, fixed_input_size=True
        ),
    }
)


@register_with_weights
def lipsformer_contractive_nano(pretrained: bool = False, **kwargs: Any) -> LipsFormerContractive:
    """LipsFormer of layers with the constant 1, for images of 8 to 64 px; not from the paper."""
    args = {"dims": (48, 192, 384), "depths": (1, 3, 3), "window_size": (4, 8, 4)}
    name = "lipsformer_contractive_nano"
    return create(LipsFormerContractive, name, pretrained, checkpoint_filter_fn, args, kwargs)
