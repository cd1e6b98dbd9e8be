"""The optimizer of a run, by timm's name for it: parameter groups, state, learning rate."""

import inspect
from dataclasses import replace
from typing import Any

import torch
from timm.optim import Muon, create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.optim._param_groups import param_groups_layer_decay, param_groups_weight_decay
from timm.optim.kron import Kron
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lipsformer._errors import ConfigError, first_line
from lipsformer._sharding import distribute_like, full_tensor
from lipsformer.config import OptimConfig

FILLED_BY_CONFIG = ("lr", "weight_decay", "betas", "eps", "momentum", "foreach", "fused")


def optimizer_names() -> list[str]:
    """Return the names of `timm.optim` that a run can use.

    These are the ones that need no other package and no second derivatives. `kron` and its
    variants need opt_einsum, `bnb*` bitsandbytes, `fused*` apex and a GPU.

    Example:
        >>> "muon" in optimizer_names(), "adahessian" in optimizer_names()
        (True, False)
    """
    infos = [get_optimizer_info(str(name)) for name in list_optimizers()]
    return [
        info.name
        for info in infos
        if not info.second_order
        and not isinstance(info.opt_class, str)  # timm names classes of other packages by text
        and info.opt_class is not Kron
    ]


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Sort the parameters into groups by weight decay and, with layer decay, by depth.

    Vectors, scalars and what the model lists in `no_weight_decay()` are not decayed. A group's
    `lr_scale` multiplies the scheduled learning rate. The weights of residual branches have
    `residual_lr_scale` times the learning rate of the others. Optimizers that orthogonalize
    matrices (the Muon family) take only hidden ones: the model's first convolution, its classifier
    and what it lists in `no_weight_decay()` go into groups with `use_fallback`, which timm updates
    by AdamW.

    Args:
        model: Every parameter that requires a gradient is in exactly one group.
        optim: `weight_decay`, `layer_decay`, `residual_lr_scale` and `name` are read.

    Raises:
        ConfigError: If `residual_lr_scale` is set and the model has no weighted residuals.

    Example:
        >>> groups = parameter_groups(nn.Linear(3, 2), OptimConfig(lr=0.1, weight_decay=0.05))
        >>> [(group["weight_decay"], [p.shape for p in group["params"]]) for group in groups]
        [(0.0, [torch.Size([2])]), (0.05, [torch.Size([2, 3])])]
    """
    declared = getattr(model, "no_weight_decay", None)
    exempt = set() if declared is None else set(declared())
    # timm's classes do not know the parameter that `lipsformer.convert` gives them
    exempt |= {name for name, _ in model.named_parameters() if name.endswith("log_logit_scale")}
    options: dict[str, Any] = {"no_weight_decay_list": exempt}
    if get_optimizer_info(optim.name).opt_class is Muon:
        options["fallback_list"] = exempt | _ends(model)
    if optim.layer_decay is None:
        groups = param_groups_weight_decay(model, optim.weight_decay, **options)
    else:
        groups = param_groups_layer_decay(
            model, optim.weight_decay, layer_decay=optim.layer_decay, **options
        )
    return groups if optim.residual_lr_scale == 1.0 else _scale_residuals(model, groups, optim)


def _scale_residuals(
    model: nn.Module, groups: list[dict[str, Any]], optim: OptimConfig
) -> list[dict[str, Any]]:
    """Move the weights of the residual branches into groups with a learning rate of their own."""
    named = model.named_parameters()
    scales = {id(p) for name, p in named if name.rpartition(".")[2] == "residual_scale"}
    if not scales:
        raise ConfigError(
            f"optim.residual_lr_scale={optim.residual_lr_scale} has no effect, because the model "
            "has no weighted residuals: remove it"
        )
    split = []
    for group in groups:
        own = [p for p in group["params"] if id(p) in scales]
        others = [p for p in group["params"] if id(p) not in scales]
        scale = group.get("lr_scale", 1.0) * optim.residual_lr_scale
        split += [group | {"params": others}] if others else []
        split += [group | {"params": own, "lr_scale": scale}] if own else []
    return split


def _ends(model: nn.Module) -> set[str]:
    """Return patterns for the parameters of a timm model's first layer and its classifiers."""
    known = getattr(model, "pretrained_cfg", {})
    names: list[str] = []
    for key in ("first_conv", "classifier"):
        value = known.get(key) or ()
        names += [value] if isinstance(value, str) else value
    return {f"{name}.*" for name in names}


def make_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer that `optim.name` names over the model's parameter groups.

    AdamW runs in torch's fused form, which takes few kernels and can skip a step on the device.

    Args:
        model: The model whose parameters are trained.
        optim: The settings; null leaves a value at the optimizer's own default.

    Raises:
        ConfigError: If the name is unknown, needs another package, or does not take a setting.

    Example:
        >>> make_optimizer(nn.Linear(3, 2), OptimConfig(name="lion", lr=1e-4)).defaults["betas"]
        (0.9, 0.99)
    """
    names = optimizer_names()
    if optim.name not in names:
        raise ConfigError(
            f"optim.name={optim.name!r} is not an optimizer that a run can use; "
            f"choose one of {', '.join(names)}"
        )
    info = get_optimizer_info(optim.name)
    takes = {"betas": info.has_betas, "eps": info.has_eps, "momentum": info.has_momentum}
    given = {key: getattr(optim, key) for key in takes if getattr(optim, key) is not None}
    for key in given:
        if not takes[key]:
            raise ConfigError(
                f"optim.{key}={given[key]!r} has no effect with optim.name={optim.name!r}: "
                "leave it null"
            )
    if optim.betas is not None and len(optim.betas) != info.num_betas:
        raise ConfigError(
            f"optim.betas={optim.betas!r} does not fit optim.name={optim.name!r}, "
            f"which takes {info.num_betas} numbers"
        )
    for key in FILLED_BY_CONFIG:
        if key in optim.kwargs:
            raise ConfigError(f"optim.kwargs.{key} must not be set: set optim.{key} or leave it")
    for key in optim.kwargs.keys() & inspect.signature(create_optimizer_v2).parameters.keys():
        raise ConfigError(
            f"optim.kwargs.{key} has no effect: optim.weight_decay and optim.layer_decay decide "
            "how parameters are grouped"
        )
    fused = {"fused": True} if info.opt_class is torch.optim.AdamW else {}
    try:
        return create_optimizer_v2(
            parameter_groups(model, optim),  # pyright: ignore[reportArgumentType]
            opt=optim.name,
            lr=optim.lr,
            **given,
            **fused,
            **optim.kwargs,
        )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        more = f" with optim.kwargs={optim.kwargs}" if optim.kwargs else ""
        raise ConfigError(
            f"optim.name={optim.name!r} cannot be built{more}: {first_line(error)}"
        ) from error


def check_sharded(optim: OptimConfig, device: torch.device) -> None:
    """Try two updates of small weights that FSDP2 shards; every rank must call this.

    Some of timm's optimizers contain operations that sharded tensors do not have. Which ones fail
    depends on the sizes: whether the ranks get equal parts, and whether Adafactor factors a matrix.
    Some change nothing in their first update. Between the two updates the state is put back as in a
    run that continues, where a moment of another shape than its weight is not sharded.

    Args:
        optim: The settings.
        device: The device of the training.

    Raises:
        ConfigError: If the optimizer cannot update sharded weights.
    """
    plain = replace(optim, layer_decay=None, residual_lr_scale=1.0)  # these need a real model
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Flatten(), nn.Linear(5, 32), nn.Linear(32, 33))
        fully_shard(model.to(device))
        optimizer = make_optimizer(model, plain)
        try:
            for _ in range(2):
                model(torch.ones(2, 3, 2, 2, device=device)).square().sum().backward()
                optimizer.step()
                tensors = state_tensors(model, optimizer)
                full = {name: full_tensor(tensor).cpu() for name, tensor in tensors.items()}
                load_state(model, optimizer, full, state_numbers(model, optimizer))
        except Exception as error:  # torch raises whatever its operations raise
            raise ConfigError(
                f"optim.name={optim.name!r} cannot update the weights that FSDP2 shards "
                f"({first_line(error)}): train without --use_fsdp, or choose another optimizer, "
                "such as adamw or muon"
            ) from None


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer skips a step when its attribute `found_inf` is 1."""
    return bool(optimizer.defaults.get("fused"))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each group to `lr` times the group's `lr_scale`, if it has one.

    Args:
        optimizer: The optimizer, whose groups are changed in place.
        lr: The scheduled learning rate.

    Example:
        >>> groups = [{"params": [torch.zeros(1)], "lr_scale": scale} for scale in (1.0, 0.5)]
        >>> optimizer = torch.optim.SGD(groups, lr=1.0)
        >>> set_lr(optimizer, 0.1)
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.1, 0.05]
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def state_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of the optimizer's state under `<parameter>.<key>`."""
    return {
        f"{name}.{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def state_numbers(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the part of the optimizer's state that is not tensors, fit for JSON."""
    plain = (bool, int, float, type(None))
    return {
        "parameters": {
            name: {k: v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, plain)}
            for name, p in module.named_parameters()
        },
        # some optimizers count their steps in the group
        "groups": [
            {"step": torch.as_tensor(group["step"]).item()} if "step" in group else {}
            for group in optimizer.param_groups
        ],
    }


def load_state(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
) -> None:
    """Put back what `state_tensors` and `state_numbers` returned.

    Args:
        module: The model inside the wrappers; it may be sharded by FSDP2.
        optimizer: An optimizer of the same config over the parameters of `module`, which gets the
            state in place.
        tensors: What `state_tensors` returned, as full tensors on the CPU.
        numbers: What `state_numbers` returned.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    restored = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    restored["state"] = {}
    for index, parameter in enumerate(order):
        prefix = f"{names[parameter]}."
        state: dict[str, Any] = dict(numbers["parameters"][names[parameter]])
        for key in [key for key in tensors if key.startswith(prefix)]:
            value = tensors[key]
            if value.shape == parameter.shape:
                value = distribute_like(value, parameter)
            state[key.removeprefix(prefix)] = value
        if state:
            restored["state"][index] = state
    for group, saved in zip(restored["param_groups"], numbers["groups"], strict=True):
        group.update(saved)
    optimizer.load_state_dict(restored)
