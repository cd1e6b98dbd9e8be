"""The tables of docs/graph_results.md that are made from the results of sweeps. All show %.

    python -m benchmarks.graph_tables gcn2_search
    python -m benchmarks.graph_tables gat_depth

Each is named after a file of configs/graph, whose sweep has made the runs.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.graph_published import PUBLISHED
from benchmarks.records import markdown
from lipsformer._commands import documented_parser
from lipsformer.jsonl import read_jsonl

RESULTS = Path(__file__).parent / "results/graph"
GCN2 = {"spectral": "with weight normalization", "none": "GCNII"}

_MAIN = "GAT-LipschitzNorm (5), 0 %"

Run = dict[str, Any]
Runs = dict[tuple[str, str], list[Run]]


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
    rows = (
        (case.replace(" layers", ""), network, len(runs[case, form]), *_test(runs[case, form]))
        for case in sorted(_firsts(runs), key=lambda case: int(case.split()[0]))
        for form, network in GCN2.items()
        if (case, form) in runs
    )
    return markdown(("layers", "network", "seeds", "best validation epoch", "last epoch"), rows)


def gat_depth() -> str:
    """Test accuracies of a GAT by depth and norm, at the best validation and at the last epoch."""
    return _by_depth_and_norm("depth_gat")


def transformer_depth() -> str:
    """Test accuracies of a Graph Transformer by depth and norm, as in `gat_depth`."""
    return _by_depth_and_norm("depth_transformer")


def _by_depth_and_norm(sweep: str) -> str:
    runs = _runs(sweep, lambda cell: (cell["model.num_layers"], cell["case"]))
    norms = list(dict.fromkeys(norm for _, norm in runs))
    header = ("layers", *norms)
    layers = sorted(_firsts(runs), key=int)
    best, last = (
        markdown(
            header, ((n, *(_mean(runs.get((n, norm), []), key) for norm in norms)) for n in layers)
        )
        for key in ("test_acc", "last_test_acc")
    )
    return f"At the best validation epoch:\n\n{best}\n\nAt the last epoch:\n\n{last}"


def gat_depth_choices() -> str:
    """Test accuracies of deep GATs without dropout of the attention weights."""
    runs = _runs("depth_gat_choices", _case)
    rows = ((*case.split(", "), len(own), *_test(own)) for (case, _), own in runs.items())
    return markdown(("layers", "norm", "lr", "seeds", "best validation epoch", "last epoch"), rows)


def residual_depth() -> str:
    """Test accuracies of residual networks by depth, with c = 4/L and a constant learning rate."""
    return _by_depth(_runs("depth_residual", lambda cell: (cell["case"], cell["model.num_layers"])))


def residual_depth_plateau() -> str:
    """Test accuracies of residual networks by depth, with c = 6/L and a rate that is halved."""
    return _by_depth(
        _runs(
            "depth_residual_plateau",
            lambda cell: tuple(cell["case"].removesuffix(" layers").split(", ")),
        )
    )


def residual_datasets() -> str:
    """Test accuracies of residual networks on other graphs, directed ones with their true norm."""
    runs: dict[tuple[str, ...], dict[str, list[Run]]] = defaultdict(dict)
    for (case, _), own in _runs("table_residual_datasets", _case).items():
        graph, network, layers, bound = case.split(", ")
        runs[graph, network, bound][layers] = own
    depths = ("2 layers", "16 layers", "64 layers")
    rows = (
        (*row, *(" / ".join(_test(own[depth])) if depth in own else "" for depth in depths))
        for row, own in sorted(runs.items())
    )
    return markdown(("graph", "network", "bound of the weights", *depths), rows)


def _by_depth(runs: Runs) -> str:
    rows = (
        (network, n, len(runs[network, n]), *_test(runs[network, n]))
        for network in _firsts(runs)
        for n in sorted((layers for case, layers in runs if case == network), key=int)
    )
    return markdown(("network", "layers", "seeds", "best validation epoch", "last epoch"), rows)


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
        values = dict(override.split("=") for override in runs[0]["overrides"])
        chosen = (values["train.lr"], values["model.kwargs.dropout"], values["model.num_layers"])
        rows.append((network, *chosen, len(runs), _mean(runs, "val_acc"), *_test(runs)))
    header = ("network", "lr", "dropout", "layers", "seeds", "validation")
    return markdown((*header, "test, best validation epoch", "test, last epoch"), rows)


def trees() -> str:
    """Highest training accuracies on trees by depth and norm."""
    runs = _runs("table_trees", lambda cell: tuple(cell["case"].split(", ")))
    norms = list(dict.fromkeys(norm for _, norm in runs))
    rows = (
        (depth, *(_mean(runs.get((depth, norm), []), "highest_train_acc") for norm in norms))
        for depth in sorted(_firsts(runs))
    )
    return markdown(("", *norms), rows)


def learned_constant() -> str:
    """Test accuracies with a constant that learns."""
    runs = _runs("learned_constant", _case)
    rows = ((case, len(own), *_test(own)) for (case, _), own in runs.items())
    return markdown(("network", "seeds", "best validation epoch", "last epoch"), rows)


def _runs(name: str, key: Callable[[Run], tuple[str, str]]) -> Runs:
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
    values = [100 * run[key] for run in runs]
    if len(values) < 2:
        return "".join(f"{value:.1f}" for value in values)
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


TABLES = {
    table.__name__: table
    for table in (
        *(gcn2_search, gcn2_depth, gat_depth, residual_depth, residual_depth_plateau, trees),
        *(residual_datasets, learned_constant, ablations, ablation_lipschitznorm, epoch_choice),
        *(anchors, transformer_depth, gat_depth_choices),
    )
}

if __name__ == "__main__":
    parser = documented_parser(__doc__, prog="python -m benchmarks.graph_tables")
    parser.add_argument("table", choices=sorted(TABLES))
    print(TABLES[parser.parse_args().table]())
