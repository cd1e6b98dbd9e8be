"""Write the report of one or several runs."""

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from lipsformer._errors import ConfigError
from lipsformer._files import require_writable
from lipsformer.engine.run_files import REPORT

logger = logging.getLogger("lipsformer.report")

IMAGES = 2000  # seconds on a GPU, and for small models on a CPU
MOST_RUNS = 6


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    markdown: Path | None = None,
    images: int = IMAGES,
    weights: str = "best",
) -> str:
    """Write the report of runs.

    Args:
        folders: The folders of the runs, at most six.
        out: The HTML file.
        markdown: Folder for the Markdown form; None for none.
        images: Largest number of validation images per run to evaluate; 0 for none.
        weights: Which weights to evaluate, "best" or "last".

    Returns:
        What was written, in one line.

    Raises:
        ConfigError: If a folder is not that of a run with records, a file cannot be written, or a
            package is missing.
    """
    started = time.perf_counter()
    try:
        from scripts.reporting.pages import make_report
        from scripts.reporting.runs import read_runs
    except ImportError as error:
        raise ConfigError(f"a report needs {error.name}: pip install 'lipsformer[train]'") from None
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs; a report shows at most {MOST_RUNS} side by side")
    if images < 0:
        raise ConfigError(f"--images {images} must be at least 0")
    runs = read_runs(folders)
    _prepare("--out", out)
    if markdown is not None:
        _prepare("--markdown", markdown / "report.md")
    report = make_report(runs, images, weights)
    try:
        out.write_text(report.html(), encoding="utf-8")
        if markdown is not None:
            report.markdown(markdown)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written: {error}; make room on the disk, or name another place"
        ) from None
    size = out.stat().st_size / 2**20
    return f"{out}  ({size:.1f} MiB, made in {time.perf_counter() - started:.1f} s)"


def _prepare(option: str, file: Path) -> None:
    """Make the folder of a file, and raise a `ConfigError` unless the file can be written there."""
    try:
        with contextlib.suppress(FileExistsError):  # a file, of which the last line speaks
            file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {str(file)!r} cannot be written: {error.strerror}") from None
    require_writable(option, file)


def try_report(folder: Path) -> None:
    """Write the report of a run that has ended; log a warning if that fails."""
    try:
        logger.info("report      %s", write_report([folder], folder / REPORT))
    except ConfigError as error:
        logger.warning("no report: %s", error)
    except Exception:
        again = f"lipsformer report {folder}"
        logger.warning("no report was made; %s tries again", again, exc_info=True)
