"""A training run from its first or its next step to its last.

When to log, evaluate, save and stop is decided here and nowhere else.
"""

import contextlib
import json
import logging
import math
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from lipsformer import kernels
from lipsformer._configfile import dump_config
from lipsformer._errors import ConfigError
from lipsformer._files import write_atomically
from lipsformer._ranks import on_first_rank
from lipsformer.config import Config
from lipsformer.engine.checkpoint import CheckpointFolder
from lipsformer.engine.claim import Claim
from lipsformer.engine.environment import environment, memory_gib
from lipsformer.engine.evaluation import evaluate
from lipsformer.engine.lock import FolderLock
from lipsformer.engine.metrics import NonFiniteError, StepMetrics, duration, summarize
from lipsformer.engine.parts import TrainingParts
from lipsformer.engine.plots import plot_run
from lipsformer.engine.resume import FORMAT, require_same_data, require_same_world
from lipsformer.engine.run_files import (
    CHECKPOINTS,
    CONFIG,
    PLOTS,
    REPLAY,
    STATE,
    SUMMARY,
    TENSORBOARD,
    TIMM_CONFIG,
    read_state,
)
from lipsformer.engine.run_folder import RunFolder, as_best
from lipsformer.engine.signals import StopRequest
from lipsformer.engine.steps import train_epoch
from lipsformer.engine.stopwatch import Stopwatch
from lipsformer.engine.tracking import Tracking
from lipsformer.engine.writer import CheckpointWriter

logger = logging.getLogger(__name__)

# Stands in for a signal when the writer of rank 0 failed, so that all ranks stop at the same step.
# The ranks obey the largest number, and this is larger than that of any signal.
SAVE_FAILED = 1000


class Trainer:
    """Trains, evaluates and saves one run of a config.

    Creating it loads the checkpoint to continue from and claims the output folder.

    Args:
        config: The config of the run.
        parts: The objects built from the config.
        start: The checkpoint to continue from; None starts at step 0.

    Example:
        >>> import tempfile
        >>> from lipsformer._configfile import read_config
        >>> from lipsformer.engine.distributed import start
        >>> from scripts._assemble import assemble
        >>> settings = ["train.epochs=1", "train.global_batch_size=1437", "run.trackers=[]"]
        >>> small = "{embed_dim: 8, depths: [1], num_heads: [2], split_sizes: [2]}"
        >>> settings += [f"run.output_dir={tempfile.mkdtemp()}", f"model.kwargs={small}"]
        >>> config = read_config(Config, "configs/demo.yaml", settings)
        >>> trainer = Trainer(config, assemble(config, start(config), None), start=None)
        >>> trainer.train()  # 0: no signal stopped it
        0
    """

    def __init__(self, config: Config, parts: TrainingParts, start: Path | None):
        self.config = config
        self.config_text = dump_config(config)  # takes longer than the rest of a save
        self.parts = parts
        self.state = parts.state
        self.accelerator = parts.state.accelerator
        self.folder = RunFolder(config.run.output_dir)
        self.checkpoints = CheckpointFolder(self.folder.path / CHECKPOINTS, keep=config.run.keep)
        self.steps_per_epoch = parts.train_batches.updates_per_epoch
        self.total_steps = config.train.epochs * self.steps_per_epoch
        self.stopped = 0  # number of the signal that stops the run; 0 as long as there is none
        self.stopwatch = Stopwatch(self.accelerator)
        self.metrics = StepMetrics(max_nonfinite=config.train.max_nonfinite_updates)
        self.lock = FolderLock(self.folder.path)
        self.writer = CheckpointWriter(self.checkpoints, before_write=self._before_write)
        self.state.before_change = self.writer.wait_for_copy
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        # Figures of the instruments for the next evaluation, by kind of weights.
        self.eval_figures: dict[str, dict[str, float]] = {}
        self.run_id = on_first_rank(lambda: uuid.uuid4().hex[:12])
        self.stop = StopRequest()
        try:
            on_first_rank(self.lock.acquire)
            self.tracking = self._begin(start)
        except Exception:
            self.close()
            raise
        self.first_step = self.step
        self.started = time.perf_counter()

    def train(self) -> int:
        """Train to the end, or until a signal stops the run.

        Returns:
            The number of the signal; 0 at the end of the run.

        Raises:
            NonFiniteError: See `train.max_nonfinite_updates`.
            CheckpointError: If a checkpoint cannot be written.
        """
        try:
            return self._train()
        finally:
            self.close()

    def _train(self) -> int:
        self.tracking.log(self._batch_text())
        self.tracking.log(
            f"{self.config.train.epochs} epochs x {self.steps_per_epoch} updates, "
            f"from update {self.step}; writing to {self.folder.path}"
        )
        try:
            while not self.stopped:
                completed_epochs, position = divmod(self.step, self.steps_per_epoch)
                # Also after a resume: the last epoch may be complete, but not evaluated.
                evaluated = self.history[-1]["epoch"] if self.history else 0
                if position == 0 and evaluated < completed_epochs and self._evaluation_is_due():
                    self._finish_epoch(completed_epochs)
                    continue
                if self.step == self.total_steps:
                    break
                self.train_epoch()
            on_first_rank(self.writer.wait)  # for the last checkpoint
        except NonFiniteError as error:
            if error.first is not None and self._owns_folder():
                self._write_replay(error.first, str(error))
            raise
        finally:
            self.tracking.close()
            if self._owns_folder():
                plot_run(self.folder)
        if self.stopped:
            logger.warning("stopped by signal %d after update %d", self.stopped, self.step)
        else:
            on_first_rank(self._write_summary)
        return self.stopped

    def train_epoch(self) -> None:
        """Train on the rest of the epoch, without its evaluation, or until a signal stops it."""
        epoch, position = divmod(self.step, self.steps_per_epoch)
        self.stopwatch.reset()
        self.step = train_epoch(
            self.state,
            self.parts.train_batches.epoch(epoch, position),
            first_step=self.step,
            transform=self.parts.transform,
            metrics=self.metrics,
            stopwatch=self.stopwatch,
            after_step=self.after_step,
        )

    def after_step(self, step: int) -> bool:
        """Log and save when it is time; return whether a signal asks to stop.

        The checkpoint at the end of an evaluated epoch is saved after that, except on a signal.
        """
        self.step = step
        epoch_ends = step % self.steps_per_epoch == 0
        logs = step % self.config.run.log_every == 0 or epoch_ends
        monitored = self.parts.pending.take()
        if logs or monitored:
            on_first_rank(self.lock.check)  # another owner's records must not be mixed with these
        for completed, record in monitored:
            self.tracking.record("monitor", completed, completed / self.steps_per_epoch, record)
        if logs:
            self._log()
        if epoch_ends:
            # Once per epoch and before anything is saved: an evaluation that is repeated after an
            # interruption then sees the same weights, and the figures come from the checkpoint.
            self._prepare_eval()
        evaluates = epoch_ends and self._evaluation_is_due()
        if self._interrupted() or (self._save_is_due() and not evaluates):
            self.save()
        return bool(self.stopped)

    def _evaluation_is_due(self) -> bool:
        """Return whether the epoch that ends here is evaluated, as the last one always is."""
        every = self.config.run.eval_every_epochs
        return self.step // self.steps_per_epoch % every == 0 or self.step == self.total_steps

    def _save_is_due(self) -> bool:
        epoch, position = divmod(self.step, self.steps_per_epoch)
        every = self.config.run.save_every_updates
        ends_epoch = position == 0 and epoch % self.config.run.save_every_epochs == 0
        return ends_epoch or (every is not None and self.step % every == 0)

    def _prepare_eval(self) -> None:
        """Bring the weights into the state that is evaluated and saved."""
        self.state.agree_on_buffers()
        self.eval_figures = {kind: {} for kind in self.state.weights()}
        for module in self.state.weights().values():
            module.eval()
        for instrument in self.state.instruments:
            for kind, figures in instrument.before_eval().items():
                self.eval_figures[kind].update(figures)

    def _finish_epoch(self, epoch: int) -> None:
        """Evaluate all kinds of weights, record the figures, and save if it is time.

        A signal ends the evaluation. Its figures are dropped, and the run saves the weights.
        """
        figures: dict[str, dict[str, Any]] = {}
        for kind, module in self.state.weights().items():
            # Evaluation is short. Compiling it for its sizes of batches would take longer.
            with torch.compiler.set_stance("force_eager"):
                result = evaluate(
                    self.accelerator,
                    module,
                    self.parts.eval_batches,
                    normalize=self.parts.normalize,
                    num_images=self.parts.facts.num_eval_images,
                    interrupted=self._interrupted,
                )
            if result is None:
                self.save()
                return
            figures[kind] = {**result, **self.eval_figures[kind]}
        on_first_rank(self.lock.check)
        for kind, result in figures.items():
            self.tracking.record(kind, self.step, epoch, result)
            more = "".join(f"  {k} {v:.3f}" for k, v in self.eval_figures[kind].items())
            self.tracking.log(
                f"epoch {epoch}/{self.config.train.epochs}  {kind:4}  "
                f"top-1 {result['top1']:.2f} %  top-5 {result['top5']:.2f} %  "
                f"loss {result['loss']:.4f}  ({result['images']} images){more}"
            )
        self.history.append({"epoch": epoch, "update": self.step, **figures})
        found = as_best(self.history[-1])
        better = self.best is None or found["top1"] > self.best["top1"]
        if better:
            self.best = found
        complete = self.step == self.total_steps
        if better or complete or self._save_is_due():
            self.save()

    def _interrupted(self) -> bool:
        """Return whether a signal asks to stop; raise the error of a checkpoint that failed."""
        if self.writer.failed:
            self.stop.received = SAVE_FAILED
        self.stopped = self.stop.stop_signal()
        if self.stopped == SAVE_FAILED:
            on_first_rank(self.writer.wait)  # raises the error on every rank
        return bool(self.stopped)

    def _log(self) -> None:
        """Record the steps since the last record: the run's first one by one, others as a mean."""
        stats = self.metrics.read()
        rates = self.stopwatch.read()
        single = [[s] for s in stats if s.step < self.config.run.dense_updates]
        rest = [s for s in stats if s.step >= self.config.run.dense_updates]
        groups = [*single, rest] if rest else single
        for group in groups:
            completed = group[-1].step + 1
            values = summarize(group)
            if group is groups[-1]:
                values |= {**rates, "memory_gib": memory_gib(self.accelerator.device)}
            self.tracking.record("train", completed, completed / self.steps_per_epoch, values)
        mean = summarize(stats)
        if mean["skipped"]:
            logger.warning(
                "%d of the last %d updates were skipped, because the gradient was not finite; "
                "%d in the whole run",
                mean["skipped"],
                len(stats),
                self.metrics.nonfinite_total,
            )
        seconds_per_step = (time.perf_counter() - self.started) / (self.step - self.first_step)
        self.tracking.progress(
            self.step,
            f"epoch {math.ceil(self.step / self.steps_per_epoch)}/{self.config.train.epochs}  "
            f"loss {mean.get('loss', math.nan):.4f}  lr {mean['lr']:.3g}  "
            f"grad {mean.get('grad_norm', math.nan):.3g}  {rates['images_per_s']:.0f} img/s  "
            f"data {100 * rates['data_wait']:.0f} %  "
            f"mem {memory_gib(self.accelerator.device):.2f} GiB  "
            f"eta {duration(seconds_per_step * (self.total_steps - self.step))}",
        )
        self.metrics.clear()

    def save(self) -> None:
        """Begin a checkpoint of this step; every rank must call it."""
        on_first_rank(self.writer.wait)  # an earlier error is raised on every rank
        metrics = self.metrics.state_dict()
        self.state.agree_on_buffers()
        tensors = self.state.state_dict()
        if not self.accelerator.is_main_process:
            return
        state = {
            "format": FORMAT,
            "update": self.step,
            "updates_per_epoch": self.steps_per_epoch,
            **self.state.numbers(),
            "metrics": metrics,
            "history": self.history,
            "eval_figures": self.eval_figures,
            "best": self.best,
            "run_id": self.run_id,
            "metrics_bytes": self.tracking.size(),
            "world_size": self.accelerator.num_processes,
            "micro_batch": list(self.parts.step_share),
            **self.parts.facts._asdict(),
            "kernels": kernels.verdicts(),
        }

        self.writer.save(
            self.step,
            tensors=tensors,
            texts={
                STATE: json.dumps(state, indent=1),
                CONFIG: self.config_text,
                TIMM_CONFIG: self.parts.timm_config,
            },
            best_step=None if self.best is None else self.best["update"],
        )

    def _owns_folder(self) -> bool:
        """Return whether this process writes the files of the run, and has not lost its folder."""
        with contextlib.suppress(OSError, ConfigError):  # of a broken disk or a damaged lock
            return self.accelerator.is_main_process and self.lock.is_held()
        return False

    def _before_write(self) -> None:
        """Check the lock, and flush the records whose length the checkpoint states."""
        self.lock.check()
        self.tracking.flush()

    def _load(self, start: Path) -> int:
        """Restore a checkpoint; return the length that metrics.jsonl had at its step."""
        state = read_state(start)
        require_same_data(
            start, state, updates_per_epoch=self.steps_per_epoch, **self.parts.facts._asdict()
        )
        require_same_world(
            start,
            state,
            world_size=self.accelerator.num_processes,
            share=self.parts.step_share,
            allowed=self.config.run.allow_world_size_change,
        )
        self.state.load_checkpoint(start)
        self.step = state["update"]
        self.history = state["history"]
        self.eval_figures = state["eval_figures"]
        self.best = state["best"]
        self.run_id = state["run_id"]
        self.metrics.load_state_dict(state["metrics"])
        kernels.restore_verdicts(state.get("kernels", {}))  # older checkpoints have none
        return state["metrics_bytes"]

    def close(self) -> None:
        """Wait for the last checkpoint, put the signal handlers back and release the lock."""
        self.writer.close()
        self.stop.close()
        if self.accelerator.is_main_process:
            self.lock.release()

    def _begin(self, start: Path | None) -> Tracking:
        """Load the checkpoint, claim the output folder, and open the records."""
        claim = Claim(self.folder, self.checkpoints)
        on_first_rank(lambda: claim.check(start))  # first, because the checkpoint may be gone
        if start is not None:
            claim.metrics_bytes = self._load(start)
            claim.step, claim.best = self.step, self.best
        metrics_bytes, self.best = on_first_rank(lambda: self._claim_folder(claim, start))
        pending = self.metrics.stats
        return Tracking(
            self.accelerator,
            self.folder,
            run_id=self.run_id,
            step=self.step,
            next_record=(pending[0].step if pending else self.step) + 1,
            total_steps=self.total_steps,
            metrics_bytes=metrics_bytes,
        )

    def _claim_folder(self, claim: Claim, start: Path | None) -> tuple[int, Any]:
        """Write the first files of this start, on the main process.

        Returns:
            The length of metrics.jsonl at the checkpoint, and the best evaluation so far. Both
            differ from the checkpoint's own if files were lost; see `Claim`.
        """
        entry = {
            "from": str(start) if start else None,
            "update": self.step,
            **environment(self.accelerator),
            "batch": self._batch_text(),
        }
        claim.take(start, self.history, self.config, entry)
        return claim.metrics_bytes, claim.best

    def _batch_text(self) -> str:
        share = self.parts.step_share
        return (
            f"global batch {self.config.train.global_batch_size} = "
            f"{self.accelerator.num_processes} processes x {share.samples} x "
            f"{share.micro_batches} micro-batches; "
            f"lr {self.config.optim.lr:g} as stated, no scaling rule, cosine to "
            f"{self.config.schedule.min_lr:g}, warmup {self.config.schedule.warmup_epochs:g} epochs"
        )

    def _write_replay(self, step: int, message: str) -> None:
        """Write what `python -m scripts.replay` needs to repeat the step and look inside."""
        epoch, position = divmod(step, self.steps_per_epoch)
        self.writer.close()
        newest = self.checkpoints.newest()
        record = {
            "message": message,
            "update": step,
            "samples": self.parts.train_batches.indices(epoch, position),
            "checkpoint": None if newest is None else newest.name,
            "world_size": self.accelerator.num_processes,
            "samples_per_micro_batch": self.parts.step_share.samples,
        }
        write_atomically(self.folder.path / REPLAY, json.dumps(record, indent=1))
        logger.error("lipsformer replay %s  finds where it began", self.folder.path)

    def _write_summary(self) -> None:
        assert self.best is not None
        path = self.folder.path
        summary = {
            "updates": self.step,
            "best": self.best,
            "last": self.history[-1],
            "nonfinite_updates": self.metrics.nonfinite_total,
        }
        write_atomically(path / SUMMARY, json.dumps(summary, indent=1))
        logger.info(
            "best: epoch %d, %s weights, top-1 %.2f %%\ncheckpoint  %s\ncurves      %s",
            self.best["epoch"],
            self.best["weights"],
            self.best["top1"],
            self.checkpoints.path_of(self.best["update"]),
            path / PLOTS,
        )
        if "tensorboard" in self.config.run.trackers:
            logger.info("tensorboard %s", path / TENSORBOARD)
