"""Tells the story of one or several runs: `python -m scripts.report RUN [RUN ...]`.

    python -m scripts.report outputs/demo                       writes outputs/demo/report.html
    python -m scripts.report outputs/a outputs/b --out ab.html  two runs side by side
    python -m scripts.report outputs/demo --markdown story      writes story/report.md and PNGs

RUN is the output folder of train.py, of a run that has ended or not. The page is one file that
loads nothing from elsewhere. Mistakes and attention maps need the run's checkpoint and validation
data; without them the report says what is missing. Exit code 2 for a mistake.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lipsformer._configfile import ConfigError
from lipsformer.engine.distributed import EXIT_USER_ERROR

IMAGES = 2000  # seconds on a GPU, and for small models on a CPU
MOST_RUNS = 6


def write_report(
    folders: Sequence[Path], out: Path, *, markdown: Path | None = None, images: int = IMAGES
) -> str:
    """Writes the report of runs.

    Args:
        folders: of the runs, at most six.
        out: the HTML file.
        markdown: folder for the Markdown form, None for none.
        images: largest number of validation images per run to look at, 0 for none.

    Returns:
        what was written, in one line.

    Raises:
        ConfigError: if a folder is not that of a run with records, or there is nothing to draw
            with.
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
    report = make_report(read_runs(folders), images)
    page = report.html()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    if markdown is not None:
        report.markdown(markdown)
    size = out.stat().st_size / 2**20
    return f"{out}  ({size:.1f} MiB, made in {time.perf_counter() - started:.1f} s)"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("--out", type=Path, help="HTML file; default: report.html in the run")
    parser.add_argument("--markdown", type=Path, metavar="FOLDER", help="also as Markdown, there")
    parser.add_argument(
        "--images", type=int, default=IMAGES, help="validation images to look at, at most"
    )
    return parser


def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    parser = parser or make_parser()
    options = parser.parse_intermixed_args(argv)
    if options.out is None and len(options.runs) > 1:
        parser.error("several runs: say with --out where the report goes")
    out = options.out or options.runs[0] / "report.html"
    try:
        print(write_report(options.runs, out, markdown=options.markdown, images=options.images))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
