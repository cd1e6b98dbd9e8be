"""Write checkpoints that survive killed processes, full disks and flipped bits.

A checkpoint is a folder `update-<number>` with tensors as safetensors and everything else as JSON;
nothing is pickled. It is written under a temporary name, flushed to disk, sealed by a manifest of
sizes and SHA-256 sums, and renamed. Older checkpoints are removed only after that. A checkpoint
holds no random state, because there is none: order, augmentation, mixing, drop path and dropout are
functions of the seed, the step, the micro-step and the rank. `run_folder` finds checkpoints, and
`weights` reads them.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lipsformer._files import flush
from lipsformer._renamed import renamed
from lipsformer.engine.run_files import MANIFEST, PREFIX, CheckpointError, manifest_entry
from lipsformer.engine.run_folder import Checkpoints

logger = logging.getLogger(__name__)


class CheckpointFolder(Checkpoints):
    """The checkpoints of a run that writes them.

    Args:
        path: Their folder. The first `save` creates it.
        keep: Number of the newest checkpoints to keep. The best one is always kept.

    Example:
        >>> folder = CheckpointFolder(Path("outputs/run/checkpoints"), keep=2)
        >>> folder.path_of(440).name
        'update-000000440'
    """

    def __init__(self, path: Path, *, keep: int = 1):
        super().__init__(path)
        self.keep = keep

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        texts: Mapping[str, str],
        best_step: int | None,
    ) -> Path:
        """Write a checkpoint and remove those that are no longer needed.

        Args:
            step: Number of completed steps, which gives the folder its name.
            tensors: File name -> tensors on the CPU.
            texts: File name -> content.
            best_step: The checkpoint to keep whatever its age.

        Raises:
            CheckpointError: If it cannot be written; the earlier ones are intact.
        """
        final = self.path_of(step)
        temporary, aside = self.path / f".{final.name}", self.path / f".{final.name}.old"
        try:
            shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
            temporary.mkdir(parents=True)
            for name, content in tensors.items():
                save_file(dict(content), temporary / name)
            for name, content in texts.items():
                (temporary / name).write_text(content, encoding="utf-8")
            manifest = {path.name: manifest_entry(path) for path in sorted(temporary.iterdir())}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in (*temporary.iterdir(), temporary):
                flush(path)
            # A run reaches a step twice if a signal stopped it there before the evaluation, or if
            # its checkpoint of this step was damaged and it continued an earlier one. The old one
            # is set aside, because removing its files one by one takes time. If the process is
            # killed between the two renames, `numbered` finds it there.
            if final.exists():
                shutil.rmtree(aside, ignore_errors=True)
                final.rename(aside)
            temporary.rename(final)
            flush(self.path)
            shutil.rmtree(aside, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            last = self.newest()
            raise CheckpointError(
                f"cannot write checkpoint {final}: {error}; "
                f"{f'the last good one is {last}' if last else 'there is no earlier one'}"
            ) from None
        self._prune(step, best_step)
        return final

    def _prune(self, step: int, best_step: int | None) -> None:
        """Remove unfinished checkpoints, and all others but the newest `keep` and the best one."""
        numbered = self.numbered()
        # A checkpoint numbered above `step` is damaged: the run continued an earlier one.
        current = sorted(number for number in numbered if number <= step)
        stay = {*current[-self.keep :], best_step}
        kept = {path for number, path in numbered.items() if number in stay}
        for path in sorted({*self.path.glob(f".{PREFIX}*"), *numbered.values()} - kept):
            try:
                # Hidden first: a folder that is removed only in part must not look like a damaged
                # checkpoint.
                hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}")
                shutil.rmtree(path.rename(hidden))
            except OSError as error:
                logger.warning("the old checkpoint %s cannot be removed: %s", path, error)


__getattr__ = renamed(__name__)
