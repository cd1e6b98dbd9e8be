"""Train LipsFormer and bodies with some of its parts swapped out over learning rates and depths.

    python -m scripts.stability_sweep --output outputs/stability --data source=digits img_size=16 \
        --parts lipsformer plain --lrs 1e-3 1e-2 1e-1 --warmups 0 5 --blocks 6 --epochs 10

Every cell of the grid is one line of results.jsonl; cells that are there are not run again, so the
same command continues. AdamW, cosine, no augmentation, no clipping, fp32, the same data order for
every cell of a seed. At the end: tables, accuracy over learning rate and loss curves as PNG.

A run is stable if its loss stays finite and the mean loss of its last tenth is at least 5 % below
that of a uniform guess. LR sensitivity is the mean over learning rates of how far that loss, at
most the guess's, lies above the body's best (Wortsman et al. 2023, arXiv:2309.14322).

    lipsformer      the body as it is
    layernorm       LayerNorm for CenterNorm
    dot_product     dot-product attention for scaled cosine attention
    plain_residual  x + f(x) for x + alpha f(x)
    default_init    truncated normal of 0.02 for spectral initialisation
    plain           all four
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import DataError, Normalize, build_eval_dataset, collate
from lipsformer._configfile import ConfigError, make_config
from lipsformer.config import DataConfig, OptimConfig
from lipsformer.engine.distributed import EXIT_USER_ERROR
from lipsformer.engine.optim import make_optimizer, set_lr
from lipsformer.engine.schedule import CosineSchedule
from lipsformer.layers import CenterNorm, DepthwiseConv2d, ScaledCosineAttention, WeightedResidual
from lipsformer.models.lipsformer_swin import LipsFormerSwin

SWAPS = ("layernorm", "dot_product", "plain_residual", "default_init")
PARTS = ("lipsformer", *SWAPS, "plain")
KEYS = ("parts", "lr", "warmup", "blocks", "seed")
TRAINING = ("epochs", "batch_size", "embed_dim", "patch_size")
FIXED = ("data", "train_images", "val_images", *TRAINING)
STABLE_SHARE = 0.95  # of the loss of a uniform guess


class DotProductAttention(nn.Module):
    """softmax(q k^T / sqrt(d) + bias) v, in the place of ``ScaledCosineAttention``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias)


def build(
    parts: str, blocks: int, img_size: int, num_classes: int, embed_dim: int, patch_size: int
) -> nn.Module:
    """Two stages with a third and two thirds of the blocks, and the swaps made."""
    first = max(1, blocks // 3)
    model = LipsFormerSwin(
        img_size=img_size,
        patch_size=patch_size,
        num_classes=num_classes,
        embed_dim=embed_dim,
        depths=(first, blocks - first),
        num_heads=(2, 4),
        window_size=4,
    )
    swaps = SWAPS if parts == "plain" else (parts,)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if "layernorm" in swaps and isinstance(child, CenterNorm):
                setattr(parent, name, nn.LayerNorm(child.dim))
            if "dot_product" in swaps and isinstance(child, ScaledCosineAttention):
                setattr(parent, name, DotProductAttention())
            if "plain_residual" in swaps and isinstance(child, WeightedResidual):
                nn.init.ones_(child.residual_scale).requires_grad_(False)
            if "default_init" in swaps and isinstance(child, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(child.weight, std=0.02)
            if "default_init" in swaps and isinstance(child, DepthwiseConv2d):
                child.reset_parameters()
    return model


def load(settings: Sequence[str], training: bool, number: int | None) -> tuple[Tensor, Tensor, int]:
    """Images of a split, normalised, their labels, and the number of classes.

    Args:
        settings: Of the data.
        training: The training split, without augmentation; else the validation split.
        number: How many, evenly over the split; None for all.
    """
    preset = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    data = make_config(DataConfig, [preset], settings, origin="--data")
    if training:
        data = replace(data, val_split=data.train_split)
    dataset = build_eval_dataset(data, classes=None)
    number = len(dataset) if number is None else min(number, len(dataset))
    items = [dataset[i * len(dataset) // number] for i in range(number)]
    images, labels = collate(items)
    return Normalize(data.mean, data.std)(images), labels, len(dataset.classes)


def run_cell(
    cell: dict[str, Any],
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    *,
    num_classes: int,
    epochs: int,
    batch_size: int,
    embed_dim: int,
    patch_size: int,
) -> dict[str, Any]:
    """Train one cell; stops at the first loss that is not finite."""
    torch.manual_seed(cell["seed"])
    images, labels = train
    model = build(
        cell["parts"], cell["blocks"], images.shape[-1], num_classes, embed_dim, patch_size
    ).train()
    optimizer = make_optimizer(model, OptimConfig(lr=cell["lr"]))
    per_epoch = len(images) // batch_size
    schedule = CosineSchedule(
        peak=cell["lr"],
        final=0.0,
        total_steps=epochs * per_epoch,
        warmup_steps=cell["warmup"] * per_epoch,
    )
    order = torch.Generator().manual_seed(cell["seed"])
    batches = [
        batch
        for _ in range(epochs)
        for batch in torch.randperm(len(images), generator=order).split(batch_size)[:per_epoch]
    ]
    losses: list[float] = []
    for update, batch in enumerate(batches):
        set_lr(optimizer, schedule(update))
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
    model.eval()
    with torch.no_grad():
        predictions = torch.cat([model(part).argmax(1) for part in val[0].split(256)])
    finite = math.isfinite(losses[-1])
    last = losses[-math.ceil(len(losses) / 10) :]
    final = sum(last) / len(last) if finite else None
    return {
        **cell,
        "num_classes": num_classes,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "updates": len(losses),
        "losses": [round(loss, 3) for loss in losses if math.isfinite(loss)],
        "final_loss": final,
        "stable": final is not None and final <= STABLE_SHARE * math.log(num_classes),
        "top1": 100.0 * (predictions == val[1]).double().mean().item() if finite else 0.0,
    }


def read_results(path: Path) -> list[dict[str, Any]]:
    """Finished cells; a line that was cut off by a kill is left out and its cell run again."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def select(records: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Accuracy per cell, mean over seeds, a star where a seed was not stable; and per body."""
    lrs = sorted({record["lr"] for record in records})
    names = [*(f"lr {lr:g}" for lr in lrs), "largest stable lr", "LR sensitivity"]
    lines = ["| body | blocks | warmup | " + " | ".join(names) + " |"]
    lines.append("|---" * (3 + len(names)) + "|")
    keys = sorted({(r["blocks"], r["warmup"], PARTS.index(r["parts"])) for r in records})
    for blocks, warmup, part in keys:
        body = select(records, blocks=blocks, warmup=warmup, parts=PARTS[part])
        unstable = {r["lr"] for r in body if not r["stable"]}
        stable = {r["lr"] for r in body} - unstable
        cells = []
        for lr in lrs:
            top1 = [r["top1"] for r in select(body, lr=lr)]
            star = "*" if lr in unstable else ""
            cells.append(f"{mean(top1):.1f}{star}" if top1 else "-")
        cells += [f"{max(stable):g}" if stable else "none", f"{sensitivity(body):.3f}"]
        lines.append(f"| {PARTS[part]} | {blocks} | {warmup} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sensitivity(body: Sequence[dict[str, Any]]) -> float:
    """Mean over learning rates of min(final loss, uniform guess) minus the best of them."""
    guess = math.log(body[0]["num_classes"])
    losses = [guess if r["final_loss"] is None else min(r["final_loss"], guess) for r in body]
    return mean(losses) - min(losses)


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over learning rate, one panel per depth and warmup, one line per body."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    grids = sorted({(record["blocks"], record["warmup"]) for record in records})
    figure = Figure(figsize=(4.0 * len(grids) + 1.5, 4.0), layout="constrained")
    panels = figure.subplots(1, len(grids), sharey=True, squeeze=False)[0]
    for axes, (blocks, warmup) in zip(panels, grids, strict=True):
        for part in PARTS:
            its = select(records, parts=part, blocks=blocks, warmup=warmup)
            lrs = sorted({r["lr"] for r in its})
            means = [mean([r["top1"] for r in select(its, lr=lr)]) for lr in lrs]
            style = {"marker": "o", "color": f"C{PARTS.index(part)}"}
            if part in ("lipsformer", "plain"):
                style["linewidth"] = 3.0
            if lrs:
                axes.semilogx(lrs, means, label=part, **style)
        axes.set(xlabel="peak learning rate", title=f"{blocks} blocks, warmup {warmup} epochs")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("top-1 on held-out images (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=120)


def plot_losses(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Training loss over updates, a row per depth and warmup, a column per body, a line per lr."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    grids = sorted({(record["blocks"], record["warmup"]) for record in records})
    parts = [part for part in PARTS if select(records, parts=part)]
    lrs = sorted({record["lr"] for record in records})
    size = (2.6 * len(parts) + 1.5, 2.2 * len(grids) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(grids), len(parts), sharex=True, sharey=True, squeeze=False)
    guess = math.log(records[0]["num_classes"])
    for row, (blocks, warmup) in zip(panels, grids, strict=True):
        for axes, part in zip(row, parts, strict=True):
            for record in select(records, parts=part, blocks=blocks, warmup=warmup):
                losses = record["losses"]
                width = max(1, len(losses) // 30)
                smooth = [mean(losses[i : i + width]) for i in range(0, len(losses), width)]
                updates = [min(i + width, len(losses)) for i in range(0, len(losses), width)]
                colour = colormaps["viridis"](lrs.index(record["lr"]) / max(len(lrs) - 1, 1))
                label = f"lr {record['lr']:g}" if record["seed"] == records[0]["seed"] else None
                axes.plot(updates, smooth, color=colour, label=label)
            axes.axhline(guess, color="black", linewidth=0.6, linestyle=":")
            axes.set_title(f"{part}, {blocks} blocks, warmup {warmup}", fontsize=8)
            axes.grid(alpha=0.3)
        row[0].set_ylabel("training loss")
    panels[0, 0].set(yscale="log", ylim=(0.5 * guess, 4.0 * guess))
    for axes in panels[-1]:
        axes.set_xlabel("update")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=110)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, type=Path, help="folder of the results")
    parser.add_argument("--data", nargs="*", default=["source=digits", "img_size=16"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-3, 1e-2, 1e-1])
    parser.add_argument("--warmups", nargs="+", type=int, default=[0], help="epochs")
    parser.add_argument("--blocks", nargs="+", type=int, default=[6])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--embed-dim", type=int, default=24)
    parser.add_argument("--patch-size", type=int, default=2)
    parser.add_argument("--train-images", type=int, help="evenly over the split; default: all")
    parser.add_argument("--val-images", type=int, help="likewise")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    fixed = {name: getattr(options, name) for name in FIXED}
    try:
        if min(options.blocks) < 2 or max(options.warmups) >= options.epochs:
            raise ConfigError("--blocks must be at least 2 and --warmups below --epochs")
        *train, num_classes = load(options.data, training=True, number=options.train_images)
        val = load(options.data, training=False, number=options.val_images)[:2]
        results = options.output / "results.jsonl"
        records = read_results(results)
        if any(record[name] != value for record in records for name, value in fixed.items()):
            raise ConfigError(f"{results} has cells with other settings than {fixed}")
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    options.output.mkdir(parents=True, exist_ok=True)
    results.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = {tuple(record[key] for key in KEYS) for record in records}
    grid = list(
        itertools.product(
            options.parts, options.lrs, options.warmups, options.blocks, options.seeds
        )
    )
    for index, values in enumerate(grid):
        if values in done:
            continue
        record = fixed | run_cell(
            dict(zip(KEYS, values, strict=True)),
            (train[0], train[1]),
            val,
            num_classes=num_classes,
            **{name: fixed[name] for name in TRAINING},
        )
        records.append(record)
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        outcome = f"{record['top1']:.1f} %" + ("" if record["stable"] else ", not stable")
        cell = dict(zip(KEYS, values, strict=True))
        print(f"{index + 1}/{len(grid)}  {cell}: {outcome}", flush=True)
    print(table(records))
    plot(records, options.output / "accuracy.png")
    plot_losses(records, options.output / "losses.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
