"""Classify pictures over HTTP: an example of a server on a CPU.

    python -m scripts.export_model outputs/demo OUT --formats hf openvino
    python -m scripts.serve OUT
    curl --data-binary @picture.jpg http://127.0.0.1:8000

The answer is JSON: the five best classes with their probabilities. OpenVINO runs the folder's
model.xml; without that file PyTorch runs the model folded for inference. `--precision bf16` is
faster on processors with bfloat16 instructions. Pictures are classified one at a time and are not
stored. The server listens on localhost unless --host names another address. It needs
`pip install 'lipsformer[train]'`, and `lipsformer[deploy]` for OpenVINO. Exit code 2 for a mistake.
"""

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

from torch import nn

from data import UnreadableImageError
from data.images import EncodedPicture
from lipsformer._checks import require
from lipsformer._commands import documented_parser, user_errors
from lipsformer._errors import ConfigError
from lipsformer.engine.run_files import CheckpointError
from lipsformer.engine.run_folder import WHICH, WHICH_HELP, find_weights
from scripts._classifier import MAX_UPLOAD, Classifier
from scripts._runtimes import FORMATS, Logits, autocast, fold, load

BEST = 5  # classes in an answer
WAIT_S = 10  # for the bytes of a picture, before its connection is closed


def load_classifier(folder: Path, which: str = "best", precision: str = "fp32") -> Classifier:
    """Return the model of a run or an export, run by OpenVINO if the folder has its files.

    Args:
        folder: Run, checkpoint or export.
        which: Which weights of a run; see `find_weights`.
        precision: "fp32" or "bf16".

    Raises:
        CheckpointError: If there are no usable weights.
        ConfigError: If it is not known which model they belong to, or OpenVINO is missing.
    """
    exported = folder / FORMATS["openvino"].file

    def runtime(model: nn.Module) -> Logits:
        if not exported.exists():
            return autocast(fold(model), precision)
        try:
            return load(exported, precision)
        except ImportError as error:
            raise ConfigError(
                f"{exported} needs OpenVINO: pip install 'lipsformer[deploy]'"
            ) from error

    return Classifier.from_weights(find_weights(folder, which), runtime)


def make_server(model: Classifier, host: str, port: int) -> HTTPServer:
    """Return a server that answers with a model. Port 0 is the first free one."""
    # Decoding takes the memory of a whole picture. A slow connection holds up no other one.
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = WAIT_S

        def handle(self) -> None:
            """Answer, unless the client leaves before."""
            with suppress(ConnectionError):
                super().handle()

        def do_GET(self) -> None:
            """Say how to send a picture."""
            where = self.headers.get("Host", f"{host}:{port}")
            self.answer("text/plain", f"curl --data-binary @picture.jpg http://{where}\n".encode())

        def do_POST(self) -> None:
            """Classify the picture in the body."""
            if "Content-Length" not in self.headers:
                return self.send_error(411, "send the length of the picture")
            length = self.headers["Content-Length"]
            # int() refuses thousands of digits
            size = int(length) if length.isdecimal() and len(length) < 20 else 0
            if not 0 < size <= MAX_UPLOAD:
                return self.send_error(413, f"send a picture of at most {MAX_UPLOAD} bytes")
            content = self.rfile.read(size)
            try:
                with one_at_a_time:
                    image = model.prepare(EncodedPicture(content, "picture"))
                    best = model.probabilities(image).topk(min(BEST, len(model.classes)))
            except UnreadableImageError as error:
                return self.send_error(400, "this is no picture that can be used", str(error))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            named = {model.classes[index]: share for index, share in pairs}
            self.answer("application/json", json.dumps(named).encode())

        def answer(self, kind: str, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Keep silent."""

    return ThreadingHTTPServer((host, port), Handler)


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("folder", type=Path, help="run, checkpoint or export")
    parser.add_argument("--weights", choices=WHICH, default="best", help=WHICH_HELP)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 for the first free one")
    return parser


@user_errors(CheckpointError, ConfigError)
def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    require(0 <= args.port <= 65535, "--port", args.port, "must be in [0, 65535]")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    model = load_classifier(args.folder, args.weights, args.precision)
    with suppress(KeyboardInterrupt), make_server(model, args.host, args.port) as server:
        print(f"open http://{args.host}:{server.server_port}", flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
