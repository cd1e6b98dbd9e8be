"""A training run from its first or its next update to its last: the policy of the whole.

When to log, evaluate, save and stop is decided here and nowhere else.
"""

import json
import logging
import math
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor, nn

from lipsformer._configfile import ConfigError, dump_config, read_config
from lipsformer.config import Config, config_hash, config_identity
from lipsformer.engine import train_state
from lipsformer.engine.checkpoint import (
    CHECKPOINTS,
    MODEL,
    STATE,
    CheckpointFolder,
    find_fault,
    read_state,
    write_atomically,
)
from lipsformer.engine.distributed import environment, memory_gib, on_main
from lipsformer.engine.metrics import NonFiniteError, Window, summarise
from lipsformer.engine.plots import plot_curves
from lipsformer.engine.signals import StopRequest
from lipsformer.engine.steps import (
    BatchTransform,
    Learner,
    MicroBatch,
    SizedBatches,
    Stopwatch,
    evaluate,
    train_epoch,
)
from lipsformer.engine.tracking import METRICS, Tracking

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
REPLAY = "replay.json"
FORMAT = 1


class TrainUpdates(Protocol):
    """The training data as optimizer updates."""

    updates_per_epoch: int

    def epoch(self, epoch: int, start_update: int = 0) -> Iterable[tuple[list[MicroBatch], int]]:
        """The updates of an epoch from one of them on."""
        ...

    def indices(self, epoch: int, update: int) -> list[int]:
        """The samples of one update of an epoch."""
        ...


def find_start(config: Config, accelerator: Accelerator) -> Path | None:
    """The checkpoint to continue from; None starts at update 0. Writes nothing.

    In this order: the one that `run.resume` names; the newest intact one of `run.output_dir`.

    Raises:
        ConfigError: if the output folder belongs to another run, or the named checkpoint is none.
    """
    return on_main(accelerator, lambda: _find_start(config))


def _find_start(config: Config) -> Path | None:
    output_dir, resume = Path(config.run.output_dir), config.run.resume
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"run.output_dir={str(output_dir)!r} is a file; name a folder")
    occupied = (output_dir / CONFIG).exists()
    if occupied and resume != "auto":
        raise ConfigError(
            f"run.output_dir={str(output_dir)!r} already holds a run: continue it with "
            "run.resume=auto or name another folder"
        )
    if occupied:
        _require_same(read_config(Config, output_dir / CONFIG), config, str(output_dir))
    if resume in ("auto", "none"):
        return CheckpointFolder(output_dir / CHECKPOINTS, keep=config.run.keep).newest()
    path = Path(resume)
    if fault := find_fault(path):
        raise ConfigError(f"run.resume={resume!r} is not a usable checkpoint: {fault}")
    _require_same(read_config(Config, path / CONFIG), config, resume)
    return path


def _require_same(before: Config, now: Config, where: str) -> None:
    old, new = config_identity(before), config_identity(now)
    changed = [f"{key} {old.get(key)!r} -> {new[key]!r}" for key in new if old.get(key) != new[key]]
    if changed:
        raise ConfigError(
            f"{where} holds a run with another config ({', '.join(changed)}): "
            "set these back to continue it, or name another run.output_dir"
        )


class Run:
    """One run of a config.

    Args:
        config: of the run.
        learner: what is trained, prepared.
        train_updates: the training data.
        transform: training images to the model's input, in batches on the device.
        eval_batches: this rank's share of the validation data.
        normalize: evaluation images to the model's input.
        num_images: of the validation data.
        classes: names of the classes in the order of the labels.
        model_card: timm's config.json of the model.
        micro_batch: (samples of a micro-batch, micro-batches per update and device).
        start: the checkpoint to continue from.
        inspect: what else an evaluation finds out about the weights that it judges, by name; what
            it raises stops the run before they are saved.
    """

    def __init__(
        self,
        config: Config,
        learner: Learner,
        *,
        train_updates: TrainUpdates,
        transform: BatchTransform,
        eval_batches: SizedBatches,
        normalize: Callable[[Tensor], Tensor],
        num_images: int,
        classes: Sequence[str],
        model_card: str,
        micro_batch: tuple[int, int],
        start: Path | None,
        inspect: Callable[[nn.Module], Mapping[str, float]],
    ):
        self.config = config
        self.learner = learner
        self.accelerator = learner.accelerator
        self.train_updates = train_updates
        self.transform = transform
        self.eval_batches = eval_batches
        self.normalize = normalize
        self.num_images = num_images
        self.classes = list(classes)
        self.model_card = model_card
        self.micro_batch = micro_batch
        self.inspect = inspect
        self.output_dir = Path(config.run.output_dir)
        self.updates_per_epoch = train_updates.updates_per_epoch
        self.total_updates = config.train.epochs * self.updates_per_epoch
        self.stop = StopRequest()
        self.stopped = 0
        self.stopwatch = Stopwatch()
        self.checkpoints = CheckpointFolder(self.output_dir / CHECKPOINTS, keep=config.run.keep)
        self.window = Window(self.accelerator, max_nonfinite=config.train.max_nonfinite_updates)
        self.update = 0
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.run_id = on_main(self.accelerator, lambda: uuid.uuid4().hex[:12])
        metrics_bytes = 0 if start is None else self._load(start)
        on_main(self.accelerator, lambda: self._claim_folder(start))
        self.tracking = Tracking(
            self.accelerator,
            self.output_dir,
            run_id=self.run_id,
            update=self.update,
            next_record=(self.window.stats[0].update if self.window.stats else self.update) + 1,
            total_updates=self.total_updates,
            metrics_bytes=metrics_bytes,
        )
        self.first_update = self.update
        self.started = time.perf_counter()

    def execute(self) -> int:
        """Trains to the end, or until a signal stops it.

        Returns:
            the number of the signal; 0 at the end of the run.

        Raises:
            NonFiniteError: see `train.max_nonfinite_updates`.
            CheckpointError: if a checkpoint cannot be written.
        """
        self._introduce()
        try:
            while not self.stopped:
                epoch, position = divmod(self.update, self.updates_per_epoch)
                if position == 0 and len(self.history) < epoch:
                    self._finish_epoch(epoch)
                    continue
                if self.update == self.total_updates:
                    break
                self.stopwatch.reset()
                self.update = train_epoch(
                    self.learner,
                    self.train_updates.epoch(epoch, position),
                    first_update=self.update,
                    transform=self.transform,
                    window=self.window,
                    stopwatch=self.stopwatch,
                    after_update=self._after_update,
                )
        except NonFiniteError as error:
            if error.first is not None and self.accelerator.is_main_process:
                self._leave_replay(error.first, str(error))
            raise
        finally:
            self.tracking.close()
            if self.accelerator.is_main_process:
                plot_curves(self.output_dir)
        if self.stopped:
            logger.warning("stopped by signal %d after update %d", self.stopped, self.update)
        else:
            on_main(self.accelerator, self._summarise)
        return self.stopped

    def _after_update(self, made: int) -> bool:
        """Logs and saves when it is time; true if a signal asks to stop."""
        self.update = made
        run, epoch_ends = self.config.run, made % self.updates_per_epoch == 0
        if made % run.log_every == 0 or epoch_ends:
            self._log()
        if epoch_ends:  # here, so that an evaluation that is interrupted finds them as they are
            for instrument in self.learner.instruments:
                instrument.before_eval()
        self.stopped = self.stop.agreed()
        if self.stopped or (self._save_is_due() and not epoch_ends):
            self._save()
        return bool(self.stopped)

    def _save_is_due(self) -> bool:
        every = self.config.run.save_every_updates
        return every is not None and self.update % every == 0

    def _finish_epoch(self, epoch: int) -> None:
        figures, notes = {}, {}
        modules = {"raw": self.learner.module}
        if self.learner.ema is not None:
            modules["ema"] = self.learner.ema.module
        for kind, module in modules.items():
            result = evaluate(
                self.accelerator,
                module,
                self.eval_batches,
                normalize=self.normalize,
                num_images=self.num_images,
                interrupted=self._interrupted,
            )
            if result is None:
                self._save()
                return
            found = self.inspect(module)
            figures[kind] = {**result, **found}
            notes[kind] = "".join(f"  {name} {value:.3f}" for name, value in found.items())
        for kind, result in figures.items():
            self.tracking.record(kind, self.update, epoch, result)
            self.tracking.say(
                f"epoch {epoch}/{self.config.train.epochs}  {kind:4}  "
                f"top-1 {result['top1']:.2f} %  top-5 {result['top5']:.2f} %  "
                f"loss {result['loss']:.4f}  ({result['images']} images)"
                f"{notes[kind]}"
            )
        self.history.append({"epoch": epoch, "update": self.update, **figures})
        weights = list(figures)[-1]  # the EMA where there is one
        top1 = figures[weights]["top1"]
        better = self.best is None or top1 > self.best["top1"]
        if better:
            self.best = {"epoch": epoch, "update": self.update, "weights": weights, "top1": top1}
        ends = self.update == self.total_updates or epoch % self.config.run.save_every_epochs == 0
        if better or ends or self._save_is_due():
            self._save()

    def _interrupted(self) -> bool:
        self.stopped = self.stop.agreed()
        return bool(self.stopped)

    def _log(self) -> None:
        stats = self.window.read()
        rates = self.stopwatch.read()
        dense = [[s] for s in stats if s.update < self.config.run.dense_updates]
        rest = [s for s in stats if s.update >= self.config.run.dense_updates]
        groups = [*dense, rest] if rest else dense
        for group in groups:
            made = group[-1].update + 1
            values = summarise(group)
            if group is groups[-1]:
                values |= {**rates, "memory_gib": memory_gib(self.accelerator.device)}
            self.tracking.record("train", made, made / self.updates_per_epoch, values)
        mean = summarise(stats)
        left = (time.perf_counter() - self.started) / (self.update - self.first_update)
        self.tracking.progress(
            self.update,
            f"epoch {math.ceil(self.update / self.updates_per_epoch)}/{self.config.train.epochs}  "
            f"loss {mean.get('loss', math.nan):.4f}  lr {mean['lr']:.3g}  "
            f"grad {mean.get('grad_norm', math.nan):.3g}  {rates['images_per_s']:.0f} img/s  "
            f"data {100 * rates['data_wait']:.0f} %  "
            f"mem {memory_gib(self.accelerator.device):.2f} GiB  "
            f"eta {_duration(left * (self.total_updates - self.update))}",
        )
        self.window.clear()

    def _save(self) -> None:
        window = self.window.state()
        tensors = train_state.take(self.learner)
        for name, tensor in tensors[MODEL].items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise NonFiniteError(
                    f"{name} is not finite after update {self.update}; nothing was saved"
                )
        epoch, position = divmod(self.update, self.updates_per_epoch)
        state = {
            "format": FORMAT,
            "update": self.update,
            "epoch": epoch,
            "position": position,
            "updates_per_epoch": self.updates_per_epoch,
            "ema_updates": None if self.learner.ema is None else self.update,
            **train_state.numbers(self.learner),
            "window": window,
            "history": self.history,
            "best": self.best,
            "run_id": self.run_id,
            "metrics_bytes": self.tracking.size(),
            "world_size": self.accelerator.num_processes,
            "micro_batch": list(self.micro_batch),
            "config_hash": config_hash(self.config),
            "classes": self.classes,
        }
        on_main(
            self.accelerator,
            lambda: self.checkpoints.save(
                self.update,
                tensors=tensors,
                texts={
                    STATE: json.dumps(state, indent=1),
                    CONFIG: dump_config(self.config),
                    "config.json": self.model_card,
                },
                best_update=None if self.best is None else self.best["update"],
            ),
        )

    def _load(self, start: Path) -> int:
        """Takes up a checkpoint; returns the length of metrics.jsonl at its update."""
        state = read_state(start)
        if state["format"] != FORMAT:
            raise ConfigError(
                f"{start} has format {state['format']}; this version reads format {FORMAT}"
            )
        for name, own in {
            "classes": self.classes,
            "updates_per_epoch": self.updates_per_epoch,
        }.items():
            if state[name] != own:
                raise ConfigError(
                    f"{start} was made with other data: {name} {state[name]} there, {own} here"
                )
        self._compare_world(start, state)
        train_state.put_back(self.learner, start)
        self.update = state["update"]
        self.history = state["history"]
        self.best = state["best"]
        self.run_id = state["run_id"]
        self.window.load_state(state["window"])
        return state["metrics_bytes"]

    def _compare_world(self, start: Path, state: dict[str, Any]) -> None:
        before = (state["world_size"], *state["micro_batch"])
        now = (self.accelerator.num_processes, *self.micro_batch)
        if before == now:
            return
        text = "{} processes x {} samples x {} micro-batches".format(
            *before
        ) + " before, {} x {} x {} now".format(*now)
        if not self.config.run.allow_world_size_change:
            raise ConfigError(
                f"{start}: {text}; set run.allow_world_size_change=true to continue all the same"
            )
        logger.warning(
            "%s: the order of samples, their augmentation, the global batch and the lr stay; "
            "mixup, erasing and drop path draw differently, and sums round differently",
            text,
        )

    def _claim_folder(self, start: Path | None) -> None:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        if start is not None and start.parents[1].resolve() != self.output_dir.resolve():
            shutil.copy(start.parents[1] / METRICS, self.output_dir / METRICS)
        write_atomically(self.output_dir / CONFIG, dump_config(self.config))
        path = self.output_dir / "environment.json"
        starts = json.loads(path.read_text()) if path.exists() else []
        starts.append(
            {
                "from": str(start) if start else None,
                "update": self.update,
                **environment(self.accelerator),
                "batch": self._batch_text(),
            }
        )
        write_atomically(path, json.dumps(starts, indent=1))

    def _batch_text(self) -> str:
        samples, steps = self.micro_batch
        return (
            f"global batch {self.config.train.global_batch_size} = "
            f"{self.accelerator.num_processes} processes x {samples} x {steps} micro-batches; "
            f"lr {self.config.optim.lr:g} as stated, no scaling rule, cosine to "
            f"{self.config.schedule.min_lr:g}, warmup {self.config.schedule.warmup_epochs:g} epochs"
        )

    def _leave_replay(self, update: int, message: str) -> None:
        """Writes what `python -m scripts.replay` needs to do the update again and look inside."""
        epoch, position = divmod(update, self.updates_per_epoch)
        newest = self.checkpoints.newest()
        record = {
            "message": message,
            "update": update,
            "epoch": epoch,
            "position": position,
            "seed": self.config.train.seed,
            "samples": self.train_updates.indices(epoch, position),
            "checkpoint": None if newest is None else newest.name,
        }
        write_atomically(self.output_dir / REPLAY, json.dumps(record, indent=1))
        logger.error("python -m scripts.replay %s  finds where it began", self.output_dir)

    def _introduce(self) -> None:
        self.tracking.say(self._batch_text())
        self.tracking.say(
            f"{self.config.train.epochs} epochs x {self.updates_per_epoch} updates, "
            f"from update {self.update}; writing to {self.output_dir}"
        )

    def _summarise(self) -> None:
        assert self.best is not None
        best = CheckpointFolder(self.output_dir / CHECKPOINTS, keep=1).path_of(self.best["update"])
        summary = {
            "updates": self.update,
            "best": self.best,
            "last": self.history[-1],
            "nonfinite_updates": self.window.nonfinite_total,
        }
        write_atomically(self.output_dir / "summary.json", json.dumps(summary, indent=1))
        logger.info(
            "best: epoch %d, %s weights, top-1 %.2f %%\ncheckpoint  %s\ncurves      %s",
            self.best["epoch"],
            self.best["weights"],
            self.best["top1"],
            best,
            self.output_dir / "plots",
        )
        for name in self.config.run.trackers:
            if name == "tensorboard":
                logger.info("tensorboard %s", self.output_dir / "tensorboard")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
