"""Training of node classifiers: one seed at a time, early stopping, exact continuation."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import seed_everything

from .config import TrainConfig
from .diagnostics import gradient_norms, layer_profile
from .models import GraphNet

__all__ = ["NodeBatch", "evaluate", "fit", "read_lines"]


class NodeBatch(Protocol):
    """The part of PyG's ``Data`` that training reads; ``Data`` itself leaves all types open."""

    x: Tensor
    edge_index: Tensor
    y: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor

    def to(self, device: str, /) -> "NodeBatch":
        """Move to ``device``."""
        ...

    def __getitem__(self, key: str, /) -> Tensor:
        """Return the attribute ``key``."""
        ...


SPLITS = ("train", "val", "test")


@torch.no_grad()
def evaluate(model: GraphNet, batches: Iterable[NodeBatch], device: str) -> dict[str, float]:
    """Accuracy of every split and the validation loss, over all batches together."""
    model.eval()
    correct = dict.fromkeys(SPLITS, 0)
    total = dict.fromkeys(SPLITS, 0)
    val_loss = 0.0
    for batch in batches:
        batch = batch.to(device)
        logits = model(batch.x, batch.edge_index)
        hit = logits.argmax(dim=1) == batch.y
        for split in SPLITS:
            mask = batch[f"{split}_mask"]
            correct[split] += int(hit[mask].sum())
            total[split] += int(mask.sum())
        loss = F.cross_entropy(logits[batch.val_mask], batch.y[batch.val_mask], reduction="sum")
        val_loss += float(loss)
    for split in SPLITS:
        if total[split] == 0:
            raise ValueError(f"the {split} split is empty; every split needs at least one node")
    record = {f"{split}_acc": correct[split] / total[split] for split in SPLITS}
    return {**record, "val_loss": val_loss / total["val"]}


@dataclass
class _Best:
    """The best epochs so far; ``epoch`` is that of the highest validation accuracy."""

    epoch: int = -1
    val_acc: float = -1.0
    test_acc: float = 0.0
    highest_train_acc: float = 0.0  # of any epoch
    val_loss: float = math.inf  # of that epoch, which decides between equal accuracies
    lowest_loss: float = math.inf
    last_gain: int = 0

    def update(self, epoch: int, record: dict[str, float]) -> None:
        val_acc, val_loss = record["val_acc"], record["val_loss"]
        if val_acc > self.val_acc or val_loss < self.lowest_loss:
            self.last_gain = epoch
        self.lowest_loss = min(self.lowest_loss, val_loss)
        self.highest_train_acc = max(self.highest_train_acc, record["train_acc"])
        if (val_acc, -val_loss) > (self.val_acc, -self.val_loss):
            self.epoch, self.val_acc, self.val_loss = epoch, val_acc, val_loss
            self.test_acc = record["test_acc"]


def fit(
    build_model: Callable[[], GraphNet],
    train_batches: Iterable[NodeBatch],
    eval_batches: Iterable[NodeBatch],
    settings: TrainConfig,
    seed: int,
    *,
    device: str = "cpu",
    folder: Path | None = None,
    checkpoint_every: int = 100,
    on_epoch: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Train one model from one seed and report it.

    Args:
        build_model: Makes the model; called after the seed is set.
        train_batches: Graphs of one epoch; the loss is over their ``train_mask``.
        eval_batches: Graphs with the masks of all splits.
        settings: Optimisation and stopping.
        seed: Seed of everything random.
        device: Where to train.
        folder: Place for ``seed<seed>.jsonl``, one line per epoch, and the checkpoint; an
            unfinished run there is continued as if it had not been interrupted. None for neither.
        checkpoint_every: Epochs between checkpoints.
        on_epoch: Called with every epoch's record.

    Returns:
        Best epoch, its validation and test accuracy, the last epoch's test accuracy, the highest
        training accuracy of any epoch, whether the loss stopped being finite (which ends the run),
        and the time taken.
    """
    start = time.perf_counter()
    seed_everything(seed)
    model = build_model().to(device)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    scheduler = None
    if settings.plateau_patience is not None:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=settings.plateau_patience
        )
    best, epoch, record, diverged = _Best(), 0, {}, False
    checkpoint = None if folder is None else folder / f"seed{seed}.pt"
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"].cpu())
        best, record, epoch = _Best(**state["best"]), state["record"], state["epoch"]
    log = None if folder is None else folder / f"seed{seed}.jsonl"
    if log is not None:
        kept = [line for line in read_lines(log) if line["epoch"] < epoch]
        log.write_text("".join(json.dumps(line) + "\n" for line in kept))

    while epoch < settings.epochs and epoch - best.last_gain <= settings.patience:
        loss, gradient_norm = _train_epoch(model, train_batches, optimizer, settings, device)
        diverged = not (math.isfinite(loss) and math.isfinite(gradient_norm))
        if not diverged:
            record = {"epoch": epoch, "loss": loss, "gradient_norm": gradient_norm}
            record["lr"] = optimizer.param_groups[0]["lr"]
            record |= evaluate(model, eval_batches, device)
            best.update(epoch, record)
            if scheduler is not None:
                scheduler.step(record["val_loss"])
            if settings.profile_every and epoch % settings.profile_every == 0:
                training = gradient_norms(model)  # before the profile clears them
                record["profile"] = _profile(model, eval_batches, device)
                record["profile"]["training_gradient_norm"] = training
            on_epoch(record)
            if log is not None:
                with log.open("a") as stream:
                    stream.write(json.dumps(record) + "\n")
        epoch += 1
        if diverged:
            break
        if checkpoint is not None and epoch % checkpoint_every == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": None if scheduler is None else scheduler.state_dict(),
                "rng": torch.get_rng_state(),
                "best": vars(best),
                "record": record,
                "epoch": epoch,
            }
            partial = checkpoint.with_suffix(".tmp")
            torch.save(state, partial)
            os.replace(partial, checkpoint)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return {
        "seed": seed,
        "best_epoch": best.epoch,
        "val_acc": max(0.0, best.val_acc),
        "test_acc": best.test_acc,
        "last_test_acc": record.get("test_acc", 0.0),
        "highest_train_acc": best.highest_train_acc,
        "last_loss": record.get("loss"),
        "epochs": epoch,
        "diverged": diverged,
        "seconds": round(time.perf_counter() - start, 1),
    }


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; a line cut off by an interruption ends it."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _train_epoch(
    model: GraphNet,
    batches: Iterable[NodeBatch],
    optimizer: torch.optim.Optimizer,
    settings: TrainConfig,
    device: str,
) -> tuple[float, float]:
    """One pass; returns the last batch's loss and gradient norm, or the first not finite one."""
    model.train()
    loss, gradient_norm = math.nan, math.nan
    for batch in batches:
        batch = batch.to(device)
        optimizer.zero_grad(set_to_none=True)
        mask = batch.train_mask
        if not mask.any():
            continue
        value = F.cross_entropy(model(batch.x, batch.edge_index)[mask], batch.y[mask])
        value.backward()
        clip = math.inf if settings.clip_grad is None else settings.clip_grad
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        loss, gradient_norm = value.item(), norm.item()
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            break
        optimizer.step()
    return loss, gradient_norm


def _profile(model: GraphNet, batches: Iterable[NodeBatch], device: str) -> dict[str, list[float]]:
    batch = next(iter(batches)).to(device)
    return layer_profile(model, batch.x, batch.edge_index, batch.y, batch.train_mask)
