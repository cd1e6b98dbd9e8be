"""Train a graph network for one or several seeds.

    python -m scripts.train_graph --config configs/graph/cora_gat.yaml train.seeds=[0,1,2]

The output folder gets `results.jsonl` with one line per finished seed, `seed<n>.jsonl` with one
line per epoch, and `summary.json` with mean and standard deviation. The same command continues an
interrupted run.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.errors import DataError
from lipsformer._commands import documented_parser, user_errors
from lipsformer._configfile import ConfigError, dump_config, read_config
from lipsformer.graph.config import GraphConfig
from lipsformer.graph.plots import plot_training
from lipsformer.jsonl import append_jsonl, read_jsonl
from scripts._graph_seed import summarize, train_seed


def run(config: GraphConfig, progress: bool) -> dict[str, Any]:
    """Train the seeds that are missing in the output folder, and return the summary of all."""
    folder = Path(config.run.output_dir)
    stored = folder / "config.yaml"
    if stored.exists() and _identity(read_config(GraphConfig, stored)) != _identity(config):
        raise ConfigError(
            f"{folder} holds a run of another config; choose another run.output_dir, or delete it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    stored.write_text(dump_config(config))
    log = folder / "results.jsonl"
    done = {result["seed"]: result for result in read_jsonl(log)}
    for seed in config.train.seeds:
        if seed in done:
            continue
        done[seed] = train_seed(config, seed, folder, progress)
        append_jsonl(log, done[seed])
        if config.train.profile_every:
            records = list(read_jsonl(folder / f"seed{seed}.jsonl"))
            plot_training(records, folder / f"gradients-seed{seed}.png", title=f"seed {seed}")
    summary = summarize([done[seed] for seed in config.train.seeds])
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _identity(config: GraphConfig) -> tuple[object, ...]:
    """Return the parts of a config that decide the result of a seed."""
    return config.model, config.data, replace(config.train, seeds=(0,)), config.run.device


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = documented_parser(__doc__)
    parser.add_argument("--config", required=True, help="YAML file of a GraphConfig")
    parser.add_argument("overrides", nargs="*", help="key=value")
    return parser


@user_errors(ConfigError, DataError, ValueError)
def main(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command and return its exit code; 2 means that the config or the data are wrong."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    config = read_config(GraphConfig, args.config, args.overrides)
    summary = run(config, progress=sys.stderr.isatty())
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
