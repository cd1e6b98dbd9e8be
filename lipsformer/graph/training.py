"""Train node classifiers: one seed at a time, with early stopping and exact continuation."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric import seed_everything

from lipsformer._files import replacing, write_atomically
from lipsformer._ranks import gather_from_ranks, on_first_rank, rank_and_count, sum_over_ranks
from lipsformer._renamed import renamed
from lipsformer.graph.batches import SPLITS, Batches, on_device, prepare_batches
from lipsformer.graph.config import GraphTrainConfig
from lipsformer.graph.diagnostics import gradient_norms, layer_profile
from lipsformer.graph.models.stack import GraphNet
from lipsformer.jsonl import append_jsonl, read_jsonl

__all__ = ["Training", "evaluate", "fit"]


@torch.no_grad()
def evaluate(model: GraphNet, batches: Batches, device: str) -> dict[str, float]:
    """Return the accuracy of every split and the validation loss over all batches together.

    One forward pass per batch serves all splits.

    Args:
        model: The model, which is left in evaluation mode.
        batches: Graphs with the masks of all splits, `train_mask`, `val_mask` and `test_mask`.
        device: Device of the model.

    Returns:
        `train_acc`, `val_acc` and `test_acc`, each in [0, 1], and `val_loss`, the mean cross
        entropy.

    Raises:
        ValueError: If a split has no node.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lipsformer.graph.batches import SPLITS
        >>> from lipsformer.graph.models import GraphNet
        >>> from lipsformer.graph.training import evaluate
        >>> masks = {f"{split}_mask": torch.ones(2, dtype=torch.bool) for split in SPLITS}
        >>> pair, y = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 0])
        >>> graph = Data(x=torch.eye(2), edge_index=pair, y=y, **masks)
        >>> same = torch.nn.Identity()
        >>> evaluate(GraphNet(same, [], same), [graph], "cpu")["val_acc"]  # the logits are x
        0.5
    """
    model.eval()
    correct = dict.fromkeys(SPLITS, 0)
    total = dict.fromkeys(SPLITS, 0)
    val_loss = 0.0
    for batch in on_device(batches, device):
        logits = model(batch.x, batch.edges)
        hit = logits.argmax(dim=1) == batch.y
        for split, mask in batch.masks.items():
            correct[split] += int(hit[mask].sum())
            total[split] += int(mask.sum())
        mask = batch.masks["val"]
        val_loss += float(F.cross_entropy(logits[mask], batch.y[mask], reduction="sum"))
    for split in SPLITS:
        if total[split] == 0:
            raise ValueError(f"the {split} split is empty; every split needs at least one node")
    record = {f"{split}_acc": correct[split] / total[split] for split in SPLITS}
    return {**record, "val_loss": val_loss / total["val"]}


@dataclass
class _Best:
    """The best values so far.

    `epoch`, `val_acc`, `val_loss` and `test_acc` belong to the epoch with the highest validation
    accuracy; its validation loss decides between equal accuracies.
    """

    epoch: int = -1
    val_acc: float = -1.0
    test_acc: float = 0.0
    highest_train_acc: float = 0.0
    val_loss: float = math.inf
    lowest_loss: float = math.inf
    last_gain: int = 0

    def update(self, epoch: int, record: dict[str, float], stop_on: str) -> None:
        val_acc, val_loss = record["val_acc"], record["val_loss"]
        gains = {"accuracy": val_acc > self.val_acc, "loss": val_loss < self.lowest_loss}
        if any(gains.values()) if stop_on == "either" else gains[stop_on]:
            self.last_gain = epoch
        self.lowest_loss = min(self.lowest_loss, val_loss)
        self.highest_train_acc = max(self.highest_train_acc, record["train_acc"])
        if (val_acc, -val_loss) > (self.val_acc, -self.val_loss):
            self.epoch, self.val_acc, self.val_loss = epoch, val_acc, val_loss
            self.test_acc = record["test_acc"]


class Training:
    """Train one model epoch by epoch, and keep everything that one epoch hands to the next.

    Several processes that have joined a process group train together: each one computes its part
    of every step, and DDP averages the gradients.

    Args:
        model: The model, on the device.
        settings: Settings of the optimizer and of early stopping.
        device: Device of the model.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lipsformer.graph import create_model
        >>> from lipsformer.graph.batches import SPLITS
        >>> from lipsformer.graph.config import GraphTrainConfig
        >>> from lipsformer.graph.training import Training
        >>> masks = {f"{split}_mask": torch.ones(2, dtype=torch.bool) for split in SPLITS}
        >>> pair, y = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1])
        >>> graph = Data(x=torch.eye(2), edge_index=pair, y=y, **masks)
        >>> model = create_model("gcn", 2, 4, 2, num_layers=1)
        >>> training = Training(model, GraphTrainConfig(epochs=2), "cpu")
        >>> while not training.finished:
        ...     training.run_epoch([graph], [graph])
        >>> training.result()["epochs"]
        2
    """

    def __init__(self, model: GraphNet, settings: GraphTrainConfig, device: str) -> None:
        self.model = model
        self.settings = settings
        self.device = device
        self.on_cuda = torch.device(device).type == "cuda"  # dropout draws from its generator
        groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
        if settings.layer_weight_decay is not None:
            ends = [*model.encoder.parameters(), *model.head.parameters()]
            layers = list(model.layers.parameters())
            groups = [
                {"params": ends},
                {"params": layers, "weight_decay": settings.layer_weight_decay},
            ]
        self.optimizer = torch.optim.Adam(
            groups, lr=settings.lr, weight_decay=settings.weight_decay
        )
        self.scheduler = None
        if settings.plateau_patience is not None:
            self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                self.optimizer, factor=0.5, patience=settings.plateau_patience
            )
        self.best = _Best()
        self.record: dict[str, Any] = {}  # of the last epoch with a finite loss
        self.epoch = 0
        self.seconds = 0.0  # until the last checkpoint, over all processes that continued the run
        self.diverged = False
        self.rank, self.num_ranks = rank_and_count()
        self.parallel = DistributedDataParallel(model) if self.num_ranks > 1 else model

    @property
    def finished(self) -> bool:
        """Whether the training has diverged, used up its epochs or run out of patience."""
        waited = self.epoch - self.best.last_gain
        used_up = self.epoch >= self.settings.epochs or waited > self.settings.patience
        return self.diverged or used_up

    def run_epoch(self, train_batches: Batches, eval_batches: Batches) -> None:
        """Train for one epoch, evaluate, and replace `record`, unless a loss is not finite."""
        loss, gradient_norm = self.train_epoch(train_batches)
        self.diverged = not (math.isfinite(loss) and math.isfinite(gradient_norm))
        record = {"epoch": self.epoch, "loss": loss, "gradient_norm": gradient_norm}
        record["lr"] = self.optimizer.param_groups[0]["lr"]
        if not self.diverged:
            record |= on_first_rank(lambda: self._evaluate(eval_batches))
            self.diverged = not math.isfinite(record["val_loss"])
        if not self.diverged:
            self.best.update(self.epoch, record, self.settings.stop_on)
            if self.scheduler is not None:
                self.scheduler.step(record["val_loss"])
            self.record = record
        self.epoch += 1

    def train_epoch(self, batches: Batches) -> tuple[float, float]:
        """Train on every batch once, without an evaluation.

        If the loss or the gradient of a batch is not finite, the epoch ends there.

        Returns:
            The mean loss over the training nodes, and the norm of the last gradient. After a batch
            that was not finite, both are those of this batch.

        Raises:
            ValueError: If no batch has a training node.
        """
        self.model.train()
        clip = math.inf if self.settings.clip_grad is None else self.settings.clip_grad
        total, count, gradient_norm = 0.0, 0, math.nan
        for batch in on_device(batches, self.device):
            if batch.num_train == 0:
                continue
            self.optimizer.zero_grad(set_to_none=True)
            mask = batch.masks["train"]
            logits = self.parallel(batch.x, batch.edges)[mask]
            share = F.cross_entropy(logits, batch.y[mask], reduction="sum") / batch.num_train
            (share * self.num_ranks).backward()  # DDP averages, but the shares add up to the mean
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            loss, gradient_norm = sum_over_ranks(share.detach()).item(), norm.item()
            if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
                return loss, gradient_norm
            self.optimizer.step()
            total, count = total + loss * batch.num_train, count + batch.num_train
        if count == 0:
            raise ValueError("no training batch has a node to train on, so nothing can be learned")
        return total / count, gradient_norm

    def _evaluate(self, batches: Batches) -> dict[str, Any]:
        record: dict[str, Any] = evaluate(self.model, batches, self.device)
        every = self.settings.profile_every
        if every and self.epoch % every == 0:
            record["profile"] = self._profile(batches)
        return record

    def _profile(self, batches: Batches) -> dict[str, list[float]]:
        training_norms = gradient_norms(self.model)  # read now, because layer_profile clears them
        batch = next(on_device(batches, self.device))
        profile = layer_profile(self.model, batch.x, batch.edges, batch.y, batch.masks["train"])
        return {**profile, "training_gradient_norm": training_norms}

    def save(self, path: Path) -> None:
        """Write everything that an exact continuation needs, in one atomic step.

        All processes call it, and the first one writes.
        """
        rng = torch.stack(gather_from_ranks(torch.get_rng_state()))
        cuda_rng = None
        if self.on_cuda:
            cuda_rng = torch.stack(gather_from_ranks(torch.cuda.get_rng_state(self.device)))
        if self.rank > 0:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "rng": rng,
            "cuda_rng": cuda_rng,
            "best": asdict(self.best),
            "record": self.record,
            "epoch": self.epoch,
            "seconds": self.seconds,
        }
        with replacing(path) as temporary:
            torch.save(state, temporary)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint that `save` wrote, in this version or an earlier one.

        Raises:
            ValueError: If it is damaged, or if another number of processes wrote it.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            rng = state["rng"].view(-1, len(torch.get_rng_state()))
        except Exception as error:  # whatever torch and pickle raise for a damaged file
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}): delete it to train this seed anew"
            ) from error
        if len(rng) != self.num_ranks:
            raise ValueError(
                f"{path} was written by {len(rng)} processes, not {self.num_ranks}: continue with "
                f"{len(rng)}, or delete it to start anew"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(rng[self.rank].clone())  # a view is read at the wrong place
        cuda_rng = state.get("cuda_rng")  # earlier versions did not save it
        if self.on_cuda and cuda_rng is not None:
            torch.cuda.set_rng_state(cuda_rng[self.rank].clone(), self.device)
        self.best = _Best(**state["best"])
        self.record, self.epoch = state["record"], state["epoch"]
        self.seconds = state.get("seconds", 0.0)  # earlier versions did not save them

    def result(self) -> dict[str, Any]:
        """Return the outcome; see `fit`."""
        return {
            "best_epoch": self.best.epoch,
            "val_acc": max(0.0, self.best.val_acc),
            "test_acc": self.best.test_acc,
            "last_test_acc": self.record.get("test_acc", 0.0),
            "highest_train_acc": self.best.highest_train_acc,
            "last_loss": self.record.get("loss"),
            "epochs": self.epoch,
            "diverged": self.diverged,
        }


def fit(
    build_model: Callable[[], GraphNet],
    train_batches: Batches,
    eval_batches: Batches,
    settings: GraphTrainConfig,
    seed: int,
    *,
    device: str = "cpu",
    folder: Path | None = None,
    checkpoint_every: int = 100,
    on_epoch: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Train one model from one seed and return the outcome.

    If a process group is initialized, all its processes must call this function. They train one
    model together, process 0 evaluates it and writes the files, and all return the same outcome.

    Args:
        build_model: Function that creates the model; it is called after the seed is set.
        train_batches: Graphs of one epoch; the loss covers the nodes of their `train_mask`, divided
            by their `num_train` if they have one. A list of whole graphs is prepared only once, and
            a loader is iterated in every epoch. With several processes, a batch holds the part of
            this process, and its `num_train` is that of the whole step.
        eval_batches: Graphs with the masks of all splits.
        settings: Settings of the optimizer and of early stopping.
        seed: Seed of all random numbers.
        device: Device to train on.
        folder: Folder of `seed<seed>.jsonl`, which gets one line per epoch, and of the checkpoint.
            An unfinished run in this folder is continued as if it had not been interrupted. None
            writes nothing.
        checkpoint_every: Number of epochs between checkpoints.
        on_epoch: Function that is called with the record of every epoch.

    Returns:
        `seed`; `best_epoch`, the epoch with the highest validation accuracy, and its `val_acc` and
        `test_acc`; `last_test_acc` and `last_loss` of the last epoch; `highest_train_acc` of any
        epoch; `epochs`, their number; `diverged`, whether a loss or the norm of the gradient (in
        float32) stopped being finite, which ends the run; `seconds`, which for a continued run
        include those until the checkpoint.

    Raises:
        ValueError: If the checkpoint is damaged, if another number of processes wrote it, or if a
            split has no node.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from lipsformer.graph import create_model
        >>> from lipsformer.graph.batches import SPLITS
        >>> from lipsformer.graph.config import GraphTrainConfig
        >>> from lipsformer.graph.training import fit
        >>> masks = {f"{split}_mask": torch.ones(4, dtype=torch.bool) for split in SPLITS}
        >>> edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])  # two pairs, a class each
        >>> graph = Data(x=torch.eye(4), edge_index=edges, y=torch.tensor([0, 0, 1, 1]), **masks)
        >>> build = lambda: create_model("gcn", 4, 8, 2, num_layers=1)
        >>> fit(build, [graph], [graph], GraphTrainConfig(lr=0.1, epochs=20), seed=0)["test_acc"]
        1.0
    """
    start = time.perf_counter()
    seed_everything(seed)
    training = Training(build_model().to(device), settings, device)
    if training.rank > 0:
        torch.manual_seed(2**32 * training.rank + seed)  # every process draws its own dropout
    checkpoint = None if folder is None else folder / f"seed{seed}.pt"
    log = None if folder is None else folder / f"seed{seed}.jsonl"
    if checkpoint is not None and checkpoint.exists():
        training.load(checkpoint)
        start -= training.seconds
    first = training.rank == 0
    if log is not None and first:
        _drop_records(log, training.epoch)
    train_batches = prepare_batches(train_batches, training.model, device)
    eval_batches = prepare_batches(eval_batches, training.model, device)

    while not training.finished:
        training.run_epoch(train_batches, eval_batches)
        if training.diverged:
            break
        on_epoch(training.record)
        if log is not None and first:
            append_jsonl(log, training.record)
        if checkpoint is not None and training.epoch % checkpoint_every == 0:
            training.seconds = time.perf_counter() - start
            training.save(checkpoint)
    if checkpoint is not None and first:
        checkpoint.unlink(missing_ok=True)
    return {
        "seed": seed,
        **training.result(),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _drop_records(log: Path, epoch: int) -> None:
    """Remove the records from `epoch` on, which are computed again, and create the file."""
    kept = [json.dumps(record) for record in read_jsonl(log) if record["epoch"] < epoch]
    write_atomically(log, "".join(f"{line}\n" for line in kept))


__getattr__ = renamed(__name__)
