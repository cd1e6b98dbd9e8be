"""Repeat a non-finite update and name where it began.

    python -m scripts.replay outputs/demo

RUN is the folder of a run that stopped with exit code 3 and left a replay.json. The script loads
the last checkpoint of the run, trains in memory up to that update, and then checks the output of
every module and the gradient of every parameter. One process takes the shares of all ranks of the
run in turn, with their random numbers. Nothing is written. Exit code 2 for a mistake.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data import DataError
from data.loader import TrainBatches, Update
from lipsformer._commands import documented_parser, user_errors
from lipsformer._errors import ConfigError
from lipsformer._files import read_json
from lipsformer.engine import distributed
from lipsformer.engine.parts import TrainingParts
from lipsformer.engine.run_files import CHECKPOINTS, REPLAY, CheckpointError, find_fault, read_state
from lipsformer.engine.run_folder import RunFolder
from lipsformer.engine.steps import apply_gradient, backward
from scripts._assemble import assemble


def replay(folder: Path) -> dict[str, Any]:
    """Return what happens in the update that replay.json names."""
    if not (folder / REPLAY).exists():
        raise ConfigError(
            f"{folder} has no {REPLAY}; only a run that an update ended with exit code 3 writes one"
        )
    record = read_json(folder / REPLAY)
    config = RunFolder(folder).config(["run.trackers=[]"])
    config = replace(config, train=replace(config.train, batch_size_per_device=None))
    accelerator = distributed.start(config)
    if accelerator.num_processes > 1:
        raise ConfigError("replay runs on one process, which takes the shares of all ranks in turn")
    start = folder / CHECKPOINTS / record["checkpoint"] if record["checkpoint"] else None
    if start is not None and (fault := find_fault(start)):
        raise CheckpointError(f"{start}, from which the update is repeated, is lost: {fault}")
    parts = assemble(config, accelerator, start)
    step = 0
    if start is not None:
        parts.state.load_checkpoint(start)
        # A checkpoint from after that update has the weights from before it, because the updates
        # between them were skipped.
        step = min(read_state(start)["update"], record["update"])
    assert isinstance(parts.train_batches, TrainBatches)
    # Earlier checkouts wrote the samples of a micro-batch as "micro_batch".
    samples = record.get("samples_per_micro_batch") or record["micro_batch"]
    ranks = [
        parts.train_batches.of_rank(rank, record["world_size"], samples)
        for rank in range(record["world_size"])
    ]
    per_epoch = parts.train_batches.updates_per_epoch
    while step < record["update"]:
        for shares in _updates(ranks, *divmod(step, per_epoch)):
            if step == record["update"]:
                break
            _train_step(parts, shares, step)
            step += 1
        if step % per_epoch == 0:
            for instrument in parts.state.instruments:
                instrument.before_eval()
    shares = next(_updates(ranks, *divmod(step, per_epoch)))
    return {"update": step, "samples": record["samples"], **inspect(parts, shares, step)}


def _updates(ranks: list[TrainBatches], epoch: int, position: int) -> Iterator[tuple[Update, ...]]:
    return zip(*(batches.epoch(epoch, position) for batches in ranks), strict=True)


def _train_step(parts: TrainingParts, shares: Sequence[Update], step: int) -> tuple[Tensor, Tensor]:
    """Make the step that many ranks make together; return the sum of all losses, and the norm."""
    state = parts.state
    state.model.train()
    losses, buffers = torch.zeros(()), {}
    gradients: dict[str, Tensor] = {}
    for rank, (batches, count) in enumerate(shares):
        loss = backward(state, batches, count, step, parts.transform, rank=rank)
        losses += loss.cpu()
        for name, parameter in state.module.named_parameters():
            if parameter.grad is not None:
                before = gradients.get(name)
                gradients[name] = parameter.grad if before is None else before + parameter.grad
                parameter.grad = None
        if rank == 0:  # the statistics of rank 0 are those of the run
            buffers = {name: buffer.clone() for name, buffer in state.module.named_buffers()}
    for name, buffer in state.module.named_buffers():
        buffer.copy_(buffers[name])
    for name, parameter in state.module.named_parameters():
        parameter.grad = gradients.get(name)
    return losses, apply_gradient(state, step)


def inspect(parts: TrainingParts, shares: Sequence[Update], step: int) -> dict[str, Any]:
    """Return loss and gradient norm of a step, and what in it was not finite, in order."""
    state = parts.state
    with watched(state.module) as found:
        loss_sum, grad_norm = _train_step(parts, shares, step)
    return {
        "lr": state.schedule(step),
        # As text: JSON has no NaN.
        "loss": f"{float(loss_sum) / shares[0].num_samples:.6g}",
        "grad_norm": f"{float(grad_norm):.6g}",
        "weights": [n for n, p in state.module.named_parameters() if not finite(p)],
        **{kind: list(dict.fromkeys(names)) for kind, names in found.items()},
    }


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, list[str]]]:
    """Collect names of non-finite inputs, outputs and gradients, in the order they arise."""
    found: dict[str, list[str]] = {"inputs": [], "outputs": [], "gradients": []}

    def look_at_input(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        bad = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and not finite(x)]
        found["inputs"].extend(f"argument {i} of the model" for i in bad)

    def look_at_output(name: str, module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not finite(output):
            found["outputs"].append(f"{name or 'model'} ({type(module).__name__})")

    def look_at_gradient(name: str, gradient: Tensor) -> None:
        if not finite(gradient):
            found["gradients"].append(name)

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(look_at_input))
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(look_at_output, name)))
        for name, parameter in model.named_parameters():
            hooks.enter_context(parameter.register_hook(partial(look_at_gradient, name)))
        yield found


def finite(tensor: Tensor) -> bool:
    """Return whether all values are finite."""
    return bool(torch.isfinite(tensor).all())


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    return parser


@user_errors(ConfigError, CheckpointError, DataError)
def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line; return the exit code."""
    args = (parser or make_parser()).parse_args(argv)
    print(json.dumps(replay(args.run), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
