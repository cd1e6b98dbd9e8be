"""Train LipsFormer and bodies with some of its parts swapped out over learning rates and depths.

    python -m scripts.stability_sweep --output outputs/stability --data source=digits img_size=16 \
        --parts lipsformer plain --lrs 1e-3 1e-2 1e-1 --warmups 0 5 --blocks 6 --epochs 10

Every cell of the grid is one line of results.jsonl; cells that are there are not run again, so the
same command continues. AdamW, cosine, no augmentation, no clipping, fp32, the same data order for
every cell of a seed. At the end: a table, and accuracy over learning rate as a PNG.

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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import DataError, Normalize, build_eval_dataset
from lipsformer.config import ConfigError, DataConfig, make_config
from lipsformer.engine.runtime import EXIT_USER_ERROR
from lipsformer.engine.schedule import CosineSchedule
from lipsformer.layers import CenterNorm, DepthwiseConv2d, ScaledCosineAttention, WeightedResidual
from lipsformer.models.lipsformer_swin import LipsFormerSwin

SWAPS = ("layernorm", "dot_product", "plain_residual", "default_init")
PARTS = ("lipsformer", *SWAPS, "plain")
KEYS = ("parts", "lr", "warmup", "blocks", "seed")


class DotProductAttention(nn.Module):
    """softmax(q k^T / sqrt(d) + bias) v, in the place of ``ScaledCosineAttention``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias)


def build(parts: str, blocks: int, img_size: int, num_classes: int, embed_dim: int) -> nn.Module:
    """Two stages with a third and two thirds of the blocks, and the swaps made."""
    first = max(1, blocks // 3)
    model = LipsFormerSwin(
        img_size=img_size,
        patch_size=2,
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


def load(settings: Sequence[str], split: str) -> tuple[Tensor, Tensor, int]:
    """All images of a split, normalised, and their labels."""
    preset = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    data = make_config(DataConfig, [preset], [*settings, f"val_split={split}"], origin="--data")
    dataset = build_eval_dataset(data, classes=None)
    items = [dataset[i] for i in range(len(dataset))]
    images = Normalize(data)(torch.stack([torch.as_tensor(image) for image, _ in items]))
    return images, torch.tensor([label for _, label in items]), len(dataset.classes)


def run_cell(
    cell: dict[str, Any],
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    *,
    num_classes: int,
    epochs: int,
    batch_size: int,
    embed_dim: int,
) -> dict[str, Any]:
    """Train one cell; stops at the first loss that is not finite."""
    torch.manual_seed(cell["seed"])
    images, labels = train
    model = build(cell["parts"], cell["blocks"], images.shape[-1], num_classes, embed_dim).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=cell["lr"], weight_decay=0.05)
    per_epoch = len(images) // batch_size
    schedule = CosineSchedule(
        peak=cell["lr"],
        final=0.0,
        total_updates=epochs * per_epoch,
        warmup_updates=cell["warmup"] * per_epoch,
    )
    order = torch.Generator().manual_seed(cell["seed"])
    losses: list[float] = []
    for epoch in range(epochs):
        total = 0.0
        shuffled = torch.randperm(len(images), generator=order)[: per_epoch * batch_size]
        for step, batch in enumerate(shuffled.split(batch_size)):
            optimizer.param_groups[0]["lr"] = schedule(epoch * per_epoch + step)
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / per_epoch)
        if not math.isfinite(total):
            break
    model.eval()
    with torch.no_grad():
        predictions = torch.cat([model(part).argmax(1) for part in val[0].split(256)])
    finite = math.isfinite(losses[-1])
    return {
        **cell,
        "epochs": epochs,
        "batch_size": batch_size,
        "embed_dim": embed_dim,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
        # worse than the uniform guess at the end
        "diverged": not finite or losses[-1] >= math.log(num_classes),
        "top1": 100.0 * (predictions == val[1]).double().mean().item() if finite else 0.0,
    }


def read_results(path: Path) -> list[dict[str, Any]]:
    """Finished cells; a line that was cut off by a kill is left out and its cell run again."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Accuracy per cell, mean over seeds; a star where a seed diverged."""
    lrs = sorted({record["lr"] for record in records})
    lines = ["| body | blocks | warmup | " + " | ".join(f"lr {lr:g}" for lr in lrs) + " |"]
    lines.append("|---" * (3 + len(lrs)) + "|")
    keys = sorted(
        {(r["blocks"], r["warmup"], PARTS.index(r["parts"])) for r in records},
    )
    for blocks, warmup, part in keys:
        cells = []
        for lr in lrs:
            wanted = (PARTS[part], lr, warmup, blocks)
            its = [r for r in records if tuple(r[key] for key in KEYS[:4]) == wanted]
            if not its:
                cells.append("-")
                continue
            mean = sum(r["top1"] for r in its) / len(its)
            cells.append(f"{mean:.1f}{'*' if any(r['diverged'] for r in its) else ''}")
        lines.append(f"| {PARTS[part]} | {blocks} | {warmup} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over learning rate, one panel per depth, one line per body and warmup."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    depths = sorted({record["blocks"] for record in records})
    figure = Figure(figsize=(4.8 * len(depths) + 1.5, 4.0), layout="constrained")
    panels = figure.subplots(1, len(depths), sharey=True, squeeze=False)[0]
    warmups = sorted({record["warmup"] for record in records})
    for axes, blocks in zip(panels, depths, strict=True):
        for part, warmup in itertools.product(PARTS, warmups):
            its = [r for r in records if (r["parts"], r["warmup"]) == (part, warmup)]
            its = [r for r in its if r["blocks"] == blocks]
            lrs = sorted({r["lr"] for r in its})
            means = []
            for lr in lrs:
                at = [r["top1"] for r in its if r["lr"] == lr]
                means.append(sum(at) / len(at))
            label = part + (f", warmup {warmup}" if len(warmups) > 1 else "")
            style = "o-" if warmup == 0 else "s--"
            if lrs:
                axes.semilogx(lrs, means, style, label=label, color=f"C{PARTS.index(part)}")
        axes.set(xlabel="peak learning rate", title=f"{blocks} blocks")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("top-1 on held-out images (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=120)


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
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    fixed = {name: getattr(options, name) for name in ("epochs", "batch_size", "embed_dim")}
    try:
        if min(options.blocks) < 2 or max(options.warmups) >= options.epochs:
            raise ConfigError("--blocks must be at least 2 and --warmups below --epochs")
        *train, num_classes = load(options.data, "train")
        val = load(options.data, "val")[:2]
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
        record = run_cell(
            dict(zip(KEYS, values, strict=True)),
            (train[0], train[1]),
            val,
            num_classes=num_classes,
            **fixed,
        )
        records.append(record)
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        outcome = "diverged" if record["diverged"] else f"{record['top1']:.1f} %"
        print(f"{index + 1}/{len(grid)}  {dict(zip(KEYS, values, strict=True))}: {outcome}")
    print(table(records))
    plot(records, options.output / "stability.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
