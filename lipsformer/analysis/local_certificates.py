r"""Certificates from the Lipschitz constants around each image, for trained LipsFormers.

The product of global constants allows for the worst input of every layer at once. Here a ball
around one image is carried through the model: if the inputs of a layer stay within :math:`\rho` of
the image's own, its outputs stay within :math:`\rho \sup |J|` of the image's own, where J runs over
the Jacobians on that ball. The radius of the image is found by bisection. Theorem and proof are in
docs/lipschitz.md.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer.analysis.bounds import Domain, UnknownModuleError, lipschitz_bound
from lipsformer.analysis.bounds.layers import GELU_BOUND, depthwise_channel_sigma
from lipsformer.analysis.local_attention import LocalAttention, norm_above
from lipsformer.layers import CenterNorm, ScaledCosineAttention, partition_heads
from lipsformer.models.lipsformer import LipsFormer, LipsFormerBlock
from lipsformer.models.lipsformer_cswin import ConvMerging, LipsFormerCSwin
from lipsformer.models.lipsformer_swin import LipsFormerSwin, PatchMerging, WindowAttention

# From the radius of a ball of inputs, [B], to that of a ball that holds the outputs.
Growth = Callable[[Tensor], Tensor]

GELU_CURVATURE = math.sqrt(2.0 / math.pi)  # the largest |GELU''|, at 0
GELU_RANGE = 2.0 * GELU_BOUND - 1.0  # GELU' lies between 1 - GELU_BOUND and GELU_BOUND
HALVINGS, DIGITS = 60, 7  # steps of the bisection: first the power of two, then binary digits


def gelu_slope(x: Tensor) -> Tensor:
    r"""Return :math:`GELU'(x) = \Phi(x) + x \varphi(x)`."""
    return 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))) + x * torch.exp(-0.5 * x * x) / math.sqrt(
        2.0 * math.pi
    )


def norm_matrix(norm: nn.Module, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix of CenterNorm, [C, C]; the identity for `nn.Identity`."""
    eye = torch.eye(dim, dtype=dtype)
    if isinstance(norm, CenterNorm):
        return norm.weight[:, None] * (eye - 1.0 / dim) * (dim / (dim - 1))
    return eye


def _mlp(residual: Any, norm: nn.Module, x: Tensor) -> tuple[Tensor, Growth]:
    """Carry a ball through norm(x + alpha mlp(x)), token by token."""
    mlp = residual.branch
    first, last = mlp.fc1.weight, residual.residual_scale[:, None] * mlp.fc2.weight
    outer = norm_matrix(norm, len(last), x.dtype)
    last = outer @ last
    slopes = gelu_slope(mlp.fc1(x))
    center = norm_above(outer + (slopes[..., None, :] * last) @ first).flatten(1).amax(1)
    rows = first.norm(dim=1)
    curved = GELU_CURVATURE * norm_above(last * rows) * norm_above(first)
    widest = GELU_RANGE * norm_above(last) * norm_above(first)

    def growth(radius: Tensor) -> Tensor:
        return radius * (center + torch.minimum(0.5 * curved * radius, widest))

    return norm(residual(x)), growth


def _conv(residual: Any, x: Tensor) -> tuple[Tensor, Growth]:
    """Carry a ball through x + alpha GELU(W GELU(w * x)), or without the pointwise W."""
    branch, alpha = residual.branch, residual.residual_scale
    kernel = branch.depthwise.weight
    sigma = depthwise_channel_sigma(kernel, (x.shape[1], x.shape[2]))
    reach = kernel.flatten(1).norm(dim=1)  # an output moves by at most this times the radius
    first = gelu_slope(hidden := branch.depthwise(x))
    if branch.pointwise is None:
        center = (alpha * first * sigma).abs().flatten(1).amax(1)
        curved = GELU_CURVATURE * (alpha * reach * sigma).abs().max()
        widest = GELU_BOUND * (alpha * sigma).abs().max()
    else:
        weight = branch.pointwise.weight
        second = gelu_slope(branch.pointwise(nn.functional.gelu(hidden)))
        product = (alpha * second)[..., :, None] * weight * (first * sigma)[..., None, :]
        center = norm_above(product).flatten(1).amax(1)
        scaled = alpha[:, None] * weight
        rows = weight.norm(dim=1, keepdim=True)
        curved = (GELU_BOUND * GELU_CURVATURE) * (
            GELU_BOUND * reach.max() * norm_above(rows * scaled * sigma)
            + norm_above(scaled * (reach * sigma))
        )
        widest = GELU_BOUND**2 * norm_above(scaled * sigma)

    def growth(radius: Tensor) -> Tensor:
        return radius * (1.0 + torch.minimum(center + 0.5 * curved * radius, widest))

    return residual(x), growth


def _attention(residual: Any, norm: nn.Module, x: Tensor) -> tuple[Tensor, Growth]:
    """Carry a ball through norm(x + alpha attention(x))."""
    attn = residual.branch
    batch, height, width, dim = x.shape
    qkv = attn.qkv(x)
    parts: list[tuple[LocalAttention, Tensor, Tensor]] = []
    if isinstance(attn, WindowAttention):
        window = attn.window(height, width)
        groups = [(attn.attention, window, attn.position_bias(*window), None)]
    else:
        groups = [
            (core, attn.stripe(i, height, width), None, lepe)
            for i, (core, lepe) in enumerate(zip(attn.attention, attn.lepe, strict=True))
        ]
    fused = qkv.unflatten(-1, (3, len(groups), dim // len(groups)))
    weights = attn.qkv.weight.unflatten(0, (3, len(groups), -1))
    ones = torch.ones(batch, height, width, 1, 1, dtype=x.dtype)
    for i, (core, window, bias, lepe) in enumerate(groups):
        if not isinstance(core, ScaledCosineAttention):
            raise UnknownModuleError(f"no local bound is known for {type(core).__name__}")
        cut = partition_heads(fused[..., i, :], window, core.num_heads)
        real = partition_heads(ones, window, 1)[0, :, :, :, 0]
        heads = weights[:, i].unflatten(1, (core.num_heads, -1))  # [3, H, d, C]
        local = torch.zeros(core.num_heads, dtype=x.dtype)
        if lepe is not None:
            local = (
                depthwise_channel_sigma(lepe.weight, window)
                .unflatten(0, (core.num_heads, -1))
                .amax(1)
            )
        parts.append((LocalAttention(core, cut, bias, real), heads, local))
    outer = norm_matrix(norm, dim, x.dtype)
    factor = getattr(attn, "attn_factor", 1.0)
    alpha = residual.residual_scale[:, None]
    behind = factor * norm_above(outer @ (alpha * attn.proj.weight))
    straight = norm_above(outer)
    grams = [heads.mT @ heads for _, heads, _ in parts]
    norms = [norm_above(heads) for _, heads, _ in parts]

    def growth(radius: Tensor) -> Tensor:
        gram = 0.0
        for (local, _, lepe), squares, sigma in zip(parts, grams, norms, strict=True):
            windows = len(local.key_norm) // batch
            each = radius.repeat_interleave(windows)[:, None]
            factors = local.factors((each * sigma[0], each * sigma[1], each * sigma[2]))
            worst = torch.stack([f.unflatten(0, (batch, windows)).amax(1) for f in factors])
            worst[2] += lepe
            total = (worst * sigma[:, None]).sum(0)  # [B, H]
            gram = gram + torch.einsum(
                "pbh,phij->bij", total * worst / sigma[:, None].clamp_min(1e-300), squares
            )
        norm_of_heads = torch.linalg.eigvalsh(torch.as_tensor(gram))[:, -1].clamp_min(0.0).sqrt()
        return radius * (straight + behind * norm_of_heads)

    return norm(residual(x)), growth


def _linear(constant: Tensor) -> Growth:
    return lambda radius: constant * radius


def _merging(module: Any, x: Tensor) -> tuple[Tensor, Growth]:
    """Carry a ball through the joining of 2x2 neighbors, which is linear."""
    if isinstance(module, ConvMerging):
        weight = module.conv.weight.flatten(1)
        matrix = norm_matrix(module.norm, len(weight), x.dtype) @ weight
    else:
        weight = module.reduction.weight
        matrix = weight @ norm_matrix(module.norm, weight.shape[1], x.dtype)
    return module(x), _linear(norm_above(matrix))


def growths(model: LipsFormer, images: Tensor) -> tuple[Tensor, list[Growth]]:
    """Return the features before the classifier, [B, C], and how every layer lets a ball grow.

    Args:
        model: LipsFormer on the Swin or CSwin backbone, float64, in evaluation mode.
        images: [B, 3, H, W], float64, normalized.
    """
    embed = model.patch_embed
    weight = embed.proj.weight.flatten(1)
    found = [_linear(norm_above(norm_matrix(embed.norm, len(weight), images.dtype) @ weight))]
    x = embed(images)
    for stage in model.stages:
        if isinstance(stage.downsample, (ConvMerging, PatchMerging)):
            x, growth = _merging(stage.downsample, x)
            found.append(growth)
        for block in stage.blocks:
            x, more = _block(block, x)
            found += more
    tokens = x.shape[1] * x.shape[2]
    last = norm_above(norm_matrix(model.norm, x.shape[-1], x.dtype)) / math.sqrt(tokens)
    return model.norm(x).mean((1, 2)), [*found, _linear(last)]


def _block(block: LipsFormerBlock, x: Tensor) -> tuple[Tensor, list[Growth]]:
    x, first = _conv(block.conv1, x)
    x, second = _conv(block.conv2, x)
    x, third = _attention(block.attn, block.norm1, x)
    x, fourth = _mlp(block.mlp, block.norm2, x)
    return x, [first, second, third, fourth]


@torch.no_grad()
def local_certificates(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return logits, and distances within which the predicted class of each image cannot change.

    A class j overtakes the predicted class i only if the features move by
    :math:`(z_i - z_j) / |w_i - w_j|`, where z are the logits and w the rows of the classifier. The
    distance is the largest one, found by bisection, from which the features cannot move that far.
    The arithmetic is float64 and not outward rounded.

    Args:
        model: LipsFormer on the Swin or CSwin backbone with scaled cosine attention. It is copied.
        images: [B, 3, H, W], normalized.

    Returns:
        Logits [B, classes] and distances [B] in the 2-norm of the normalized images, float64.

    Raises:
        UnknownModuleError: If a part of the model is not covered by the proof.

    Example:
        >>> import timm
        >>> from lipsformer.analysis.local_certificates import local_certificates
        >>> model = timm.create_model("lipsformer_swin_nano", num_classes=5)
        >>> logits, distances = local_certificates(model, torch.zeros(1, 3, 32, 32))
        >>> bool(distances[0] >= 0)
        True
    """
    if not isinstance(model, (LipsFormerSwin, LipsFormerCSwin)):
        raise UnknownModuleError(f"no local bound is known for {type(model).__name__}")
    if model.head.global_pool.pool_type != "avg" or not isinstance(model.head.fc, nn.Linear):
        raise UnknownModuleError("a local bound needs average pooling and a linear classifier")
    model = copy.deepcopy(model).cpu().double().eval()
    images = images.cpu().double()
    lipschitz_bound(model, Domain(size=tuple(images.shape[2:])))  # refuses what no rule covers
    features, layers = growths(model, images)
    logits = model.head.fc(features)
    return logits, _largest(layers, allowed_motion(logits, model.head.fc.weight))


def allowed_motion(logits: Tensor, weight: Tensor) -> Tensor:
    """Return how far features may move until another class can have the largest logit, [B].

    Args:
        logits: [B, classes].
        weight: Rows of the classifier, [classes, C].
    """
    best, predicted = logits.max(1)
    apart = torch.cdist(weight, weight)[predicted]
    ratio = (best[:, None] - logits) / apart
    return ratio.scatter(1, predicted[:, None], math.inf).amin(1).nan_to_num(0.0)


def _largest(layers: list[Growth], allowed: Tensor) -> Tensor:
    """Return the largest radius of images, [B], whose features move by less than `allowed`."""

    def moved(radius: Tensor) -> Tensor:
        for growth in layers:
            radius = growth(radius)
        return radius

    tiny = torch.full_like(allowed, 1e-100)
    high = allowed / (moved(tiny) / tiny)  # growth is superlinear, so this is never exceeded
    for _ in range(HALVINGS):
        holds = moved(high / 2.0) < allowed
        if holds.all():
            break
        high = torch.where(holds, high, high / 2.0)
    low = torch.where(moved(high / 2.0) < allowed, high / 2.0, 0.0)
    for _ in range(DIGITS):
        middle = 0.5 * (low + high)
        holds = moved(middle) < allowed
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return low
