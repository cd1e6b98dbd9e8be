"""The tables of docs/graph_results.md that are made from the results of sweeps.

    python -m benchmarks.graph_tables gcn2_search
    python -m benchmarks.graph_tables studies

The tables show accuracies in %. `studies` shows which runs there are, what they cost, and which are
missing.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.graph_published import PUBLISHED
from benchmarks.records import markdown, spread
from lipsformer._commands import documented_parser
from lipsformer._configfile import read_config
from lipsformer.graph.config import GraphConfig, GraphSweepConfig
from lipsformer.graph.models import default_bound
from lipsformer.jsonl import read_jsonl
from scripts.graph_sweep import cells

RESULTS = Path(__file__).parent / "results/graph"
CONFIGS = Path(__file__).parents[1] / "configs/graph"
GCN2 = {"spectral": "with weight normalization", "none": "GCNII"}
# layers and epochs -> accuracy of GCNII, %, in Chen et al. 2020
GCN2_PUBLISHED = {(64, 1500): "85.5"}
# %, in Luo et al. 2024
ANCHORS_PUBLISHED = {
    "tuned GCN": "85.1 on another split",
    "tuned GAT": "84.5 on another split",
    "tuned GCN, split of tunedGNN": "85.1",
    "tuned GAT, split of tunedGNN": "84.5",
}

_MAIN = "GAT-LipschitzNorm (5), 0 %"

Run = dict[str, Any]
Runs = dict[tuple[Any, str], list[Run]]


def gcn2_search() -> str:
    """Validation accuracies of all settings of GCNII with and without weight normalization."""
    runs = _runs("search_gcn2", lambda cell: (cell["case"], cell["model.kwargs.weight_norm"]))
    rows = (
        (case, *(_mean(runs.get((case, form), []), "val_acc") for form in GCN2))
        for case in _firsts(runs)
    )
    return markdown(("setting", *GCN2.values()), rows)


def gcn2_depth() -> str:
    """Test accuracies of GCNII with and without weight normalization by depth."""
    runs = _runs("depth_gcn2", lambda cell: (cell["case"], cell["model.kwargs.weight_norm"]))
    rows = []
    for form, network in GCN2.items():
        for own in (own for (_, weight_norm), own in runs.items() if weight_norm == form):
            config = _config("depth_gcn2", own)
            layers, alpha = config.model.num_layers, config.model.kwargs["alpha"]
            published = GCN2_PUBLISHED.get((layers, config.train.epochs), "")
            rows.append(
                (layers, network, alpha, *_schedule(config), len(own), *_test(own), published)
            )
    rows.sort(key=lambda row: (row[0], row[4], row[2]))
    header = ("layers", "network", "alpha", "lr", "epochs", "seeds")
    return markdown((*header, "best validation epoch", "last epoch", "published (GCNII)"), rows)


def gat_depth() -> str:
    """Test accuracies of a GAT by depth and norm, at the best validation and at the last epoch."""
    return _by_depth_and_norm("depth_gat")


def transformer_depth() -> str:
    """Test accuracies of a Graph Transformer by depth and norm, as in `gat_depth`."""
    return _by_depth_and_norm("depth_transformer")


def _by_depth_and_norm(sweep: str) -> str:
    runs = _runs(sweep, lambda cell: (int(cell["model.num_layers"]), cell["case"]))
    best, last = (_wide(sweep, runs, "layers", key) for key in ("test_acc", "last_test_acc"))
    return f"At the best validation epoch:\n\n{best}\n\nAt the last epoch:\n\n{last}"


def _wide(sweep: str, runs: Runs, title: str, measure: str) -> str:
    """Return a table with a column for every network; all cells of a row have the same settings."""
    columns = list(dict.fromkeys(column for _, column in runs))
    rows: dict[tuple[Any, ...], dict[str, str]] = defaultdict(dict)
    for (first, column), own in runs.items():
        settings = (first, *_schedule(_config(sweep, own)), len(own))
        rows[settings][column] = _mean(own, measure)
    return markdown(
        (title, "lr", "epochs", "seeds", *columns),
        ((*row, *(rows[row].get(column, "") for column in columns)) for row in sorted(rows)),
    )


def gat_depth_choices() -> str:
    """Test accuracies of deep GATs without dropout of the attention weights."""
    rows = []
    for (case, _), own in _runs("depth_gat_choices", _case).items():
        layers, norm, _ = case.split(", ")
        schedule = _schedule(_config("depth_gat_choices", own))
        rows.append((layers, norm, *schedule, len(own), *_test(own)))
    header = ("layers", "norm", "lr", "epochs", "seeds")
    return markdown((*header, "best validation epoch", "last epoch"), rows)


def residual_depth() -> str:
    """Test accuracies of residual networks by depth, with c = 4/L and a constant learning rate."""
    return _by_depth("depth_residual", lambda cell: (cell["case"], cell["model.num_layers"]))


def residual_depth_plateau() -> str:
    """Test accuracies of residual networks by depth, with c = 6/L and a rate that is halved."""
    return _by_depth(
        "depth_residual_plateau",
        lambda cell: tuple(cell["case"].removesuffix(" layers").split(", ")),
    )


def residual_datasets() -> str:
    """Test accuracies of residual networks on other graphs, directed ones with their true norm."""
    rows = []
    for (case, _), own in _runs("table_residual_datasets", _case).items():
        graph, network, layers, bound = case.split(", ")
        config = _config("table_residual_datasets", own)
        names = (graph, network, bound, int(layers.removesuffix(" layers")))
        rows.append((*names, *_residual_settings(config), len(own), *_test(own)))
    header = ("graph", "network", "bound of the weights", "layers", "c", "lr", "epochs", "seeds")
    return markdown((*header, "best validation epoch", "last epoch"), sorted(rows))


def _by_depth(sweep: str, key: Callable[[Run], tuple[str, str]]) -> str:
    runs = _runs(sweep, key)
    rows = (
        (network, n, *_residual_settings(_config(sweep, own)), len(own), *_test(own))
        for network in _firsts(runs)
        for n in sorted((layers for case, layers in runs if case == network), key=int)
        for own in [runs[network, n]]
    )
    header = ("network", "layers", "c", "lr", "epochs", "seeds")
    return markdown((*header, "best validation epoch", "last epoch"), rows)


def ablations() -> str:
    """Test accuracies of the rows that differ from the paper's, with one choice changed."""
    rows = []
    for graph, published in PUBLISHED.items():
        changed = _runs(
            f"ablation_{graph}", lambda cell: tuple(cell["case"].rsplit(", ", maxsplit=1))
        )
        own = _runs(f"table_missing_features_{graph}", lambda cell: (cell["case"], "nothing"))
        rows += [
            (graph, row, change, len(runs), *_test(runs), "{} ± {}".format(*published[row]))
            for row in published
            if row in _firsts(changed)
            for (case, change), runs in {**own, **changed}.items()
            if case == row
        ]
    header = ("graph", "model (layers), missing", "changed", "seeds")
    return markdown((*header, "best validation epoch", "last epoch", "published"), rows)


def ablation_lipschitznorm() -> str:
    """Test accuracies of the paper's main figure with one or two choices changed."""
    published = _runs("table_missing_features_cora", _case)
    runs = {("nothing", ""): published[_MAIN, ""], **_runs("ablation_lipschitznorm", _case)}
    rows = ((changed, len(own), *_test(own)) for (changed, _), own in runs.items())
    return markdown(("what is changed", "seeds", "best validation epoch", "last epoch"), rows)


def epoch_choice() -> str:
    """Test accuracies of the paper's rows if another epoch of the same runs were chosen."""
    rows = []
    for graph, published in PUBLISHED.items():
        runs = _runs(f"epochs_table_missing_features_{graph}", _case)
        rows += [(graph, row, *_by_epoch(runs[row, ""], published[row])) for row in published]
    for (case, _), runs in _runs("epochs_ablation_lipschitznorm", _case).items():
        rows.append(("cora", f"{_MAIN}, {case}", *_by_epoch(runs, PUBLISHED["cora"][_MAIN])))
    header = ("graph", "model (layers), missing", "seeds", "highest validation accuracy")
    return markdown((*header, "lowest validation loss", "highest test accuracy", "published"), rows)


def _by_epoch(runs: list[Run], published: tuple[float, float]) -> tuple[object, ...]:
    choices = ("test_acc", "lowest_val_loss", "highest_test")
    return len(runs), *(_mean(runs, choice) for choice in choices), "{} ± {}".format(*published)


def anchors() -> str:
    """Test accuracies of networks of today, each with the setting that validation chose."""
    rows = []
    for (network, _), runs in _runs("table_anchors", _case).items():
        config = _config("table_anchors", runs)
        chosen = (config.model.kwargs["dropout"], config.model.num_layers, *_schedule(config))
        accuracies = (_mean(runs, "val_acc"), *_test(runs), ANCHORS_PUBLISHED.get(network, ""))
        rows.append((network, *chosen, len(runs), *accuracies))
    header = ("network", "dropout", "layers", "lr", "epochs", "seeds", "validation")
    return markdown((*header, "test, best validation epoch", "test, last epoch", "published"), rows)


def trees() -> str:
    """Highest training accuracies on trees by depth and norm."""
    runs = _runs("table_trees", lambda cell: tuple(cell["case"].split(", ")))
    return _wide("table_trees", runs, "", "highest_train_acc")


def learned_constant() -> str:
    """Test accuracies with a constant that learns."""
    rows = (
        (case, *_schedule(_config("learned_constant", own)), len(own), *_test(own))
        for (case, _), own in _runs("learned_constant", _case).items()
    )
    header = ("network", "lr", "epochs", "seeds", "best validation epoch", "last epoch")
    return markdown(header, rows)


def studies() -> str:
    """The runs of every study, their core-hours, and what is missing."""
    rows: list[tuple[Any, ...]] = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        if "\nresults: " not in path.read_text():
            continue
        sweep = read_config(GraphSweepConfig, path)
        lines = list(read_jsonl(RESULTS / f"{path.stem}.jsonl"))
        done = {(json.dumps(line["overrides"]), line["seed"]) for line in lines}
        missing, never = 0, []
        for cell, overrides in cells(sweep):
            absent = [seed for seed in sweep.seeds if (json.dumps(overrides), seed) not in done]
            missing += len(absent)
            if len(absent) == len(sweep.seeds):
                never.append(", ".join(cell.values()))
        seconds = sum(line["seconds"] for line in lines)
        rows.append((f"`{path.stem}`", len(lines), seconds, missing, "; ".join(never)))
    runs, seconds, missing = (sum(row[column] for row in rows) for column in (1, 2, 3))
    earlier = json.loads((RESULTS / "runs.json").read_text())
    more_runs = sum(len(row["seed"]) for row in earlier)
    more_seconds = sum(sum(row["seconds"]) for row in earlier)
    rows.append(("all studies", runs, seconds, missing, ""))
    rows.append(("narrower networks, `runs.json`", more_runs, more_seconds, "", ""))
    rows.append(("together", runs + more_runs, seconds + more_seconds, "", ""))
    header = ("study", "runs", "core-hours", "missing runs", "settings without any run")
    return markdown(header, ((*row[:2], f"{row[2] / 3600:.1f}", *row[3:]) for row in rows))


def _config(sweep: str, runs: list[Run]) -> GraphConfig:
    """Return the config of the runs of one cell of a sweep."""
    return read_config(GraphConfig, CONFIGS / _base(sweep), runs[0]["overrides"])


@cache
def _base(sweep: str) -> str:
    return read_config(GraphSweepConfig, CONFIGS / f"{sweep}.yaml").config


def _schedule(config: GraphConfig) -> tuple[str, int]:
    """Return the learning rate and the largest number of epochs."""
    halved = "" if config.train.plateau_patience is None else ", halved on plateaus"
    return f"{config.train.lr:g}{halved}", config.train.epochs


def _residual_settings(config: GraphConfig) -> tuple[str, str, int]:
    """Return the bound c of the weights of a residual network, and its schedule."""
    kwargs = config.model.kwargs
    bound = kwargs.get("bound", default_bound(config.model.num_layers))
    free = kwargs["weight_norm"] == "none"
    return "none" if free else f"{bound:.3g}", *_schedule(config)


def _runs(name: str, key: Callable[[Run], tuple[Any, str]]) -> Runs:
    runs: Runs = defaultdict(list)
    for line in read_jsonl(RESULTS / f"{name}.jsonl"):
        runs[key(line["cell"])].append(line)
    return dict(runs)


def _case(cell: Run) -> tuple[str, str]:
    return cell["case"], ""


def _firsts(runs: Runs) -> Iterable[str]:
    return dict.fromkeys(first for first, _ in runs)


def _test(runs: list[Run]) -> tuple[str, str]:
    return _mean(runs, "test_acc"), _mean(runs, "last_test_acc")


def _mean(runs: list[Run], key: str) -> str:
    return spread([100 * run[key] for run in runs], 1) if runs else ""


TABLES = {
    table.__name__: table
    for table in (
        *(gcn2_search, gcn2_depth, gat_depth, residual_depth, residual_depth_plateau, trees),
        *(residual_datasets, learned_constant, ablations, ablation_lipschitznorm, epoch_choice),
        *(anchors, transformer_depth, gat_depth_choices, studies),
    )
}

if __name__ == "__main__":
    parser = documented_parser(__doc__, prog="python -m benchmarks.graph_tables")
    parser.add_argument("table", choices=sorted(TABLES))
    print(TABLES[parser.parse_args().table]())
