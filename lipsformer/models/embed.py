"""From pixels to tokens: the paper's patches, and a convolutional stem for small images."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lipsformer import kernels
from lipsformer.layers import CenterNorm
from lipsformer.models.folding import fold_norm_behind, register_fold


class PatchConv2d(nn.Conv2d):
    """Convolution whose output is channels last for images of any memory layout.

    PyTorch chooses the layout of the output by the layout of the weight, so only the weight is
    converted. The blocks then need no transposition, and there is no converted copy of the images,
    which training would have to keep.

    Example:
        >>> import torch
        >>> from lipsformer.models.embed import PatchConv2d
        >>> y = PatchConv2d(3, 16, kernel_size=4, stride=4)(torch.zeros(2, 3, 32, 24))
        >>> y.is_contiguous(memory_format=torch.channels_last)
        True
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if kernels.active_transform() is None:  # vmap knows no other memory format
            weight = weight.contiguous(memory_format=torch.channels_last)
        return F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class PatchEmbed(nn.Module):
    """Embed non-overlapping patches: strided convolution, then CenterNorm, channels last.

    Example:
        >>> import torch
        >>> from lipsformer.models.embed import PatchEmbed
        >>> PatchEmbed(patch_size=4, in_chans=3, dim=16)(torch.zeros(1, 3, 32, 24)).shape
        torch.Size([1, 8, 6, 16])
    """

    def __init__(
        self, patch_size: int, in_chans: int, dim: int, *, norm: bool = True, **dd: Any
    ) -> None:
        """Create the projection and the norm.

        Args:
            patch_size: Side of a patch in pixels p, kernel and stride of the convolution.
            in_chans: Number of channels of the image or map.
            dim: Number of channels C of a token.
            norm: False leaves out CenterNorm.
            **dd: `device` and `dtype` of the parameters.
        """
        super().__init__()
        self.patch_size = patch_size
        self.proj = PatchConv2d(in_chans, dim, patch_size, patch_size, **dd)
        self.norm = CenterNorm(dim, **dd) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Turn `x` ([B, in_chans, H, W]) into tokens [B, H / p, W / p, C].

        Raises:
            ValueError: If x has not four axes, or if H or W is not a multiple of p.
        """
        if x.dim() != 4:
            raise ValueError(
                f"images of shape {tuple(x.shape)} have {x.dim()} axes instead of 4: pass "
                "[B, channels, H, W], one image as image.unsqueeze(0)"
            )
        height, width = x.shape[-2], x.shape[-1]
        if height % self.patch_size != 0 or width % self.patch_size != 0:
            sizes = f"{height}x{width} is not a multiple of the patch size {self.patch_size}"
            raise ValueError(f"image size {sizes}: resize or pad the images")
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


register_notrace_module(PatchEmbed)  # FX cannot trace the check of the size


class ConvStem(nn.Module):
    r"""A 3x3 convolution of the pixels with GELU before the patches, channels last.

    .. math:: f(x) = \mathrm{PatchEmbed}(\mathrm{GELU}(w * x))

    The paper cuts the image into patches at once. Small images are learned faster with overlapping
    filters in front, as in CCT (Hassani et al., arXiv:2104.05704).

    Example:
        >>> import torch
        >>> from lipsformer.models.embed import ConvStem
        >>> ConvStem(patch_size=2, in_chans=3, dim=16)(torch.zeros(1, 3, 32, 24)).shape
        torch.Size([1, 16, 12, 16])
    """

    def __init__(self, patch_size: int, in_chans: int, dim: int, **dd: Any) -> None:
        """Create the convolution, which keeps the size of the image, and the patches.

        Args:
            patch_size: Side of a patch in pixels p.
            in_chans: Number of image channels.
            dim: Number of channels C of the convolution and of a token.
            **dd: `device` and `dtype` of the parameters.
        """
        super().__init__()
        self.patch_size = patch_size
        self.proj = PatchConv2d(in_chans, dim, 3, padding=1, **dd)
        self.patches = PatchEmbed(patch_size, dim, dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Turn `x` ([B, in_chans, H, W]) into tokens [B, H / p, W / p, C]."""
        return self.patches(F.gelu(self.proj(x)))


@register_fold(PatchEmbed)
def _fold_patch_embed(embed: Any) -> None:
    if isinstance(embed.norm, CenterNorm):  # the contractive model has none
        fold_norm_behind(embed.proj, embed.norm)
        embed.norm = nn.Identity()
