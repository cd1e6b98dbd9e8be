"""Reading, writing and summarizing the cells of the league."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from lipsformer.jsonl import append_jsonl, read_jsonl

Record = dict[str, Any]


def read_results(folder: Path) -> list[Record]:
    """Return the finished cells of all data sets."""
    return [record for path in sorted(folder.glob("*.jsonl")) for record in read_jsonl(path)]


def append_result(folder: Path, record: Record) -> None:
    """Append a cell to the file of its data set."""
    folder.mkdir(parents=True, exist_ok=True)
    append_jsonl(folder / f"{record['data']}.jsonl", record)


def select(records: Sequence[Record], **wanted: Any) -> list[Record]:
    """Return the records with the given values."""
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def clipped_loss(record: Record) -> float:
    """Return the mean loss of the last tenth, at most that of a uniform guess."""
    guess = math.log(record["num_classes"])
    final = record["final_loss"]
    return guess if final is None else min(final, guess)


def loss_per_rate(records: Sequence[Record]) -> dict[float, float]:
    """Return the clipped loss of each learning rate, as a mean over its seeds."""
    rates = sorted({record["lr"] for record in records})
    return {lr: mean(clipped_loss(r) for r in select(records, lr=lr)) for lr in rates}


def mean_loss(records: Sequence[Record]) -> float:
    """Return the mean over learning rates of the clipped loss: what a blind choice would give."""
    return mean(loss_per_rate(records).values())


@dataclass(frozen=True)
class Summary:
    """One row of the league at one warmup.

    Attributes:
        largest_stable_lr: Largest rate at which every seed is stable; None if there is none.
        sensitivity: Mean over learning rates of how far the clipped loss lies above the best one
            (Wortsman et al. 2023, arXiv:2309.14322, with the loss of a guess as the ceiling).
        best_top1: Best accuracy of a learning rate on held-out images, mean over seeds, in percent.
        spread: Sample standard deviation of `best_top1` over the seeds; None for one seed.
        best_lr: The learning rate of `best_top1`.
        final_loss: Clipped loss at `best_lr`.
        mean_loss: Mean over learning rates of the clipped loss, by which the league is sorted.
        seeds: Number of seeds of the rate that has the fewest.
    """

    largest_stable_lr: float | None
    sensitivity: float
    best_top1: float
    spread: float | None
    best_lr: float
    final_loss: float
    mean_loss: float
    seeds: int


def summarize(records: Sequence[Record]) -> Summary:
    """Return the summary of the cells of one row and one warmup."""
    losses = loss_per_rate(records)
    stable = [lr for lr in losses if all(r["stable"] for r in select(records, lr=lr))]
    top1 = {lr: mean(r["top1"] for r in select(records, lr=lr)) for lr in losses}
    best_lr = max(top1, key=lambda lr: top1[lr])
    best = [r["top1"] for r in select(records, lr=best_lr)]
    return Summary(
        largest_stable_lr=max(stable, default=None),
        sensitivity=mean(losses.values()) - min(losses.values()),
        best_top1=top1[best_lr],
        spread=stdev(best) if len(best) > 1 else None,
        best_lr=best_lr,
        final_loss=losses[best_lr],
        mean_loss=mean(losses.values()),
        seeds=min(len(select(records, lr=lr)) for lr in losses),
    )
