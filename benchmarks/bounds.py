"""Proved bounds of the models at their initial weights, on images and on graphs.

    python -m benchmarks.bounds --root datasets --output benchmarks/results/bounds.json
    python -m benchmarks.bounds --table benchmarks/results/bounds.json

The second command prints the tables of docs/lipschitz.md, docs/theorems.md and docs/graph.md. Every
bound is computed for seeds 0, 1 and 2. A cell with two numbers holds the smallest and the largest.
"""

import math
from collections.abc import Iterable
from typing import Any

import timm
import torch
from timm.data import resolve_data_config

import lipsformer  # noqa: F401  (registers the models)
from benchmarks.records import markdown, run
from data import Normalize, build_eval_dataset, collate
from data.graphs import graph_root, load_graph
from lipsformer._commands import documented_parser
from lipsformer.analysis.bounds import Bound, flatten_bound, image_domain, lipschitz_bound
from lipsformer.analysis.bounds.attention import (
    Window,
    attention_bound,
    scaled_cosine_theorem,
    split_qkv,
)
from lipsformer.analysis.bounds.graph import graph_domain
from lipsformer.analysis.estimate import local_lipschitz
from lipsformer.config import DataConfig
from lipsformer.graph import create_model
from lipsformer.graph.operator_bounds import adjacency_sigma_bound
from lipsformer.layers import ScaledCosineAttention

SEEDS = (0, 1, 2)
TOKENS = (4, 16, 49, 64, 196)
MODELS: dict[str, tuple[str, dict[str, Any], tuple[float, ...]]] = {
    "lipsformer_nano": ("lipsformer_nano", {}, (1e-2, 1e-6)),
    "lipsformer_swin_nano": ("lipsformer_swin_nano", {}, (1e-2, 1e-6)),
    "lipsformer_tiny": ("lipsformer_tiny", {}, (1e-2, 1e-6)),
    "lipsformer_swin_tiny": ("lipsformer_swin_tiny", {}, (1e-2, 1e-6)),
    "lipsformer_vit_tiny": ("lipsformer_vit_tiny", {}, (1e-2, 1e-6)),
    "lipsformer_swin_nano, raw values": (
        "lipsformer_swin_nano",
        {"official_compat": True},
        (1e-6,),
    ),
    "lipsformer_swin_tiny, raw values": (
        "lipsformer_swin_tiny",
        {"official_compat": True},
        (1e-6,),
    ),
}
ATTENTION = ("WindowAttention", "StripeAttention", "CosineAttention")
GRAPHS = {
    "Cora": ("cora", False),
    "Chameleon, directed": ("chameleon", False),
    "Chameleon, undirected": ("chameleon", True),
    "Squirrel, directed": ("squirrel", False),
    "Squirrel, undirected": ("squirrel", True),
}
NETWORKS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "GCN, 2 layers": ("gcn", 2, {}),
    "GAT, 2 layers, raw scores": ("deep_gat", 2, {}),
    "GAT, 2 layers, LipschitzNorm": ("deep_gat", 2, {"norm": "lipschitznorm"}),
    "residual GCN, 64 layers": ("residual_gcn", 64, {}),
    "residual GAT, 64 layers, LipschitzNorm": ("residual_gat", 64, {"norm": "lipschitznorm"}),
    "LipsGAT, 8 layers": ("lips_gat", 8, {}),
    "LipsGraphTransformer, 8 layers": ("lips_graph_transformer", 8, {}),
    "LipsGraphTransformer, 8 layers, raw values": (
        "lips_graph_transformer",
        8,
        {"value_scale": None},
    ),
}


def main() -> None:
    """Run the command line."""
    parser = documented_parser(__doc__)
    parser.add_argument("--root", default="datasets")
    run(
        parser,
        lambda options: measure(options.root),
        lambda results: "\n\n".join(tables(results).values()),
    )


def measure(root: str) -> dict[str, Any]:
    """Return all bounds as plain data; None stands for an infinite bound."""
    heads = {str(n): _single_head(n) for n in TOKENS}
    models = {name: _model_bounds(*settings) for name, settings in MODELS.items()}
    graphs = {name: _graph_bounds(root, *settings) for name, settings in GRAPHS.items()}
    return {
        "torch": torch.__version__,
        "seeds": SEEDS,
        "heads": heads,
        "models": models,
        "local": [_local(seed) for seed in SEEDS],
        "graphs": graphs,
    }


def _single_head(num_tokens: int) -> dict[str, float]:
    """Return the bounds of one head with |W| = 1, nu = 1, tau = 10, in units of eps^(-1/2)."""
    n, tau, one = num_tokens, 10.0, torch.ones(1)
    core = ScaledCosineAttention(num_heads=1, logit_scale=tau, eps=1.0)
    heads = split_qkv(torch.ones(3, 1), bias=None, num_heads=1)
    ours = attention_bound(core, heads, Window(n)).value
    theorem = scaled_cosine_theorem(n, 1.0, torch.tensor([tau]), 1.0, [one, one, one]).item()
    return {"ours": ours, "half": n**2 * tau + n * tau + 2 * n, "paper": theorem}


def _model_bounds(name: str, kwargs: dict[str, Any], eps: Iterable[float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = timm.create_model(name, **kwargs).eval()
        data = resolve_data_config(model=model)
        domain = image_domain(data["input_size"][1:], data["mean"], data["std"])
        for value in eps:
            for module in model.modules():
                if isinstance(module, ScaledCosineAttention):
                    module.eps = value
            bound = lipschitz_bound(model, domain)
            row = found.setdefault(f"{value:.0e}", {"bound": [], "paper": [], "layers": []})
            row["bound"].append(_finite(bound.log10))
            row["paper"].append(_finite(bound.paper_log10))
            row["layers"].append(_factors(bound))
    return found


def _factors(bound: Bound) -> list[float]:
    """Return log10 of the paper's theorem over our bound, for every attention."""
    parts = [part for _, part in flatten_bound(bound) if part.kind in ATTENTION]
    factors = [part.paper_log10 - part.log10 for part in parts]
    return [round(factor, 4) for factor in factors if math.isfinite(factor)]


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _local(seed: int) -> float:
    """Return log10 of the largest local constant of lipsformer_nano at four digits."""
    half = (0.5, 0.5, 0.5)
    data = DataConfig(source="digits", img_size=32, mean=half, std=half)
    dataset = build_eval_dataset(data, classes=None)
    images = Normalize(half, half)(collate([dataset[i] for i in range(4)])[0])
    torch.manual_seed(seed)
    model = timm.create_model("lipsformer_nano", num_classes=10).eval()
    sigma, _ = local_lipschitz(model, images, num_iters=30)
    return round(sigma.max().log10().item(), 4)


def _graph_bounds(root: str, name: str, undirected: bool) -> dict[str, Any]:
    graph: Any = load_graph(name, graph_root(root), undirected=undirected)
    radius = graph.x.norm(dim=1).max().item()
    domain = graph_domain(graph.edge_index, len(graph.x), radius)
    bounds: dict[str, list[float | None]] = {}
    for label, (model, layers, kwargs) in NETWORKS.items():
        for seed in SEEDS:
            torch.manual_seed(seed)
            width = 64 if "gcn" in model else 8
            heads = {} if "gcn" in model else {"heads": 8}
            net = create_model(model, graph.x.shape[1], width, 7, layers, **heads, **kwargs)
            bound = lipschitz_bound(net.eval(), domain)
            bounds.setdefault(label, []).append(_finite(bound.log10))
    norm = adjacency_sigma_bound(graph.edge_index, len(graph.x))
    return {"adjacency_norm": round(norm, 4), "radius": radius, "bounds": bounds}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the pages, by name."""
    return {
        "heads": _table(
            "tokens N",
            ("our bound", "theorem with the constant 1/2", "theorem of the paper", "paper / ours"),
            {
                n: (
                    f"{row['ours']:.1f}",
                    f"{row['half']:,.0f}",
                    f"{row['paper']:,.0f}",
                    f"{row['paper'] / row['ours']:,.0f}",
                )
                for n, row in results["heads"].items()
            },
        ),
        "layers": _table(
            "model",
            ("layers", "smallest factor", "largest factor"),
            {
                f"`{name}`": _layers(rows["1e-02"]["layers"])
                for name, rows in results["models"].items()
                if "1e-02" in rows
            },
        ),
        "models": _table(
            "model",
            [f"{what}, eps {eps}" for eps in ("1e-2", "1e-6") for what in ("bound", "theorem")],
            {
                name: [
                    _span(rows[eps][what]) if eps in rows else ""
                    for eps in ("1e-02", "1e-06")
                    for what in ("bound", "paper")
                ]
                for name, rows in results["models"].items()
            },
        ),
        "local": "The largest local constant is 10^{} to 10^{}.".format(
            *(f"{pick(results['local']):.1f}" for pick in (min, max))
        ),
        "graphs": _table(
            "network",
            list(results["graphs"]),
            {
                "norm of the adjacency": [
                    f"{row['adjacency_norm']:.2f}" for row in results["graphs"].values()
                ],
                **{
                    label: [_span(row["bounds"][label]) for row in results["graphs"].values()]
                    for label in NETWORKS
                },
            },
        ),
    }


def _layers(factors: list[list[float]]) -> tuple[str, str, str]:
    every = [factor for layers in factors for factor in layers]
    return str(len(factors[0])), f"10^{min(every):.1f}", f"10^{max(every):.1f}"


def _span(values: list[float | None]) -> str:
    """Return the smallest and the largest value, or one if they agree to one digit."""
    known = [value for value in values if value is not None]
    if not known:
        return "inf"
    low, high = f"{min(known):.1f}", f"{max(known):.1f}"
    return low if low == high else f"{low} to {high}"


def _table(head: str, columns: Iterable[str], rows: dict[str, Iterable[str]]) -> str:
    return markdown((head, *columns), ((name, *cells) for name, cells in rows.items()))


if __name__ == "__main__":
    main()
