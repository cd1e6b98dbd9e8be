"""Certificates: how far an input may move without changing its predicted class.

There are two statements. *Real* is about the mathematics: the class of the exact network does not
change. *Executed* is about the program: the class that the network computes in float32, or in
float64, does not change. Both follow from the bound, which is rounded outward, and from logits with
a known error.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lipsformer.analysis.bounds import Bound, lipschitz_bound
from lipsformer.analysis.bounds.rounding import (
    FLOAT64_SHARE,
    OUTWARD,
    norm_bound,
    outward,
    power_of_ten,
)
from lipsformer.layers import Linear
from lipsformer.models.lipsformer_contractive import ContractiveResidual

LEVELS = 16  # of the norms of an image, for which the error of float32 is bounded once


def difference_bounds(bound: Bound, num_logits: int) -> Tensor:
    r"""Bound the Lipschitz constants of the differences of two logits.

    If the network ends in a linear layer with the rows :math:`w_i`, after a network with the
    constant :math:`L_h`, then :math:`z_i - z_j` has the constant :math:`L_h |w_i - w_j|`. In any
    other network with the constant L it has :math:`\sqrt 2 L`.

    Args:
        bound: Bound of the map from inputs to logits.
        num_logits: K.

    Returns:
        [K, K], float64.

    Raises:
        ValueError: If the network has another number of logits.
    """
    if bound.last is None:
        largest = outward(math.sqrt(2.0) * bound.value)
        return torch.full((num_logits, num_logits), largest, dtype=torch.float64)
    log10, weight = bound.last[:2]
    if len(weight) != num_logits:
        raise ValueError(
            f"num_logits={num_logits}, but the bounded network has {len(weight)} logits: pass "
            f"{len(weight)}, or tell certified_radius by `outputs` which of them its logits are"
        )
    if log10 == -math.inf:  # all logits are constant
        return torch.zeros(num_logits, num_logits, dtype=torch.float64)
    before = power_of_ten(bound.log10 - log10 + 2.0**-50 * (abs(bound.log10) + abs(log10)))
    return row_distances(weight) * before * OUTWARD


def row_distances(weight: Tensor) -> Tensor:
    """Return the distances of the rows of a matrix, rounded up, [K, K]."""
    rows = weight.detach().double().cpu()
    return torch.stack([norm_bound(row - rows, dim=1) for row in rows])


def difference_errors(bound: Bound, num_logits: int) -> Tensor:
    r"""Bound the errors of the differences of two logits in float32.

    If the input of the last linear layer has the error e and its sums add errors :math:`\rho_i`,
    then :math:`z_i - z_j` has the error :math:`|w_i - w_j| e + \rho_i + \rho_j`. In any other
    network with the error E it has :math:`\sqrt 2 E`.

    Args:
        bound: Bound of the map from inputs to logits.
        num_logits: K.

    Returns:
        [K, K], float64.
    """
    if bound.last is None:
        largest = outward(math.sqrt(2.0) * bound.output.error)
        return torch.full((num_logits, num_logits), largest, dtype=torch.float64)
    added = bound.last.rounding.cpu()
    return (row_distances(bound.last.weight) * bound.last.error + added[:, None] + added) * OUTWARD


def certified_radius(
    logits: Tensor,
    bound: Bound,
    errors: Tensor | None = None,
    outputs: Sequence[int] | None = None,
) -> Tensor:
    r"""Return a distance, in the 2-norm, within which the predicted class cannot change.

    .. math:: \min_j (z_i - z_j - e_{ij}) / L_{ij}, \text{ rounded down}

    Here i is the predicted class, and :math:`L_{ij}` are the constants of `difference_bounds`. The
    certificate holds for inputs within the domain of the bound.

    Args:
        logits: [B, classes].
        bound: Bound of the map from inputs to logits.
        errors: Allowances for the rounding of differences of logits, [logits, logits]:
            `real_errors` or `executed_errors`. None takes the logits as exact.
        outputs: Which of the network's logits the classes are; None for all.

    Returns:
        The distances, [B]; 0 for a tie.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> identity = lipschitz_bound(torch.nn.Identity(), Domain(size=()))
        >>> certified_radius(torch.tensor([[3.0, 1.0]]), identity)
        tensor([1.4142], dtype=torch.float64)
    """
    logits = logits.detach().double().cpu()
    total = logits.shape[1] if outputs is None or bound.last is None else len(bound.last.weight)
    constants = difference_bounds(bound, total)
    errors = torch.zeros_like(constants) if errors is None else errors
    if outputs is not None and bound.last is not None:
        constants, errors = (x[list(outputs)][:, list(outputs)] for x in (constants, errors))
    best = logits.argmax(1, keepdim=True)
    margins = logits.gather(1, best) - logits - errors[best.squeeze(1)] * OUTWARD
    # A distance that no other class can reach is infinite: 0 / 0 is a tie of two constant logits.
    radii = (margins.clamp_min(0.0) / constants[best.squeeze(1)] / OUTWARD).nan_to_num(
        0.0, math.inf
    )
    return radii.scatter(1, best, math.inf).amin(1)


def real_errors(bound: Bound, num_logits: int) -> Tensor:
    """Return the allowances of the real statement, for logits that were computed in float64.

    Args:
        bound: Bound of the network on a domain whose `error` is known, such as `image_domain`.
        num_logits: K, of the network.

    Returns:
        The allowances of differences of logits, [K, K].
    """
    return difference_errors(bound, num_logits) * (FLOAT64_SHARE * OUTWARD)


def executed_errors(bound: Bound, num_logits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the allowances of the executed statement, for logits that were computed in float64.

    The logits of the other images within the distance are computed by the program.

    Args:
        bound: As for `real_errors`; around some images it may be the one of `local_bounds`.
        num_logits: K, of the network.
        dtype: Data type of the program, float32 or float64.

    Returns:
        The allowances of differences of logits, [K, K].

    Raises:
        ValueError: If the program has another data type, of which no error is proved.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype}: errors are proved for torch.float32 and torch.float64")
    program = FLOAT64_SHARE if dtype == torch.float64 else 1.0
    return difference_errors(bound, num_logits) * ((program + FLOAT64_SHARE) * OUTWARD)


def watch_norms(model: nn.Module) -> dict[str, list[Tensor]]:
    """Let a model collect the norms of the inputs of its layers, except for those in branches.

    Layers inside an attention are left out too: the rule of the attention reads them itself, and
    their inputs may be windows instead of images.

    Args:
        model: A copy of the model in float64.

    Returns:
        For each name of a module, the norms of every call, [B].
    """
    found: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        layer = isinstance(module, (nn.Linear, Linear, nn.Conv2d, ContractiveResidual))
        path = name.split(".")
        if name == "" or (layer and "branch" not in path and "attn" not in path[:-1]):
            norms = found.setdefault(name, [])
            module.register_forward_pre_hook(
                lambda _, inputs, norms=norms: norms.append(norm_bound(inputs[0].flatten(1), 1))
            )
    return found


def local_bounds(
    model: nn.Module, bound: Bound, norms: Mapping[str, Sequence[Tensor]], radii: Tensor
) -> tuple[dict[str, float], Tensor, dict[int, Bound]]:
    """Bound the network in balls around images, where its maps are shorter (theorem 33).

    Args:
        model: The network.
        bound: Its bound on the domain of all images.
        norms: What `watch_norms` collected for the images.
        radii: Radii of the balls, in the units of the network's inputs, [B].

    Returns:
        For each name of a module the largest norm of its input; for each image the level k, so that
        no norm exceeds k / `LEVELS` of these, [B]; and the bound around all images of a level.
    """
    modules, joined = dict(model.named_modules()), {k: torch.cat(list(v)) for k, v in norms.items()}
    # A module that is called twice has two norms for each image, and none is used.
    joined = {k: values for k, values in joined.items() if len(values) == len(radii)}
    largest = {name: values.max().item() for name, values in joined.items()}
    shares = [values / max(largest[name], 1e-300) for name, values in joined.items()]
    levels = (torch.stack(shares).amax(0) * LEVELS).ceil().clamp(1, LEVELS).long()
    bounds = {}
    for level in levels.unique().tolist():
        share, ball = outward(level / LEVELS), radii[levels == level].max().item()
        centers = {modules[name]: norm * share for name, norm in largest.items()}
        bounds[level] = lipschitz_bound(model, replace(bound.input, ball=ball, centers=centers))
    return largest, levels, bounds
