"""The first thing that a process does in the folder of a run once it holds the lock.

It checks that nobody else has trained there meanwhile, and writes config and environment. If the
checkpoint to continue from lies in another folder, it first copies that run's files. The copied
checkpoints appear last and all at once: a start that was killed before can be repeated, because it
looks like one that found no checkpoint yet.
"""

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipsformer._configfile import dump_config
from lipsformer._errors import ConfigError
from lipsformer._files import replacing, write_atomically
from lipsformer.config import Config
from lipsformer.engine.checkpoint import CheckpointFolder
from lipsformer.engine.run_files import CONFIG, ENVIRONMENT, EXIT, METRICS, SKIPPED, find_fault
from lipsformer.engine.run_folder import RunFolder, as_best

logger = logging.getLogger(__name__)


@dataclass
class Claim:
    """The claim of one process on the folder of a run.

    Attributes:
        folder: The folder of the run.
        checkpoints: Its checkpoints.
        step: Number of completed steps.
        metrics_bytes: Length of metrics.jsonl after these steps; `bring` sets it to 0 if it finds
            no records.
        best: The best evaluation so far, if there was one; `check_best` and `bring` replace it if
            its checkpoint is lost.

    Example:
        >>> import tempfile
        >>> run = RunFolder(tempfile.mkdtemp())
        >>> checkpoints = CheckpointFolder(run.path / "checkpoints")
        >>> Claim(run, checkpoints).is_elsewhere(None)
        False
    """

    folder: RunFolder
    checkpoints: CheckpointFolder
    step: int = 0
    metrics_bytes: int = 0
    best: dict[str, Any] | None = None

    def is_elsewhere(self, start: Path | None) -> bool:
        """Return whether the checkpoint to continue from lies in another folder."""
        return start is not None and start.resolve().parent != self.checkpoints.path.resolve()

    def check(self, start: Path | None) -> None:
        """Raise if another process wrote a checkpoint after this one chose where to start."""
        newest = self.checkpoints.newest()
        expected = None if start is None or self.is_elsewhere(start) else start.resolve()
        if expected != (newest and newest.resolve()):
            raise ConfigError(
                f"another process has continued {self.folder.path} meanwhile: repeat the command"
            )

    def take(
        self,
        start: Path | None,
        history: Sequence[dict[str, Any]],
        config: Config,
        entry: dict[str, Any],
    ) -> None:
        """Write the first files of a start, after `check`.

        Args:
            start: The checkpoint to continue from; None for none.
            history: The evaluations up to this checkpoint.
            config: The config of the run.
            entry: The new entry of environment.json.
        """
        copied = start if self.is_elsewhere(start) else None
        if copied is None:
            self.check_best(history)
        else:
            self.bring(copied, history)
        self.write(config, entry)
        if copied is not None:
            self.complete()

    def check_best(self, history: Sequence[dict[str, Any]]) -> None:
        """Replace the best evaluation by the best one with a checkpoint, if it has lost its own.

        Args:
            history: The evaluations up to the checkpoint that is continued.
        """
        if self.best is None:
            return
        best = self.checkpoints.path_of(self.best["update"])
        if fault := find_fault(best):
            logger.warning("the best checkpoint so far, %s, is left out: %s", best, fault)
            kept = [
                as_best(entry)
                for entry in history
                if find_fault(self.checkpoints.path_of(entry["update"])) is None
            ]
            self.best = max(kept, key=lambda found: found["top1"], default=None)

    def bring(self, start: Path, history: Sequence[dict[str, Any]]) -> None:
        """Copy a checkpoint of another folder, with the best checkpoint and the records there.

        Only the checkpoint itself must exist: it may have been moved away from its run. The copies
        stay hidden until `complete`.

        Args:
            start: The checkpoint.
            history: The evaluations up to this checkpoint.
        """
        records = start.resolve().parent.parent / METRICS
        if records.exists() and records.stat().st_size >= self.metrics_bytes:
            shutil.copy(records, self.folder.path / METRICS)
        else:
            logger.warning("%s has no records of the updates before %d", start, self.step)
            self.metrics_bytes = 0
        shutil.rmtree(self._hidden.path, ignore_errors=True)
        if self.best is not None and self.best["update"] != self.step:
            best = start.resolve().parent / self.checkpoints.path_of(self.best["update"]).name
            if fault := find_fault(best):
                logger.warning("the best checkpoint so far, %s, is left out: %s", best, fault)
                here = (as_best(entry) for entry in history if entry["update"] == self.step)
                self.best = next(here, None)
            else:
                shutil.copytree(best, self._hidden.path_of(self.best["update"]))
        shutil.copytree(start, self._hidden.path_of(self.step))

    def write(self, config: Config, entry: dict[str, Any]) -> None:
        """Write environment, config and the list of images to leave out; remove exit.json.

        Args:
            config: The config of the run.
            entry: The new entry of environment.json.
        """
        path = self.folder.path
        starts = [*self.folder.environment(), entry]
        # Before the config, with which a run exists: a repeated start reads here where it began.
        write_atomically(path / ENVIRONMENT, json.dumps(starts, indent=1))
        write_atomically(path / CONFIG, dump_config(config))
        if config.data.skip_list is not None:
            # The list may be the run's own copy, and a full disk must not cut that copy short.
            with replacing(path / SKIPPED) as temporary:
                shutil.copyfile(config.data.skip_list, temporary)
        (path / EXIT).unlink(missing_ok=True)

    def complete(self) -> None:
        """Let the checkpoints appear that `bring` has copied."""
        # What is there now holds no intact checkpoint, as `check` has found.
        shutil.rmtree(self.checkpoints.path, ignore_errors=True)
        self._hidden.path.rename(self.checkpoints.path)

    @property
    def _hidden(self) -> CheckpointFolder:
        return CheckpointFolder(self.checkpoints.path.with_name(f".{self.checkpoints.path.name}"))
