"""The tensors of a run, taken out of its wrappers and put back.

Weights, moments, EMA, and what the scaler and the instruments remember.
Names are those of the plain model, and sharded tensors are gathered, so that a checkpoint does not
know on how many devices or by which engine it was made.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lipsformer.engine.checkpoint import (
    EMA,
    INSTRUMENTS,
    MODEL,
    OPTIMIZER,
    CheckpointError,
    read_state,
)
from lipsformer.engine.optim import load_state, state_numbers, state_tensors
from lipsformer.engine.steps import Learner


def take(learner: Learner) -> dict[str, dict[str, Tensor]]:
    """File name -> tensors on the CPU. Every rank must call it: gathering shards is collective."""
    files = {
        MODEL: _on_cpu(learner.module.state_dict()),
        OPTIMIZER: _on_cpu(state_tensors(learner.module, learner.optimizer)),
    }
    if learner.ema is not None:
        files[EMA] = _on_cpu(learner.ema.module.state_dict())
    if learner.instruments:
        states = {
            f"{type(instrument).__name__}.{name}": tensor
            for instrument in learner.instruments
            for name, tensor in instrument.state_dict().items()
        }
        files[INSTRUMENTS] = _on_cpu(states)
    return files


def put_back(learner: Learner, folder: Path) -> None:
    """Fills model, optimizer, EMA, scaler and instruments from a checkpoint.

    An instrument that the checkpoint does not know starts anew: one that only watches may be added
    to a run.

    Raises:
        CheckpointError: if names or shapes are not those of this run.
    """
    _fill(learner.module.state_dict(), folder / MODEL)
    state = read_state(folder)
    moments = load_file(folder / OPTIMIZER)
    load_state(learner.module, learner.optimizer, moments, state["optimizer"])
    if learner.ema is not None:
        _fill(learner.ema.module.state_dict(), folder / EMA)
    if learner.accelerator.scaler is not None:
        learner.accelerator.scaler.load_state_dict(state["scaler"])
    if learner.instruments and (folder / INSTRUMENTS).exists():
        states = load_file(folder / INSTRUMENTS)
        for instrument in learner.instruments:
            prefix = f"{type(instrument).__name__}."
            own = {k.removeprefix(prefix): t for k, t in states.items() if k.startswith(prefix)}
            instrument.load_state_dict(own)


def numbers(learner: Learner) -> dict[str, Any]:
    """Return what `put_back` needs besides tensors: of the gradient scaler and the optimizer.

    The scaler is None unless the precision is fp16.
    """
    scaler = learner.accelerator.scaler
    return {
        "scaler": None if scaler is None else scaler.state_dict(),
        "optimizer": state_numbers(learner.module, learner.optimizer),
    }


def load_initial_weights(module: nn.Module, weights: dict[str, Tensor], origin: str) -> list[str]:
    """Starts fine-tuning: takes over all weights but those of a head of another number of classes.

    Returns:
        the names of the head's parameters that were left as initialised.

    Raises:
        CheckpointError: if anything else is missing, unknown or of another shape.
    """
    own = module.state_dict()
    heads = getattr(module, "pretrained_cfg", {}).get("classifier") or ()
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    fresh = [
        name
        for name in own
        if name.startswith(tuple(f"{head}." for head in heads))
        and name in weights
        and weights[name].shape != own[name].shape
    ]
    kept = {name: tensor for name, tensor in weights.items() if name not in fresh}
    _check({name: t for name, t in own.items() if name not in fresh}, kept, origin)
    module.load_state_dict(kept, strict=False)
    return fresh


def load_weights(module: nn.Module, weights: dict[str, Tensor], origin: str) -> None:
    """Replaces all weights of a model.

    Raises:
        CheckpointError: if any name or shape differs.
    """
    _check(module.state_dict(), weights, origin)
    module.load_state_dict(weights)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    full = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in full.items()
    }


@torch.no_grad()
def _fill(targets: dict[str, Tensor], file: Path) -> None:
    sources = load_file(file)
    _check(targets, sources, str(file))
    for name, target in targets.items():
        source = sources[name]
        if isinstance(target, DTensor):
            source = distribute_tensor(
                source.to(target.device), target.device_mesh, target.placements
            )
        target.copy_(source)


def _check(targets: dict[str, Tensor], sources: dict[str, Tensor], origin: str) -> None:
    missing = [name for name in targets if name not in sources]
    unknown = [name for name in sources if name not in targets]
    wrong = [
        f"{name} {tuple(sources[name].shape)} for {tuple(target.shape)}"
        for name, target in targets.items()
        if name in sources and sources[name].shape != target.shape
    ]
    if missing or unknown or wrong:
        raise CheckpointError(
            f"{origin} does not fit the model: {len(missing)} tensors are missing "
            f"{missing[:3]}, {len(unknown)} are unknown {unknown[:3]}, "
            f"{len(wrong)} have another shape {wrong[:3]}"
        )
