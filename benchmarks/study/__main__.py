"""Run the rows of a study, one thread a run, and keep one line of JSON for each finished run.

    python -m benchmarks.study benchmarks/studies/cifar10_choices.yaml --runs /scratch/runs
    python -m benchmarks.study benchmarks/studies/cifar10_choices.yaml --table --plot curves.png

A study is a base config and named rows of `key=value` settings. Every (row, seed) is one run of
`train.py` in its own folder below `--runs`. The queue can be stopped at any moment: the same
command continues interrupted runs exactly and skips finished ones, which are lines of the study's
JSONL file. A run that diverged is finished too, because it would diverge again. `--table` prints
the table of the finished runs and lists what was not run. A message names every finished run that
had other settings than the study has now. A second queue of the same JSONL file is refused.

Exit codes: 0 no run failed; 1 a run crashed; 2 a mistake in what was given, or in a run's settings
or data; 75 a signal stopped the queue, after the runs had been saved.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.plan import Study, stale
from benchmarks.study.pool import run
from benchmarks.study.table import plot, table
from lipsformer._checks import require
from lipsformer._commands import documented_parser, user_errors
from lipsformer._configfile import read_config


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = documented_parser(__doc__, prog="python -m benchmarks.study")
    parser.add_argument("study", type=Path, help="YAML file of the study")
    parser.add_argument("--runs", type=Path, default=Path("outputs/studies"), help="run folders")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="only these rows")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the curves")
    return parser


@user_errors(ValueError)  # a `ConfigError`, or of `read_jsonl`
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(argv)
    study = read_config(Study, options.study)
    for row, seed in study.runs():  # every config is read before the first run starts
        study.run_config(row, seed)
    unknown = sorted(set(options.only) - set(study.rows))
    require(options.workers >= 1, "--workers", options.workers, "must be >= 1")
    require(not unknown, "--only", unknown, f"must name rows: {', '.join(study.rows)}")
    for sentence in stale(study):
        print(sentence, file=sys.stderr)
    if options.plot is not None:
        plot(study, options.plot)
    if options.table:
        print(table(study))
    if options.table or options.plot is not None:
        return 0
    return run(study, options.study.stem, options.runs.resolve(), options.workers, options.only)


if __name__ == "__main__":
    sys.exit(main())
