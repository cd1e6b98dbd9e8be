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

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> from lipsformer.analysis.certificates import difference_bounds
        >>> layer = torch.nn.Linear(2, 2)
        >>> layer.weight.data = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> bound = lipschitz_bound(layer, Domain(size=()))
        >>> difference_bounds(bound, num_logits=2).round(decimals=6)  # |(3, -4)| = 5
        tensor([[0., 5.],
                [5., 0.]], dtype=torch.float64)
    """
    if bound.last is None:
        largest = outward(math.sqrt(2.0) * bound.value)
        return torch.full((num_logits, num_logits), largest, dtype=torch.float64)
    last = bound.last
    _require_rows(last.weight, num_logits)
    if last.log10 == -math.inf:  # all logits are constant
        return torch.zeros(num_logits, num_logits, dtype=torch.float64)
    rounding = 2.0**-50 * (abs(bound.log10) + abs(last.log10))
    before = power_of_ten(bound.log10 - last.log10 + rounding)
    return row_distances(last.weight) * before * OUTWARD


def _require_rows(weight: Tensor, num_logits: int) -> None:
    if len(weight) != num_logits:
        raise ValueError(
            f"num_logits={num_logits}, but the bounded network has {len(weight)} logits: pass "
            f"{len(weight)}, or tell certified_radius by `outputs` which of them its logits are"
        )


def row_distances(weight: Tensor) -> Tensor:
    """Return the distances of the rows of a matrix from each other, rounded up.

    Args:
        weight: The matrix, [K, n].

    Returns:
        [K, K], float64, on the CPU.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.certificates import row_distances
        >>> row_distances(torch.tensor([[3.0, 0.0], [0.0, 4.0]])).round(decimals=6)
        tensor([[0., 5.],
                [5., 0.]], dtype=torch.float64)
    """
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

    Raises:
        ValueError: If the network has another number of logits.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> from lipsformer.analysis.certificates import difference_errors
        >>> layer = torch.nn.Linear(2, 2)
        >>> layer.weight.data = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
        >>> bound = lipschitz_bound(layer, Domain(size=(), norm=1.0, error=0.5))
        >>> difference_errors(bound, num_logits=2).round(decimals=3)  # 5 * 0.5
        tensor([[0.0000, 2.5000],
                [2.5000, 0.0000]], dtype=torch.float64)
    """
    if bound.last is None:
        largest = outward(math.sqrt(2.0) * bound.output.error)
        return torch.full((num_logits, num_logits), largest, dtype=torch.float64)
    _require_rows(bound.last.weight, num_logits)
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
        The distances, [B]; 0 for a tie, and where a logit is not finite.

    Raises:
        ValueError: If the network has another number of logits and `outputs` is None, or `outputs`
            names another number of logits than there are classes.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> from lipsformer.analysis.certificates import certified_radius
        >>> identity = lipschitz_bound(torch.nn.Identity(), Domain(size=()))
        >>> certified_radius(torch.tensor([[3.0, 1.0]]), identity)
        tensor([1.4142], dtype=torch.float64)
    """
    logits = logits.detach().double().cpu()
    num_classes = logits.shape[1]
    if outputs is not None and len(outputs) != num_classes:
        raise ValueError(f"outputs names {len(outputs)} logits for {num_classes} classes")
    chosen = slice(None) if outputs is None else list(outputs)
    if bound.last is None:
        constants = difference_bounds(bound, num_classes)
    else:
        total = num_classes if outputs is None else len(bound.last.weight)
        constants = difference_bounds(bound, total)[chosen][:, chosen]
    errors = torch.zeros_like(constants) if errors is None else errors[chosen][:, chosen]
    best = logits.argmax(1, keepdim=True)
    margins = logits.gather(1, best) - logits - errors[best.squeeze(1)] * OUTWARD
    # A distance that no other class can reach is infinite: 0 / 0 is a tie of two constant logits.
    radii = (margins.clamp_min(0.0) / constants[best.squeeze(1)] / OUTWARD).nan_to_num(
        0.0, math.inf
    )
    radii = radii.scatter(1, best, math.inf).amin(1)
    return torch.where(logits.isfinite().all(1), radii, 0.0)  # an overflow proves nothing


def real_errors(bound: Bound, num_logits: int) -> Tensor:
    """Return the allowances of the real statement, for logits that were computed in float64.

    They cover the rounding of these logits. The errors of float64 are at most 2^-28 of those of
    float32.

    Args:
        bound: Bound of the network on a domain whose `error` is known, such as `image_domain`.
        num_logits: Number K of logits of the network.

    Returns:
        The allowances of differences of logits, [K, K], float64.

    Example:
        >>> from torch import nn
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> from lipsformer.analysis.certificates import real_errors
        >>> bound = lipschitz_bound(nn.Identity(), Domain(size=(), norm=1.0, error=2.0))
        >>> f"{real_errors(bound, num_logits=3)[0, 1] * 2**28:.3f}"  # sqrt(2) * 2
        '2.828'
    """
    return difference_errors(bound, num_logits) * (FLOAT64_SHARE * OUTWARD)


def executed_errors(bound: Bound, num_logits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the allowances of the executed statement, for logits that were computed in float64.

    They cover the rounding of these logits, and also the rounding of the program, which computes
    the logits of the other images within the distance.

    Args:
        bound: As for `real_errors`; around some images it may be the one of `local_bounds`.
        num_logits: Number K of logits of the network.
        dtype: Data type of the program, float32 or float64.

    Returns:
        The allowances of differences of logits, [K, K], float64.

    Raises:
        ValueError: If the program has another data type, for which no error is proved.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> from lipsformer.analysis.certificates import executed_errors, real_errors
        >>> bound = lipschitz_bound(torch.nn.Identity(), Domain(size=(), norm=1.0, error=2.0))
        >>> executed, real = executed_errors(bound, 3, torch.float64), real_errors(bound, 3)
        >>> f"{executed[0, 1] / real[0, 1]:.3f}"  # two computations in float64 instead of one
        '2.000'
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype}: errors are proved for torch.float32 and torch.float64")
    program = FLOAT64_SHARE if dtype == torch.float64 else 1.0
    return difference_errors(bound, num_logits) * ((program + FLOAT64_SHARE) * OUTWARD)


def watch_norms(model: nn.Module) -> dict[str, list[Tensor]]:
    """Let a model collect the norms of the inputs of its layers, except for layers in branches.

    Layers inside an attention are left out too: the rule of the attention reads them itself, and
    their inputs may be windows instead of images. Every later call of the model adds its norms.

    Args:
        model: A copy of the model in float64. It keeps the hooks that collect the norms.

    Returns:
        For each name of a module, a list with the norms [B] of the inputs of every call. The name
        of the model itself is "".

    Example:
        >>> import torch
        >>> from lipsformer.analysis.certificates import watch_norms
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 5)).double()
        >>> norms = watch_norms(model)
        >>> logits = model(torch.tensor([[3.0, 4.0]]).double())
        >>> {name: f"{found[0].item():.3f}" for name, found in norms.items()}
        {'': '5.000', '0': '5.000'}
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

    The images are sorted into levels by the norms of their maps. All images of a level share a
    bound. Its constant is that of all images, and only the error of float32 is smaller.
    `lipsformer.analysis.local_certificates` has local constants.

    Args:
        model: The network, not the copy with the hooks of `watch_norms`.
        bound: Its bound on the domain of all images.
        norms: What `watch_norms` collected for the images.
        radii: Radii of the balls, in the units of the network's inputs, [B].

    Returns:
        Three results: the largest norm of the input of each module, by name; the level k of each
        image, [B], the smallest number in 1, ..., `LEVELS` for which none of its norms exceeds
        k / `LEVELS` times the largest norm of the module; and the bound around all images of a
        level, by level.

    Example:
        >>> import copy, torch
        >>> from lipsformer.analysis.bounds import Domain, lipschitz_bound
        >>> from lipsformer.analysis.certificates import local_bounds, watch_norms
        >>> model = torch.nn.Linear(2, 5)
        >>> norms = watch_norms(exact := copy.deepcopy(model).double())
        >>> logits = exact(torch.tensor([[3.0, 4.0], [0.6, 0.8]]).double())  # of norms 5 and 1
        >>> bound = lipschitz_bound(model, Domain(size=()))
        >>> local_bounds(model, bound, norms, torch.tensor([0.1, 0.1]))[1]  # 1 <= 4 / 16 * 5
        tensor([16,  4])
    """
    modules = dict(model.named_modules())
    joined = {name: torch.cat(list(values)) for name, values in norms.items()}
    # A module that is called twice has two norms for each image, and none is used.
    joined = {name: values for name, values in joined.items() if len(values) == len(radii)}
    largest = {name: values.max().item() for name, values in joined.items()}
    shares = [values / max(largest[name], 1e-300) for name, values in joined.items()]
    levels = (torch.stack(shares).amax(0) * LEVELS).ceil().clamp(1, LEVELS).long()
    bounds = {}
    for level in levels.unique().tolist():
        share, ball = outward(level / LEVELS), radii[levels == level].max().item()
        centers = {modules[name]: norm * share for name, norm in largest.items()}
        bounds[level] = lipschitz_bound(model, replace(bound.input, ball=ball, centers=centers))
    return largest, levels, bounds
