r"""Certificates from the Jacobians around each image, for trained LipsFormers.

The product of global constants allows for the worst input of every layer at once. Here a ball
around one image is carried through the model. Inside it the model is its linear approximation at
the image, whose gradients are known exactly, plus a remainder of every layer, which its ball
bounds. The radius of the image is found by bisection. This is Theorem 26 of docs/theorems.md.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import ClassifierHead, SelectAdaptivePool2d
from timm.layers.adaptive_avgmax_pool import FastAdaptiveAvgPool
from torch import Tensor, nn

from lipsformer.analysis.bounds import (
    Domain,
    UnknownModuleError,
    lipschitz_bound,
    require_unchanged,
)
from lipsformer.analysis.bounds.layers import PASSIVE
from lipsformer.analysis.local_layers import Layer, Pooling, layers_of, written_out
from lipsformer.analysis.local_norms import jacobian_sigma_bound, probed_sigma_bound
from lipsformer.layers import Linear
from lipsformer.models.lipsformer import LipsFormer, LipsFormerStage
from lipsformer.models.lipsformer_cswin import LipsFormerCSwin
from lipsformer.models.lipsformer_swin import LipsFormerSwin

# Up to this many numbers of a map the Jacobian of a block is written out. The first such map is the
# anchor of what follows, too: norms from the image on would cost more and gain little.
MAX_WRITTEN_OUT_NUMBERS = 2048
HALVINGS, DIGITS = 80, 7  # steps of the bisection: first the power of two, then binary digits
SLACK = 1.0 - 1e-3  # for the rounding, which is not bounded: float32 in probes, else float64


@dataclass(frozen=True)
class Segment:
    """Layers in a row.

    Attributes:
        layers: The layers.
        norm: Bound of the Jacobian of all of them at the images, [B]; inf if only the product of
            their norms is known.
        prefix: Bound of the Jacobian from the anchor to their output, [B]; inf if only a product is
            known.
        anchor: Whether their input is the anchor from here on; the first anchor is the image.

    Example:
        >>> import timm
        >>> import torch
        >>> from lipsformer.analysis.local_certificates import segments
        >>> options = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
        >>> model = timm.create_model("lipsformer_swin_nano", **options).double().eval()
        >>> images = torch.zeros(1, 3, 16, 16, dtype=torch.float64)
        >>> [len(segment.layers) for segment in segments(model, images, failure=0.0)]
        [1, 4, 1, 4, 1]
    """

    layers: list[Layer]
    norm: Tensor
    prefix: Tensor
    anchor: bool


def segments(model: LipsFormer, images: Tensor, failure: float) -> list[Segment]:
    """Return the layers of a model up to the pooled features, around the images.

    Args:
        model: LipsFormer on the Swin or CSwin backbone, float64, in evaluation mode.
        images: [B, 3, H, W], float64, normalized.
        failure: Probability in [0, 1) that any norm of an image is wrong; 0 computes all norms
            without random probes.

    Returns:
        The segments in order. The output of the last one is the pooled features, [B, C].

    Example:
        >>> import timm, torch
        >>> from lipsformer.analysis.local_certificates import segments
        >>> options = {"embed_dim": 8, "depths": (1,), "num_heads": (1,)}
        >>> model = timm.create_model("lipsformer_swin_nano", **options).double().eval()
        >>> x = images = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
        >>> for layer in [y for segment in segments(model, images, 0.0) for y in segment.layers]:
        ...     x = layer.function(x)
        >>> torch.allclose(model.head.fc(x), model(images))
        True
    """
    modules = parts(model)
    singles: list[Any] = [None] * len(modules)
    if failure > 0.0:
        singles = parts(written_out(copy.deepcopy(model).float()))
    each = failure / (3 * len(modules))  # attention, the block, and the way to its output
    unknown = torch.full((len(images),), torch.inf, dtype=images.dtype)
    found: list[Segment] = []
    x = start = images
    first = 0
    for k, module in enumerate(modules):
        layers = layers_of(module, x, singles[k], each)
        norm = prefix = unknown
        small = x[0].numel() <= MAX_WRITTEN_OUT_NUMBERS
        anchor = small and not any(segment.anchor for segment in found)
        if anchor:
            first, start = k, x
        if len(layers) > 1:  # the norm of a single layer is known
            if failure > 0.0:
                norm = probed_sigma_bound(singles[k], x.float(), each).double()
            elif small:
                norm = jacobian_sigma_bound(module, x)
        if failure > 0.0 and first < k < len(modules) - 1:
            function = nn.Sequential(*singles[first : k + 1])
            prefix = probed_sigma_bound(function, start.float(), each).double()
        found.append(Segment(layers, norm, prefix, anchor))
        x = layers[-1].output
    return found


def parts(model: LipsFormer) -> list[nn.Module]:
    """Return the modules that a model applies one after the other up to the pooled features.

    Raises:
        UnknownModuleError: If the model, or a part that is taken apart here, has a subclass that
            computes something else. Such a class may have a bound rule of its own.
    """
    require_unchanged(model, LipsFormerSwin, LipsFormerCSwin)
    require_unchanged(model.stages, nn.Sequential)
    found: list[nn.Module] = [model.patch_embed]
    stages: Any = model.stages
    for stage in stages:
        require_unchanged(stage, LipsFormerStage)
        require_unchanged(stage.blocks, nn.Sequential)
        if type(stage.downsample) is not nn.Identity:
            found.append(stage.downsample)
        found += stage.blocks
    return [*found, Pooling(model.norm)]


def gradients(layers: list[Layer], images: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
    """Return logits, and the lengths of the gradients of their differences.

    Args:
        layers: All layers up to the pooled features.
        images: [B, 3, H, W].
        head: The classifier.

    Returns:
        Logits [B, K], and the lengths [layers + 1, B, K] of the gradients of z_i - z_j with respect
        to the input of every layer and to the features, where i is the predicted class.
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
        of_predicted = each[torch.arange(len(each)), predicted]
        lengths.append((of_predicted[:, None] - each).norm(dim=2))
    return logits.detach(), torch.stack(lengths)


def balls(segments: list[Segment], radius: Tensor) -> tuple[Tensor, Tensor]:
    """Carry balls around the images through all layers.

    Args:
        segments: The layers, as `segments` returns them.
        radius: Radius of the ball around each image, [B], float64, at least 0.

    Returns:
        Radii of the balls of the inputs of every layer and of the features, [layers + 1, B], and
        bounds of the remainders of every layer, [layers, B].

    Example:
        >>> import torch
        >>> from lipsformer.analysis.local_certificates import Segment, balls
        >>> from lipsformer.analysis.local_layers import linear_layer
        >>> matrix, x = torch.diag(torch.tensor([3.0, 2.0])).double(), torch.ones(1, 2).double()
        >>> layer = linear_layer(lambda x: x @ matrix, x, matrix)
        >>> inf, radius = torch.tensor([torch.inf]).double(), torch.tensor([0.5]).double()
        >>> radii, remainders = balls([Segment([layer], inf, inf, anchor=True)], radius)
        >>> radii.flatten().round(decimals=3), remainders.flatten()  # 3 * 0.5, and it is linear
        (tensor([0.5000, 1.5000], dtype=torch.float64), tensor([0.], dtype=torch.float64))
    """
    first = radius
    radii, remainders = [radius], []
    error = torch.zeros_like(radius)  # of the linear approximation from the anchor on
    for segment in segments:
        if segment.anchor:
            first, error = radius, torch.zeros_like(radius)
        start, steep, center = radius, torch.ones_like(radius), torch.ones_like(radius)
        from_before, within = error, torch.zeros_like(radius)
        for layer in segment.layers:
            drift = layer.drift(radius)
            remainders.append(radius * torch.minimum(drift, layer.norm + layer.widest))
            within = layer.norm * within + remainders[-1]
            steep, center = steep * (layer.norm + drift), center * layer.norm
            radius = radius * torch.minimum(layer.norm + drift, layer.widest)
            radii.append(radius)
        error = torch.minimum(segment.norm, center) * from_before + within
        through = start * (segment.norm + (steep - center))
        radius = torch.minimum(torch.minimum(radius, through), segment.prefix * first + error)
        radii[-1] = radius
    return torch.stack(radii), torch.stack(remainders)


def losses(lengths: Tensor, radii: Tensor, remainders: Tensor) -> Tensor:
    """Bound how far the margins can fall, by the ball of every state, [layers + 1, B, K].

    Args:
        lengths: Lengths of the gradients of the margins, [layers + 1, B, K].
        radii: Radii of the balls, [layers + 1, B].
        remainders: Bounds of the remainders of the layers, [layers, B].

    Example:
        >>> import torch
        >>> from lipsformer.analysis.local_certificates import losses
        >>> lengths, radii = torch.tensor([[[3.0]], [[2.0]]]), torch.tensor([[1.0], [2.0]])
        >>> losses(lengths, radii, remainders=torch.tensor([[0.5]])).flatten()  # 3 + 2 * 0.5, 2 * 2
        tensor([4., 4.])
    """
    behind = (lengths[1:] * remainders[..., None]).flip(0).cumsum(0).flip(0)
    behind = torch.cat((behind, torch.zeros_like(behind[:1])))  # of all layers after a state
    return lengths * radii[..., None] + behind


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def local_certificates(
    model: nn.Module, images: Tensor, failure: float = 0.0
) -> tuple[Tensor, Tensor]:
    r"""Return logits, and distances within which the predicted class of each image cannot change.

    With `failure=0` all norms are deterministic. Otherwise the norms of attention, of blocks and of
    the model up to them are bounded by random probes, which is faster and much sharper. The
    distance of an image is then wrong with at most this probability, over the draw of the probes
    and whatever the model and the image are.

    Probes are computed in float32, everything else in float64. The rounding is not bounded; the
    distances are reduced by a relative 1e-3 for it.

    Args:
        model: LipsFormer on the Swin or CSwin backbone with scaled cosine attention. It is copied.
        images: [B, 3, H, W], normalized.
        failure: Probability in [0, 1) that the distance of an image is wrong, such as 1e-12.

    Returns:
        Logits [B, classes] and distances [B] in the 2-norm of the normalized images, float64.

    Raises:
        UnknownModuleError: If a part of the model is not covered by the proof.
        ValueError: If `failure` is outside [0, 1).

    Example:
        >>> import timm, torch
        >>> from lipsformer.analysis.local_certificates import local_certificates
        >>> options = {"embed_dim": 8, "depths": (1,), "num_heads": (1,), "num_classes": 5}
        >>> model = timm.create_model("lipsformer_swin_nano", **options)
        >>> logits, distances = local_certificates(model, torch.randn(1, 3, 8, 8))
        >>> bool(distances[0] > 0.0)
        True
    """
    if not 0.0 <= failure < 1.0:
        raise ValueError(f"failure={failure} must be in [0, 1)")
    if not isinstance(model, (LipsFormerSwin, LipsFormerCSwin)):
        raise UnknownModuleError(f"no local bound is known for {type(model).__name__}")
    if model.head.global_pool.pool_type != "avg" or not isinstance(model.head.fc, nn.Linear):
        raise UnknownModuleError("a local bound needs average pooling and a linear classifier")
    require_unchanged(model.head, ClassifierHead)
    require_unchanged(model.head.global_pool, SelectAdaptivePool2d)
    require_unchanged(model.head.global_pool.pool, FastAdaptiveAvgPool)
    require_unchanged(model.head.fc, nn.Linear, Linear)
    require_unchanged(model.head.drop, *PASSIVE)
    model = copy.deepcopy(model).cpu().double().eval()
    images = images.cpu().double()
    lipschitz_bound(model, Domain(size=tuple(images.shape[2:])))  # refuses what no rule covers
    carried = segments(model, images, failure)
    layers = [layer for segment in carried for layer in segment.layers]
    logits, lengths = gradients(layers, images, model.head.fc)
    best, predicted = logits.max(1, keepdim=True)
    margins = best - logits
    is_predicted = torch.zeros_like(logits, dtype=torch.bool).scatter(1, predicted, True)

    def holds(radius: Tensor) -> Tensor:
        lost = losses(lengths, *balls(carried, radius)).amin(0)
        return ((lost < margins) | is_predicted).all(1)

    # No larger radius holds: the gradient at the image alone would use up a margin.
    linear = torch.where(lengths[0] > 0.0, margins / lengths[0], margins)
    return logits, SLACK * _largest(holds, linear.masked_fill(is_predicted, torch.inf).amin(1))


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
