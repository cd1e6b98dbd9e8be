"""AdamW and its parameter groups."""

from typing import Any

import torch
from timm.optim._param_groups import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from lipsformer.config import OptimConfig


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Groups by weight decay and, with layer decay, by depth; every parameter is in exactly one.

    Vectors, scalars and what the model lists in `no_weight_decay()` are not decayed. A group's
    `lr_scale` multiplies the scheduled learning rate.
    """
    declared = getattr(model, "no_weight_decay", None)
    exempt = declared() if declared is not None else ()
    if optim.layer_decay is None:
        return param_groups_weight_decay(model, optim.weight_decay, no_weight_decay_list=exempt)
    return param_groups_layer_decay(
        model, optim.weight_decay, no_weight_decay_list=exempt, layer_decay=optim.layer_decay
    )


def make_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the model's parameter groups, in its fused form.

    The fused form runs in few kernels, and it alone can skip a step on the device (`found_inf`).
    """
    return torch.optim.AdamW(
        parameter_groups(model, optim), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of each group to `lr` times the group's scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
