r"""Certificates from the Jacobians around each image, for trained LipsFormers.

The product of global constants allows for the worst input of every layer at once. Here a ball
around one image is carried through the model. Inside it the model is its linear approximation at
the image, whose gradients are known exactly, plus a remainder of every layer, which its ball
bounds. The radius of the image is found by bisection. Theorem and proof are in docs/lipschitz.md.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipsformer.analysis.bounds import Domain, UnknownModuleError, lipschitz_bound
from lipsformer.analysis.local_layers import (
    Layer,
    block_layers,
    linear_layer,
    merging_layer,
    norm_matrix,
)
from lipsformer.analysis.local_norms import large_norm_above
from lipsformer.models.lipsformer import LipsFormer
from lipsformer.models.lipsformer_cswin import ConvMerging, LipsFormerCSwin
from lipsformer.models.lipsformer_swin import LipsFormerSwin, PatchMerging

MAX_DENSE = 2048  # numbers of a map up to which the Jacobian of a block is written out
CHUNK = 256  # columns of it at a time
HALVINGS, DIGITS = 80, 7  # steps of the bisection: first the power of two, then binary digits
SLACK = 1.0 - 1e-6  # for the rounding of float64, which is not bounded


@dataclass(frozen=True)
class Segment:
    """Layers in a row.

    Attributes:
        layers: The layers.
        norm: Bound of the Jacobian of all of them at the images, [B]; None if only the product of
            their norms is known.
    """

    layers: list[Layer]
    norm: Tensor | None = None


def jacobian_norm(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Bound the Jacobian of a function at every item of a batch, [B], by writing it out."""
    norms = []
    for item in x.split(1):
        forward = torch.func.linearize(function, item)[1]
        columns = torch.eye(item.numel(), dtype=x.dtype).reshape(-1, *item.shape)
        norms.append(large_norm_above(torch.vmap(forward, chunk_size=CHUNK)(columns).flatten(1)))
    return torch.stack(norms)


def segments(model: LipsFormer, images: Tensor) -> list[Segment]:
    """Return the layers of a model up to the pooled features, around the images.

    Args:
        model: LipsFormer on the Swin or CSwin backbone, float64, in evaluation mode.
        images: [B, 3, H, W], float64, normalized.
    """
    embed = model.patch_embed
    weight = embed.proj.weight.flatten(1)
    matrix = norm_matrix(embed.norm, len(weight), images.dtype) @ weight
    found = [Segment([linear_layer(embed, images, matrix)])]
    for stage in model.stages:
        if isinstance(stage.downsample, (ConvMerging, PatchMerging)):
            x = found[-1].layers[-1].output
            found.append(Segment([merging_layer(stage.downsample, x)]))
        for block in stage.blocks:
            x = found[-1].layers[-1].output
            dense = jacobian_norm(block, x) if x[0].numel() <= MAX_DENSE else None
            found.append(Segment(block_layers(block, x), dense))
    x = found[-1].layers[-1].output
    matrix = norm_matrix(model.norm, x.shape[-1], x.dtype) / (x.shape[1] * x.shape[2]) ** 0.5
    found.append(
        Segment([linear_layer(lambda x: model.norm(x).mean((1, 2)), x, matrix)])
    )
    return found


def gradients(layers: list[Layer], images: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return logits, and the lengths of the gradients of their differences.

    Args:
        layers: All layers up to the pooled features.
        images: [B, 3, H, W].
        head: The classifier.

    Returns:
        Logits [B, K], and the gradients [layers + 1, B, K] of z_i - z_j with respect to the input
        of every layer and to the features, where i is the predicted class.
    """
    with torch.enable_grad():
        states = [images.clone().requires_grad_()]
        for layer in layers:
            states.append(layer.function(states[-1]))
        logits = head(states[-1])
        by_class = [
            torch.autograd.grad(logits[:, j].sum(), states, retain_graph=True)
            for j in range(logits.shape[1])
        ]
    predicted = logits.argmax(1)
    lengths = []
    for state in zip(*by_class, strict=True):
        each = torch.stack(state).flatten(2).transpose(0, 1)  # [B, K, numbers]
        own = each[torch.arange(len(each)), predicted]
        lengths.append((own[:, None] - each).norm(dim=2))
    return logits.detach(), torch.stack(lengths)


def balls(segments: list[Segment], radius: Tensor) -> tuple[Tensor, Tensor]:
    """Carry the ball of inputs with a radius [B] through all layers.

    Returns:
        Radii of the balls of the inputs of every layer and of the features, [layers + 1, B], and
        bounds of the remainders of every layer, [layers, B].
    """
    radii, remainders = [radius], []
    for segment in segments:
        start, steep, center = radius, torch.ones_like(radius), torch.ones_like(radius)
        for layer in segment.layers:
            drift = layer.drift(radius)
            remainders.append(radius * torch.minimum(drift, layer.norm + layer.widest))
            steep, center = steep * (layer.norm + drift), center * layer.norm
            radius = radius * torch.minimum(layer.norm + drift, layer.widest)
            radii.append(radius)
        if segment.norm is not None:
            radius = torch.minimum(radius, start * (segment.norm + (steep - center)))
            radii[-1] = radius
    return torch.stack(radii), torch.stack(remainders)


@torch.no_grad()
def local_certificates(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return logits, and distances within which the predicted class of each image cannot change.

    The arithmetic is float64. Its rounding is not bounded; the distances are reduced by a relative
    1e-6 for it.

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
        >>> options = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "num_classes": 5}
        >>> model = timm.create_model("lipsformer_swin_nano", **options)
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
    carried = segments(model, images)
    layers = [layer for segment in carried for layer in segment.layers]
    logits, lengths = gradients(layers, images, model.head.fc)
    best, predicted = logits.max(1, keepdim=True)
    margins = best - logits
    own = torch.zeros_like(logits, dtype=torch.bool).scatter(1, predicted, True)

    def holds(radius: Tensor) -> Tensor:
        radii, remainders = balls(carried, radius)
        behind = (lengths[1:] * remainders[..., None]).flip(0).cumsum(0).flip(0)
        behind = torch.cat((behind, torch.zeros_like(behind[:1])))
        lost = (lengths * radii[..., None] + behind).amin(0)
        return ((lost < margins) | own).all(1)

    return logits, SLACK * _largest(holds, margins.masked_fill(own, torch.inf).amin(1))


def _largest(holds: Callable[[Tensor], Tensor], high: Tensor) -> Tensor:
    """Return the largest radius, [B], that holds, up to the digits of the bisection.

    Args:
        holds: Whether images keep their class within a radius.
        high: Where the search begins, [B].
    """
    for _ in range(HALVINGS):
        held = holds(high / 2.0)
        if (held | (high == 0.0)).all():
            break
        high = torch.where(held, high, high / 2.0)
    low = torch.where(holds(high / 2.0), high / 2.0, 0.0)
    for _ in range(DIGITS):
        middle = 0.5 * (low + high)
        held = holds(middle) & (low > 0.0)
        low, high = torch.where(held, middle, low), torch.where(held, high, middle)
    return low
