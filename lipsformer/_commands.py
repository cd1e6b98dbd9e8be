"""The table of commands of the console program `lipsformer`, and how their parsers are built."""

import argparse
import contextlib
import functools
import importlib
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Command(NamedTuple):
    """One entry point of the application.

    Attributes:
        module: Module with `make_parser()` and `main(argv, parser)`.
        extra: The extras of the package that the command needs.
        summary: One line for `lipsformer --help`.
    """

    module: str
    extra: str
    summary: str


COMMANDS = {
    "train": Command("train", "train", "train an image model, or show what would be trained"),
    "eval": Command("eval", "train", "measure top-1, top-5 and loss of a checkpoint"),
    "profile": Command("scripts.profile_model", "train", "parameters, GMACs, memory and speed"),
    "import-weights": Command("scripts.import_weights", "train", "read a released checkpoint"),
    "export": Command("scripts.export_model", "export", "write torch.export, ONNX, OpenVINO, timm"),
    "report": Command("scripts.report", "train", "write an HTML report of one or several runs"),
    "graph": Command("scripts.train_graph", "train,graph", "train a graph network"),
    "measure": Command("scripts.measure_lipschitz", "train", "bound Lipschitz constants"),
    "replay": Command("scripts.replay", "train", "repeat an update that was not finite"),
    "check-data": Command("scripts.check_data", "train", "find images that cannot be read"),
    "make-shards": Command("scripts.make_shards", "train", "pack images into tar files"),
    "prepare-imagenet": Command(
        "scripts.prepare_imagenet", "train,imagenet", "unpack ImageNet's archives, and check them"
    ),
    "demo": Command("scripts.demo", "train,web", "show a web page for your own pictures"),
}
COMPLETION = "completion"
RENAMED = {"convert": "import-weights"}  # names of earlier checkouts


def documented_parser(text: str | None, **options: Any) -> argparse.ArgumentParser:
    """Build a parser whose help shows the docstring of its module, line for line.

    Args:
        text: The docstring.
        **options: Further arguments of `ArgumentParser`.
    """
    style = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=text, formatter_class=style, **options)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings of the kinds that `lipsformer` and `data` define as one line without a place.

    They speak of the user's files and settings. Other warnings speak of the program, and keep the
    line of the source to which they point.
    """
    usual = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], *place: Any) -> str:
        own = category.__module__.partition(".")[0] in ("lipsformer", "data")
        return f"warning: {message}\n" if own else usual(message, category, *place)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


@contextlib.contextmanager
def quiet_pipe() -> Iterator[None]:
    """End the process without a traceback when nobody reads its output any more, as after `| head`.

    The exit code is then that of a Unix tool which the signal SIGPIPE has ended. The signal itself
    would also end a training whose connection to another process breaks.
    """
    try:
        try:
            yield
        except SystemExit:  # of --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread(sys.stdout.fileno()):
            raise
        # Python writes what is left at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _is_unread(descriptor: int) -> bool:
    """Return whether a descriptor is a pipe without a reader."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def user_errors(*kinds: type[Exception]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator for the `main` of a command, which prints errors of these kinds.

    Those of the operating system, such as a full disk or a folder that may not be read, are printed
    too. The command then prints one line and returns 2. Other errors keep their traceback, apart
    from those of `quiet_pipe`. Warnings are printed as by `plain_warnings`.
    """

    def decorate(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        def run(*arguments: Any, **options: Any) -> int:
            try:
                with quiet_pipe(), plain_warnings():
                    return main(*arguments, **options)
            except (*kinds, OSError) as error:
                sys.stderr.write(f"error: {error}\n")
                return 2

        return run

    return decorate


def command_parser(name: str) -> argparse.ArgumentParser:
    """Build a command's parser, with help that names the console program.

    Args:
        name: One of `COMMANDS`.

    Raises:
        ModuleNotFoundError: If a package that the command needs is not installed.
    """
    module = importlib.import_module(COMMANDS[name].module)
    parser: argparse.ArgumentParser = module.make_parser()
    parser.prog = f"lipsformer {name}"
    for text in ("description", "epilog"):
        words = getattr(parser, text) or ""
        for script in (f"python -m {module.__name__}", f"python {module.__name__}.py"):
            words = words.replace(script, parser.prog)
        words = words.replace(f"accelerate launch {name}.py", f"torchrun -m {parser.prog}")
        setattr(parser, text, words)
    return parser
