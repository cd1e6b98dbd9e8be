"""The stability league: train every body at every learning rate, then make tables and plots.

    python -m benchmarks.league --runs /scratch/league --workers 2
    python -m benchmarks.league --table --plot docs/images/league

The command can be stopped at any moment: finished cells are lines of the results, and the same
command goes on with the rest. A cell that was interrupted starts again; one takes about half a
minute of one core. `--runs` holds the decoded pictures.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.league.bodies import BODIES
from benchmarks.league.cell import ROOT
from benchmarks.league.images import FOLDERS
from benchmarks.league.plan import can_choose
from benchmarks.league.plots import plot_all
from benchmarks.league.pool import run
from benchmarks.league.results import read_results
from benchmarks.league.table import page
from lipsformer._checks import require
from lipsformer._commands import documented_parser, quiet_pipe
from lipsformer._errors import ConfigError


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = documented_parser(__doc__, prog="python -m benchmarks.league")
    parser.add_argument("--runs", type=Path, default=Path("outputs/league"), help="scratch folder")
    parser.add_argument("--workers", type=int, default=1, help="cells at a time, one thread each")
    parser.add_argument("--data", nargs="+", choices=FOLDERS, default=list(FOLDERS))
    parser.add_argument("--only", nargs="+", choices=BODIES, default=[], help="only these bodies")
    results = ROOT / "benchmarks" / "results" / "league"
    parser.add_argument("--results", type=Path, default=results, help="folder of the JSON lines")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="only draw the pictures")
    return parser


@quiet_pipe()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 means that the data are missing, or what was given is wrong."""
    options = make_parser().parse_args(argv)
    try:
        require(options.workers >= 1, "--workers", options.workers, "must be >= 1")
        records = read_results(options.results)
    except ValueError as error:  # a `ConfigError`, or of `read_jsonl`
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.table:
        print(page(records))
    if options.plot is not None:
        for path in plot_all(records, options.plot):
            print(path)
    if not options.table and options.plot is None:
        enough = "cifar10" in options.data or can_choose(records)
        allowed = (
            "its bodies are chosen from the results of cifar10 without warmup and with seed 0, "
            f"which {options.results} lacks; run cifar10 too"
        )
        try:
            require(enough, "--data", " ".join(options.data), allowed)
            run(options.runs, options.results, options.workers, options.data, options.only)
        except (ConfigError, FileNotFoundError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
