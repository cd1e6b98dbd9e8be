"""Proved Lipschitz bounds of layers, blocks, stages and whole models."""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.func import functional_call

from lipsformer.analysis import layer_bounds as layer_bounds
from lipsformer.analysis import model_bounds as model_bounds
from lipsformer.analysis import timm_bounds as timm_bounds
from lipsformer.analysis.bounds import Bound, Domain, UnknownModuleError, lipschitz_bound
from lipsformer.analysis.sigma import whole

__all__ = [
    "Bound",
    "Domain",
    "UnknownModuleError",
    "certified_radius",
    "flatten_bound",
    "gathered_bound",
    "image_domain",
    "lipschitz_bound",
]


def image_domain(size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> Domain:
    """Return the domain of normalised images with pixel values in [0, 1].

    Args:
        size: (H, W) in pixels.
        mean: Mean per channel that the normalisation subtracts.
        std: Standard deviation per channel that it divides by.
    """
    longest = [max(m, 1.0 - m) / s for m, s in zip(mean, std, strict=True)]
    return Domain(size=size, radius=math.hypot(*longest))


class _BoundOf(nn.Module):
    """A model's bound as a forward pass, which can be called with other tensors as weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, domain: Domain) -> Bound:
        return lipschitz_bound(self.model, domain)


def gathered_bound(model: nn.Module, domain: Domain) -> Bound:
    """Return the proved bound of a model that FSDP2 may have sharded; every rank must call it.

    Args:
        model: The model inside the wrappers.
        domain: The inputs.
    """
    weights = {f"model.{name}": whole(weight) for name, weight in model.named_parameters()}
    return functional_call(_BoundOf(model), weights, (domain,))


def flatten_bound(bound: Bound, name: str = "") -> Iterator[tuple[str, Bound]]:
    """Yield (module name, bound) of a bound and all its parts, parents first."""
    yield name, bound
    for part_name, part in bound.parts.items():
        yield from flatten_bound(part, f"{name}.{part_name}" if name else part_name)


def certified_radius(logits: Tensor, bound: Bound) -> Tensor:
    r"""Return how far an input may move, in the 2-norm, without changing its class.

    .. math:: (z_1 - z_2) / (\sqrt 2 L)

    with z the sorted logits: a difference of two logits has the constant :math:`\sqrt 2 L`. Valid
    for moves that stay within the domain of the bound.

    Args:
        logits: [B, classes].
        bound: Of the map from inputs to logits.

    Returns:
        [B], 0 for a tie.
    """
    best = logits.detach().double().topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]) / math.sqrt(2.0) * 10.0**-bound.log10
