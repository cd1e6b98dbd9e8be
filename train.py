"""Train an image model.

    python train.py --config configs/demo.yaml                    digits, about 3 minutes on a CPU
    python train.py --config configs/demo.yaml optim.lr=1e-3      any setting as key=value
    python train.py --config configs/demo.yaml --dry-run          only show what would be done
    python train.py --config configs/demo.yaml --dry-run --world-size 16    the same, on 16 devices
    accelerate launch train.py --config configs/imagenet/lipsformer_tiny_100ep.yaml

The same command continues a run that was stopped.

Exit codes: 0 the run is complete; 2 a mistake in config, data or checkpoint; 3 the loss or gradient
was not finite; 4 a file of the run could not be written or read; 5 the Lipschitz bound exceeded
lipschitz.bound_limit; 75 a signal stopped the run after it was saved. With code 2 nothing was
written, unless training met an image that cannot be read.
"""

import argparse
import errno
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from data import DataError, DataWarning
from lipsformer._commands import documented_parser, plain_warnings, quiet_pipe
from lipsformer._configfile import dump_config, read_config
from lipsformer._errors import ConfigError
from lipsformer._ranks import launched_first_here, on_first_rank
from lipsformer._settings_help import describe
from lipsformer.analysis.instruments import BoundExceededError
from lipsformer.config import Config
from lipsformer.engine import distributed, exits
from lipsformer.engine.lock import FolderLostError
from lipsformer.engine.metrics import NonFiniteError
from lipsformer.engine.resume import find_start
from lipsformer.engine.run_files import CheckpointError
from lipsformer.engine.trainer import Trainer
from scripts._assemble import assemble
from scripts._dry_run import dry_run
from scripts._json_output import add_json_option, check_json_target, say, write_json
from scripts._many_ranks import predict_run, run_table
from scripts.reporting.write import try_report

EXIT_CODES = {
    ConfigError: exits.EXIT_USER_ERROR,
    DataError: exits.EXIT_USER_ERROR,
    NonFiniteError: exits.EXIT_NONFINITE,
    CheckpointError: exits.EXIT_STORAGE,
    BoundExceededError: exits.EXIT_BOUND,
}
# Errors of the disk, not of the program: full, over the quota, read-only, broken, gone.
STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


def train(config: Config) -> int:
    """Train one run, or continue the run that `run.output_dir` holds.

    `train.deterministic` changes a setting of the whole process, which is put back.

    Args:
        config: The config of the run.

    Returns:
        The exit code: 0 if the run is complete, or 75 if a signal stopped it.

    Raises:
        ConfigError: If the config, the checkpoint or the folder cannot be used.
        DataError: If images are missing or cannot be read.
        NonFiniteError: If the loss or gradient was not finite too often.
        BoundExceededError: If the Lipschitz bound exceeded `lipschitz.bound_limit`.
        CheckpointError: If a checkpoint cannot be written or read.
        RepeatedError: If the run has ended with an error that the same start would meet again.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        return _train(config)
    finally:
        torch.use_deterministic_algorithms(deterministic)


def _train(config: Config) -> int:
    accelerator = distributed.start(config)
    start = find_start(config)
    folder, settings = Path(config.run.output_dir), dump_config(config)
    name = start and start.name
    on_first_rank(lambda: exits.refuse_to_repeat(folder, config=settings, checkpoint=name))
    trainer = Trainer(config, assemble(config, accelerator, start), start)
    code, reason = None, ""
    try:
        code = exits.EXIT_STOPPED if trainer.train() else 0
    except tuple(EXIT_CODES) as error:
        if not isinstance(error, FolderLostError):  # the files are another process's now
            code, reason = exits.code_of(error, EXIT_CODES), str(error)
        raise
    finally:
        # Any rank may be the only one that met the error. An error without a code is one of the
        # program: it keeps its traceback and writes nothing.
        if code is not None and (reason or accelerator.is_main_process):
            last = trainer.checkpoints.last_name()
            exits.write_exit(folder, code, reason, config=settings, checkpoint=last)
    assert code is not None
    accelerator.state.destroy_process_group()
    if config.run.report and code == 0 and accelerator.is_main_process:
        try_report(folder)
    return code


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__, epilog=f"settings:\n\n{describe(Config)}")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show config, model, schedule and memory; no training",
    )
    ranks = parser.add_argument_group("with --dry-run")
    ranks.add_argument("--world-size", type=int, metavar="N", help="show a run on N devices")
    ranks.add_argument(
        "--shard", type=int, default=1, metavar="N", help="shard over N of them (1: DDP)"
    )
    add_json_option(ranks)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. optim.lr=1e-3")
    return parser


def _many_ranks(config: Config, args: argparse.Namespace) -> int:
    if not args.dry_run:
        raise ConfigError(f"--world-size {args.world_size} needs --dry-run")
    check_json_target(args.json)
    found = predict_run(config, args.world_size, args.shard)
    say(args.json, run_table(found))
    write_json(args.json, found)
    return 0


@quiet_pipe()
@plain_warnings()
def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line; return the exit code."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    first = launched_first_here()  # only this process of a machine prints
    logging.getLogger("lipsformer").setLevel(logging.INFO if first else logging.CRITICAL)
    if not first:
        warnings.simplefilter("ignore", DataWarning)

    def work() -> int:
        config = read_config(Config, args.config, args.overrides)
        if args.world_size is not None:
            return _many_ranks(config, args)
        if args.json is not None or args.shard != 1:
            raise ConfigError("--json and --shard need --dry-run --world-size N")
        if args.dry_run:
            text = dry_run(config)
            if first:
                print(text)
            return 0
        try:
            return train(config)
        except OSError as error:
            if error.errno not in STORAGE:
                raise
            message = f"a file of the run cannot be written or read: {error}"
            raise CheckpointError(message) from error

    return exits.run(work, EXIT_CODES)


if __name__ == "__main__":
    sys.exit(main())
