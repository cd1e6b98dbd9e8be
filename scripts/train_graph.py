"""Train a graph network for one or several seeds.

    python -m scripts.train_graph --config configs/graph/cora_gat.yaml train.seeds=[0,1,2]
    torchrun --nproc_per_node 2 -m scripts.train_graph --config configs/graph/arxiv_gat.yaml

The output folder gets `results.jsonl` with one line per finished seed, `seed<n>.jsonl` with one
line per epoch, and `summary.json` with mean and standard deviation. The same command continues an
interrupted run; a second one in the same folder is refused while the first one runs. Several
processes train together on the clusters of a large graph.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.errors import DataError
from lipsformer._commands import documented_parser, user_errors
from lipsformer._configfile import dotted, dump_config, read_config
from lipsformer._errors import ConfigError
from lipsformer._ranks import on_first_rank, rank_and_count
from lipsformer._settings_help import describe
from lipsformer.graph.config import GraphConfig
from lipsformer.graph.plots import plot_training
from lipsformer.jsonl import append_jsonl, read_jsonl
from scripts._graph_seed import (
    load_batches,
    locked,
    read_results,
    require_machine,
    require_model,
    summarize,
    train_seed,
)


def run(config: GraphConfig, device: str, progress: bool) -> dict[str, Any]:
    """Train the seeds that are missing in the output folder, and return the summary of all.

    Only process 0 writes to the folder, which must exist and be locked. Nothing is written before
    the data are loaded and the model is known to be possible.

    Args:
        config: The config of the run.
        device: The device of this process.
        progress: Whether to show the progress on the terminal.
    """
    folder = Path(config.run.output_dir)
    log = folder / "results.jsonl"
    done = {result["seed"]: result for result in on_first_rank(lambda: _finished(config))}
    missing = [seed for seed in config.train.seeds if seed not in done]
    data = None
    if missing:
        data = load_batches(config)
        require_model(config, data)
    text = dump_config(config)
    on_first_rank(lambda: (folder / "config.yaml").write_text(text, encoding="utf-8"))
    for seed in missing:
        assert data is not None
        done[seed] = train_seed(config, data, seed, folder, device=device, progress=progress)
        if rank_and_count()[0] > 0:
            continue
        append_jsonl(log, done[seed])
        if config.train.profile_every:
            records = list(read_jsonl(folder / f"seed{seed}.jsonl"))
            plot_training(records, folder / f"gradients-seed{seed}.png", title=f"seed {seed}")
    summary = summarize([done[seed] for seed in config.train.seeds])
    if rank_and_count()[0] == 0:
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _finished(config: GraphConfig) -> list[dict[str, Any]]:
    """Return the results that the output folder holds.

    Raises:
        ConfigError: If they belong to another config, or are damaged.
    """
    folder = Path(config.run.output_dir)
    stored = folder / "config.yaml"
    if stored.exists():
        old, new = _identity(read_config(GraphConfig, stored)), _identity(config)
        changed = [f"{key} {old[key]!r} -> {new[key]!r}" for key in new if old[key] != new[key]]
        if changed:
            raise ConfigError(
                f"{folder} holds a run with another config ({', '.join(changed)}): set these back, "
                "choose another run.output_dir, or delete it"
            )
    results = read_results(folder / "results.jsonl")
    if results and not stored.exists():
        raise ConfigError(
            f"{folder} holds results without a config.yaml, as those of a sweep; choose another "
            "run.output_dir, or delete it"
        )
    return results


def _identity(config: GraphConfig) -> dict[str, object]:
    """Return the dotted settings that decide the result of a seed."""
    others = ("data.root", "data.download", "train.seeds")  # where the data are, and other seeds
    return {
        key: value
        for key, value in dotted(config).items()
        if key not in others and (key == "run.device" or not key.startswith("run."))
    }


@contextmanager
def joined_processes(device: str) -> Iterator[str]:
    """Join the processes that a launcher started, if any, and yield the device of this one.

    Args:
        device: The config's `run.device`.
    """
    if not {"WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys():
        yield device
        return
    from accelerate import PartialState  # slow to import, and only needed here

    from lipsformer.engine.distributed import refuse_lost_processes

    state = PartialState(cpu=device == "cpu")
    refuse_lost_processes(state.num_processes)
    try:
        yield str(state.device) if state.num_processes > 1 else device
    finally:
        state.destroy_process_group()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = documented_parser(__doc__, epilog=f"settings:\n\n{describe(GraphConfig)}")
    parser.add_argument("--config", required=True, help="YAML file of a GraphConfig")
    parser.add_argument("overrides", nargs="*", help="key=value")
    return parser


@user_errors(ConfigError, DataError, ValueError)
def main(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command and return its exit code; 2 means that the config or the data are wrong."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    config = read_config(GraphConfig, args.config, args.overrides)
    require_machine(config.run)
    folder = Path(config.run.output_dir)
    with joined_processes(config.run.device) as device, locked(folder):
        first = rank_and_count()[0] == 0
        summary = run(config, device, progress=sys.stderr.isatty() and first)
    if first:
        print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
