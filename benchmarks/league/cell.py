"""One cell of the league: a body trained with one optimizer, learning rate, warmup and seed."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.league.bodies import BODIES, build
from benchmarks.league.images import Images, normalize
from benchmarks.league.signals import attention_entropy, spectral_concentration
from benchmarks.machine import machine
from lipsformer._machine import commit
from lipsformer.config import OptimConfig
from lipsformer.engine.optim import make_optimizer, set_lr
from lipsformer.engine.schedule import CosineSchedule

ROOT = Path(__file__).parents[2]
BATCH_SIZE = 32
PROBED = 64  # held-out images on which the attention entropy is measured
PROBES = (0, 1, 2, 5, 10, 20, 50, 100, 200, 300, 400)  # and after the last update
STABLE_SHARE = 0.95  # of the loss of a uniform guess


@dataclass(frozen=True)
class Optimizer:
    """How an optimizer is used in the league.

    Attributes:
        usual_lr: A usual learning rate; the league tries 0.1 to 100 times as much.
        weight_decay: Weight decay, for bodies that are trained with it. Lion's rates are ten times
            smaller than AdamW's and its decay ten times larger, as its authors advise.
    """

    usual_lr: float
    weight_decay: float = 0.05


OPTIMIZERS = {
    "adamw": Optimizer(1e-3),
    "muon": Optimizer(1e-3),  # timm scales its updates to the size of AdamW's
    "nadamuon": Optimizer(1e-3),
    "lion": Optimizer(1e-4, weight_decay=0.5),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What defines a run.

    Attributes:
        data: "cifar10" or "imagenette".
        body: A key of `BODIES`.
        optimizer: A key of `OPTIMIZERS`.
        lr: Peak learning rate.
        warmup: Share of the updates in which the learning rate rises linearly.
        blocks: Number of blocks.
        seed: Of weights and order of the images.
        updates: Number of updates.
    """

    data: str
    body: str
    optimizer: str
    lr: float
    warmup: float
    seed: int
    blocks: int = 6
    updates: int = 500


def run_cell(cell: Cell, images: Images) -> dict[str, Any]:
    """Train a cell and return its line of results; stop at the first loss that is not finite.

    The learning rate falls to zero in half a cosine. No augmentation, no gradient clipping,
    float32. All cells of a seed see the same batches.
    """
    started, cpu = time.time(), time.process_time()
    torch.manual_seed(cell.seed)
    num_classes = images.num_classes
    model = build(cell.body, cell.blocks, num_classes).train()
    decay = OPTIMIZERS[cell.optimizer].weight_decay if BODIES[cell.body].weight_decay else 0.0
    losses, signals = _train(model, cell, images, decay)
    finite = math.isfinite(losses[-1])
    last = losses[-math.ceil(len(losses) / 10) :]
    final = sum(last) / len(last) if finite else None
    return {
        **asdict(cell),
        "num_classes": num_classes,
        "train_images": len(images.train),
        "held_out_images": len(images.held_out),
        "batch_size": BATCH_SIZE,
        "weight_decay": decay,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "updates_made": len(losses),
        "losses": _thin(losses),
        "final_loss": final,
        "stable": final is not None and final <= STABLE_SHARE * math.log(num_classes),
        "top1": _accuracy(model, images) if finite else 100.0 / num_classes,
        "signals": signals,
        "seconds": round(time.time() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "commit": commit(),
        "machine": machine(torch.device("cpu")),
    }


def _train(
    model: nn.Module, cell: Cell, images: Images, weight_decay: float
) -> tuple[list[float], list[dict[str, Any]]]:
    """Train a model in place; return the loss of every update, and the signals of some."""
    optim = OptimConfig(name=cell.optimizer, lr=cell.lr, weight_decay=weight_decay)
    optimizer = make_optimizer(model, optim)
    instruments = [make(model) for make in BODIES[cell.body].instruments]
    schedule = CosineSchedule(
        peak=cell.lr,
        final=0.0,
        total_steps=cell.updates,
        warmup_steps=round(cell.warmup * cell.updates),
    )
    probe = normalize(images.held_out[:: len(images.held_out) // PROBED][:PROBED])
    losses: list[float] = []
    signals = []
    for update, batch in enumerate(_batches(len(images.train), cell)):
        if update in PROBES:
            signals.append(_signals(model, probe, update))
        set_lr(optimizer, schedule(update))
        loss = F.cross_entropy(model(normalize(images.train[batch])), images.train_labels[batch])
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        loss.backward()
        for instrument in instruments:
            instrument.before_step(update)
        optimizer.step()
        try:
            for instrument in instruments:
                instrument.after_step(update)
        except torch.linalg.LinAlgError:  # of weights that are not finite
            losses.append(math.nan)
            break
    if math.isfinite(losses[-1]):
        for instrument in instruments:
            instrument.before_eval()
        signals.append(_signals(model, probe, len(losses)))
    return losses, signals


def _batches(number: int, cell: Cell) -> list[Tensor]:
    order = torch.Generator().manual_seed(cell.seed)
    found: list[Tensor] = []
    while len(found) < cell.updates:
        epoch = torch.randperm(number, generator=order).split(BATCH_SIZE)
        found += [batch for batch in epoch if len(batch) == BATCH_SIZE]
    return found[: cell.updates]


def _signals(model: nn.Module, probe: Tensor, update: int) -> dict[str, Any]:
    """Measure both signals per block; a list is empty if the model holds infinities or NaN."""
    entropy = attention_entropy(model, probe)
    finite = all(math.isfinite(value) for value in entropy)
    return {
        "update": update,
        "entropy": [round(value, 4) for value in entropy] if finite else [],
        "sec": [round(value, 4) for value in spectral_concentration(model)],
    }


def _thin(losses: list[float]) -> list[float | None]:
    """Return means over ten updates; None where one is not finite."""
    parts = [losses[i : i + 10] for i in range(0, len(losses), 10)]
    means = [sum(part) / len(part) for part in parts]
    return [round(mean, 4) if math.isfinite(mean) else None for mean in means]


@torch.no_grad()
def _accuracy(model: nn.Module, images: Images) -> float:
    """Return the accuracy on the held-out images in percent."""
    model.eval()
    parts = images.held_out.split(250)
    predictions = torch.cat([model(normalize(part)).argmax(1) for part in parts])
    return 100.0 * (predictions == images.held_out_labels).double().mean().item()
