"""Weights of all magnitudes, and random steps between them."""

import math
from typing import Any

import torch
from torch import Tensor, nn

TABLES = ("relative_position_bias_table", "pos_embed", "cls_token", "reg_token", "dist_token")


def group_of(name: str, weight: Tensor) -> str:
    """Return the name of the magnitude that a parameter takes."""
    if name.endswith(TABLES):
        return "table"
    if name.endswith("log_logit_scale"):
        return "tau"
    if name.endswith("bias"):
        return "bias"
    return "gain" if weight.ndim == 1 else "weight"


@torch.no_grad()
def fill(module: nn.Module, magnitudes: dict[str, Any]) -> None:
    """Draw every parameter at the magnitude of its group."""
    generator = torch.Generator().manual_seed(magnitudes["seed"])
    for name, parameter in module.named_parameters():
        group = group_of(name, parameter)
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        values = values * magnitudes[group]
        if group == "weight":
            values = values / math.sqrt(math.prod(parameter.shape[1:]))
        parameter.copy_(values)
    parameters = list(module.parameters())
    if magnitudes["spot"] is not None and parameters:
        index, factor = magnitudes["spot"]
        parameters[index % len(parameters)].mul_(factor)


@torch.no_grad()
def step(module: nn.Module, generator: torch.Generator) -> None:
    """Move one parameter: scale it a little or far, add noise to it, or zero some entries."""
    parameters = list(module.parameters())
    draw = torch.rand(3, generator=generator).tolist()
    parameter = parameters[int(draw[0] * len(parameters))]
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    size = parameter.abs().max().item() or 1.0
    if draw[1] < 0.2:
        parameter.mul_(1e4 if draw[2] < 0.5 else 1e-4)
    elif draw[1] < 0.4:
        parameter.mul_(10.0 ** (2.0 * draw[2] - 1.0))
    elif draw[1] < 0.8:
        parameter.add_((0.5 * size * noise).to(parameter.dtype))
    else:
        parameter.mul_((noise > noise.quantile(draw[2])).to(parameter.dtype))
