"""Does a non-finite update again and names where it began: `python -m scripts.replay RUN`.

RUN is the folder of a run that stopped with exit code 3 and left a replay.json. The run is taken
up at its last checkpoint, in memory, and brought to that update; then every module's output and
every parameter's gradient is looked at. Nothing is written. Exit code 2 for a mistake.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer._configfile import ConfigError, read_config
from lipsformer.config import Config
from lipsformer.engine import distributed, train_state
from lipsformer.engine.checkpoint import CHECKPOINTS, CheckpointError, read_state
from lipsformer.engine.steps import Learner
from lipsformer.engine.trainer import CONFIG, REPLAY
from train import Parts, assemble


def replay(folder: Path) -> dict[str, Any]:
    """What happens in the update that replay.json names."""
    if not (folder / REPLAY).exists():
        raise ConfigError(f"{folder} has no {REPLAY}; only a run with exit code 3 leaves one")
    record = json.loads((folder / REPLAY).read_text())
    config = read_config(Config, folder / CONFIG, ["run.trackers=[]"])
    accelerator = distributed.start(config)
    parts = assemble(config, accelerator)
    update = 0
    if record["checkpoint"] is not None:
        checkpoint = folder / CHECKPOINTS / record["checkpoint"]
        train_state.put_back(parts.learner, checkpoint)
        # A later one differs in nothing: the updates between were skipped.
        update = min(read_state(checkpoint)["update"], record["update"])
    while update < record["update"]:
        epoch, position = divmod(update, parts.updates.updates_per_epoch)
        for batches, num_samples in parts.updates.epoch(epoch, position):
            if update == record["update"]:
                break
            parts.learner.update(batches, num_samples, update, parts.transform)
            update += 1
        if update % parts.updates.updates_per_epoch == 0:
            for instrument in parts.learner.instruments:
                instrument.before_eval()
    return {"update": update, "samples": record["samples"], **inspect(parts, update)}


def inspect(parts: Parts, update: int) -> dict[str, Any]:
    """Loss and gradient norm of an update, and the first modules and parameters to go wrong."""
    epoch, position = divmod(update, parts.updates.updates_per_epoch)
    batches, num_samples = next(iter(parts.updates.epoch(epoch, position)))
    parts.learner.model.train()
    with watched(parts.learner) as found:
        loss_sum, grad_norm = parts.learner.update(batches, num_samples, update, parts.transform)
    return {
        "lr": parts.learner.schedule(update),
        # As text: JSON has no NaN.
        "loss": f"{float(loss_sum) / num_samples:.6g}",
        "grad_norm": f"{float(grad_norm):.6g}",
        "weights": [n for n, p in parts.learner.module.named_parameters() if not finite(p)],
        **found,
    }


@contextmanager
def watched(learner: Learner) -> Iterator[dict[str, list[str]]]:
    """Collects names of non-finite inputs, outputs and gradients, in the order they arise."""
    found: dict[str, list[str]] = {"inputs": [], "outputs": [], "gradients": []}

    def look_at_input(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        bad = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and not finite(x)]
        found["inputs"].extend(f"argument {i} of the model" for i in bad)

    handles = [learner.module.register_forward_pre_hook(look_at_input)]
    for name, module in learner.module.named_modules():

        def look_at_output(module: nn.Module, _: Any, output: Any, name: str = name) -> None:
            if isinstance(output, Tensor) and not finite(output):
                found["outputs"].append(f"{name or 'model'} ({type(module).__name__})")

        handles.append(module.register_forward_hook(look_at_output))
    for name, parameter in learner.module.named_parameters():

        def look_at_gradient(gradient: Tensor, name: str = name) -> None:
            if not finite(gradient):
                found["gradients"].append(name)

        handles.append(parameter.register_hook(look_at_gradient))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    try:
        print(json.dumps(replay(parser.parse_args(argv).run), indent=1))
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return distributed.EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
