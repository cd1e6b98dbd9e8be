"""Write a report of one or several runs: `python -m scripts.report RUN [RUN ...]`.

    python -m scripts.report outputs/demo                       writes outputs/demo/report.html
    python -m scripts.report outputs/a outputs/b --out ab.html  two runs side by side
    python -m scripts.report outputs/demo --markdown story      writes story/report.md and PNGs

RUN is the output folder of a run of train.py, which need not have ended. The page is one file that
loads nothing from elsewhere. Mistakes and attention maps need the checkpoint and the validation
data of the run; without them the report says what is missing. Exit code 2 for a mistake.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from lipsformer._commands import documented_parser, user_errors
from lipsformer._errors import ConfigError
from lipsformer.engine.run_files import REPORT
from lipsformer.engine.run_folder import WHICH, WHICH_HELP
from scripts.reporting.write import IMAGES, write_report


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("--out", type=Path, help="HTML file; default: report.html in the run")
    parser.add_argument("--markdown", type=Path, metavar="FOLDER", help="also as Markdown, there")
    parser.add_argument(
        "--images", type=int, default=IMAGES, help="validation images to evaluate, at most"
    )
    parser.add_argument("--weights", choices=WHICH, default="best", help=WHICH_HELP)
    return parser


@user_errors(ConfigError)
def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = parser or make_parser()
    args = parser.parse_intermixed_args(argv)
    if args.out is None and len(args.runs) > 1:
        parser.error("several runs: name the file of the report with --out")
    out = args.out or args.runs[0] / REPORT
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("lipsformer").setLevel(logging.INFO)
    written = write_report(
        args.runs,
        out,
        markdown=args.markdown,
        images=args.images,
        weights=args.weights,
    )
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
