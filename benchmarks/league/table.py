"""The tables of the league, in markdown."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.league.bodies import BODIES
from benchmarks.league.cell import OPTIMIZERS
from benchmarks.league.plan import (
    DEPTHS,
    SEEDS,
    VERY_DEEP,
    WARMUPS,
    cells,
    deep,
    entries,
    rates,
    stages,
    very_deep_cells,
)
from benchmarks.league.results import Summary, select, summarize
from benchmarks.records import markdown

Record = dict[str, Any]
SUMMARY = (
    *("body", "optimizer", "mean loss over rates", "largest stable lr", "times usual", "rank"),
    *("LR sensitivity", "rank", "best accuracy, %", "at lr", "rank", "final loss there", "seeds"),
)
TITLES = {"cifar10": "CIFAR-10", "imagenette": "Imagenette at 32 px"}


def finished_rows(
    records: Sequence[Record], data: str, warmup: float
) -> dict[tuple[str, str], list[Record]]:
    """Return the lines of each (body, optimizer) that has every learning rate, best rows first."""
    found = {}
    for body, optimizer in entries():
        row = {"data": data, "warmup": warmup, "blocks": 6}
        own = select(records, body=body, optimizer=optimizer, **row)
        if {r["lr"] for r in own} == set(rates(optimizer)):
            found[body, optimizer] = own
    return dict(sorted(found.items(), key=lambda item: summarize(item[1]).mean_loss))


def rank(values: Sequence[float], value: float) -> int:
    """Return the place of a value among values of which the smallest is the best."""
    return 1 + sum(other < value for other in values)


def multiple(summary: Summary, optimizer: str) -> float:
    """Return the largest stable rate as a multiple of the optimizer's usual rate, 0 for none."""
    return (summary.largest_stable_lr or 0.0) / OPTIMIZERS[optimizer].usual_lr


def best_accuracy(summary: Summary) -> str:
    """Return the best accuracy in percent, with its standard deviation over several seeds."""
    spread = "" if summary.spread is None else f" ± {summary.spread:.1f}"
    return f"{summary.best_top1:.1f}{spread}"


def summary_table(records: Sequence[Record], data: str, warmup: float) -> str:
    """Return one line per row of the league: stability, sensitivity, accuracy and their ranks."""
    rows = {key: summarize(own) for key, own in finished_rows(records, data, warmup).items()}
    multiples = {key: multiple(summary, key[1]) for key, summary in rows.items()}
    lines = []
    for (body, optimizer), summary in rows.items():
        key = (body, optimizer)
        stable = summary.largest_stable_lr
        others = rows.values()
        columns = [
            body,
            optimizer,
            f"{summary.mean_loss:.3f}",
            "none" if stable is None else f"{stable:g}",
            f"{multiples[key]:.3g}",
            rank([-m for m in multiples.values()], -multiples[key]),
            f"{summary.sensitivity:.3f}",
            rank([other.sensitivity for other in others], summary.sensitivity),
            best_accuracy(summary),
            f"{summary.best_lr:g}",
            rank([-other.best_top1 for other in others], -summary.best_top1),
            f"{summary.final_loss:.3f}",
            summary.seeds,
        ]
        lines.append(columns)
    return markdown(SUMMARY, lines)


def accuracy_table(records: Sequence[Record], data: str, warmup: float) -> str:
    """Return the accuracy of every cell, a star where a seed was not stable."""
    header = ("body", "optimizer", *(f"{k:g} x usual" for k in all_multiples()))
    rows = (
        (body, optimizer, *(accuracy(select(own, lr=lr)) for lr in rates(optimizer)))
        for (body, optimizer), own in finished_rows(records, data, warmup).items()
    )
    return markdown(header, rows)


def accuracy(records: Sequence[Record]) -> str:
    """Return the mean accuracy, with a star if a seed was not stable; a dash without records."""
    if not records:
        return "-"
    star = "" if all(r["stable"] for r in records) else "*"
    return f"{mean(r['top1'] for r in records):.1f}{star}"


def depth_table(records: Sequence[Record]) -> str:
    """Return the accuracy and the final loss of every body over its number of blocks."""
    header = ["body", "lr"]
    for depth in DEPTHS:
        header += [f"{depth} blocks, %", "loss"]
    lines = []
    for body in BODIES:
        own = select(deep(records), body=body)
        if not own:
            continue
        columns = [body, f"{own[0]['lr']:g}"]
        for depth in DEPTHS:
            there = select(own, blocks=depth)
            final = there[0]["final_loss"] if there else None
            columns += [accuracy(there), "-" if final is None else f"{final:.3f}"]
        lines.append(columns)
    return markdown(header, lines)


def very_deep_table(records: Sequence[Record]) -> str:
    """Return the losses of both forms of CenterNorm at 12 and at 192 blocks, as means of seeds."""
    losses = ("loss, updates 1 to 10", "loss, last ten updates")
    rows = []
    for cell in very_deep_cells():
        row = {"body": cell.body, "blocks": cell.blocks, "lr": cell.lr}
        own = select(records, **row, updates=cell.updates)
        if cell.seed != SEEDS[0] or not own:
            continue
        first, last = ([r["losses"][i] for r in own] for i in (0, -1))
        rows.append((*row.values(), loss(first), loss(last), accuracy(own), len(own)))
    return markdown(("body", "blocks", "lr", *losses, "accuracy, %", "seeds"), rows)


def loss(values: Sequence[float | None]) -> str:
    """Return the mean loss of some seeds with its standard deviation, whole if it is above 10.

    A dash stands for it if the loss of a seed is None, which says that it was not finite.
    """
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return "-"
    digits = ".3f" if mean(finite) < 10 else ",.0f"
    spread = f" ± {stdev(finite):{digits}}" if len(finite) > 1 else ""
    return f"{mean(finite):{digits}}{spread}"


def page(records: Sequence[Record]) -> str:
    """Return all tables, and how many cells are missing."""
    parts = []
    for data in TITLES:
        for warmup in WARMUPS:
            if finished_rows(records, data, warmup):
                parts += [
                    f"### {TITLES[data]}, {warmup_title(warmup)}",
                    summary_table(records, data, warmup),
                    "Accuracy on held-out training images in percent; a star marks cells with a "
                    "seed that was not stable.",
                    accuracy_table(records, data, warmup),
                ]
    if any(r["blocks"] == max(VERY_DEEP) for r in records):
        parts += ["### 192 blocks, 200 updates", very_deep_table(records)]
    if deep(records):
        parts += ["### Depth, each body at its best rate of six blocks", depth_table(records)]
    wanted = {cell for stage in stages(records, tuple(TITLES)) for cell in stage}
    parts.append(f"Not run: {len(wanted - cells(records))} of {len(wanted)} cells.")
    if records:
        hours = sum(r["cpu_seconds"] for r in records) / 3600
        parts.append(f"Computing time: {hours:.1f} core-hours.")
    return "\n\n".join(parts)


def all_multiples() -> list[float]:
    usual = OPTIMIZERS["adamw"].usual_lr
    return [float(f"{lr / usual:.3g}") for lr in rates("adamw")]


def warmup_title(share: float) -> str:
    return f"warmup {100 * share:g} % of the updates" if share else "no warmup"
