"""Serve a page on which a model classifies your pictures.

    python -m scripts.demo --checkpoint outputs/demo

The page shows the five best classes of a picture, where a block and a head attend, how the
prediction changes under noise, an estimate of the local Lipschitz constant, and how far the picture
may change: what is proved, and what an attack finds. The server listens on localhost unless --host
names another address, loads nothing from the network, and does not store uploads. It needs
`pip install 'lipsformer[train,web]'`. Exit code 2 for a mistake.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress

from data import DataError
from lipsformer._checks import require
from lipsformer._commands import documented_parser, user_errors
from lipsformer._errors import ConfigError
from lipsformer.engine.run_files import CheckpointError
from lipsformer.engine.run_folder import WHICH, WHICH_HELP, find_weights
from scripts._classifier import Classifier
from scripts._demo_answers import Answers

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(checkpoint: str, which: str, *, host: str, port: int | None) -> None:
    """Serve the page until it is interrupted; all files that it writes are removed at the end.

    Raises:
        CheckpointError: If there are no usable weights.
        ConfigError: If it is not known which model they belong to.
    """
    if host not in LOOPBACK:
        print(
            f"warning: whoever reaches {host} can use the page, which asks for no password",
            file=sys.stderr,
        )
    weights = find_weights(checkpoint, which)
    print(weights, flush=True)
    answers = Answers(Classifier.from_weights(weights))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["GRADIO_TEMP_DIR"] = folder
        from scripts._demo_page import Page  # gradio makes its folder when it is imported

        page = Page(answers, f"{answers.model.name} on your pictures")
        address = page.launch(server_name=host, server_port=port)
        print(f"open {address}", flush=True)
        threading.Event().wait()


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("--checkpoint", required=True, help="run, checkpoint or timm's folder")
    parser.add_argument("--weights", choices=WHICH, default="best", help=WHICH_HELP)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860 on")
    return parser


@user_errors(CheckpointError, ConfigError, DataError)
def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    require(
        args.port is None or 0 <= args.port <= 65535, "--port", args.port, "must be in [0, 65535]"
    )
    try:
        serve(args.checkpoint, args.weights, host=args.host, port=args.port)
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is missing: pip install 'lipsformer[train,web]'"
        ) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
