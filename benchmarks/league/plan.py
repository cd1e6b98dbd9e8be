"""Which cells the league has, and in which order they are run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.league.bodies import BODIES
from benchmarks.league.cell import OPTIMIZERS, Cell
from benchmarks.league.results import mean_loss, select

MULTIPLES = (0.1, 0.4, 1.6, 6.3, 25.0, 100.0)  # of an optimizer's usual learning rate
WARMUPS = (0.0, 0.1)
SEEDS = (0, 1, 2)
DEPTHS = (12, 48, 96)
DEPTH_UPDATES = 200
VERY_DEEP = (12, 192)  # CenterNorm's factor is 1.5e7 over 192 blocks
VERY_DEEP_MULTIPLES = (1.0, 2.0, 4.0)  # of the usual learning rate
BEST = 6  # bodies that go on to Imagenette, beside `plain` and `lipsformer`
WITH_ALL_OPTIMIZERS = ("lipsformer", "plain", "plain + QK-norm")

Record = dict[str, Any]


def entries() -> list[tuple[str, str]]:
    """Return (body, optimizer) of every row of the league."""
    rows = [(body, "adamw") for body in BODIES]
    others = [name for name in OPTIMIZERS if name != "adamw"]
    return rows + [(body, other) for other in others for body in WITH_ALL_OPTIMIZERS]


def rates(optimizer: str) -> list[float]:
    """Return the learning rates of an optimizer: six over three decades."""
    return [float(f"{OPTIMIZERS[optimizer].usual_lr * k:.3g}") for k in MULTIPLES]


def grid(data: str, rows: Sequence[tuple[str, str]], warmup: float, seed: int) -> list[Cell]:
    """Return the cells of some rows at all learning rates."""
    return [
        Cell(data=data, body=body, optimizer=optimizer, lr=lr, warmup=warmup, seed=seed)
        for body, optimizer in rows
        for lr in rates(optimizer)
    ]


def stages(records: Sequence[Record], data: Sequence[str]) -> Iterator[list[Cell]]:
    """Yield the cells in the order in which they are wanted.

    First comes seed 0 of every row without warmup, then with warmup, Imagenette, the depths, and
    the further seeds. The cells of the greatest depth are last, because one of them takes longer
    than all others of a seed together. Imagenette and the depths are chosen from the cells of seed
    0 without warmup, so they are missing until these are there.

    Args:
        records: Finished cells of all data sets.
        data: Data sets of the league to run.
    """
    if "cifar10" in data:
        yield first_stage()
        yield grid("cifar10", entries(), WARMUPS[1], SEEDS[0])
    if can_choose(records):
        if "imagenette" in data:
            yield grid("imagenette", imagenette_rows(records), WARMUPS[0], SEEDS[0])
        if "cifar10" in data:
            yield depth_cells(records)
    if "cifar10" in data:
        for warmup in WARMUPS:
            for seed in SEEDS[1:]:
                yield grid("cifar10", entries(), warmup, seed)
        yield very_deep_cells()


def first_stage() -> list[Cell]:
    """Return the cells from which Imagenette's bodies and the rates of the depths are chosen."""
    return grid("cifar10", entries(), WARMUPS[0], SEEDS[0])


def can_choose(records: Sequence[Record]) -> bool:
    """Return whether all cells of the first stage have finished."""
    return set(first_stage()) <= cells(records)


def cells(records: Sequence[Record]) -> set[Cell]:
    """Return the cells of lines of results."""
    names = asdict(Cell(data="", body="", optimizer="", lr=0.0, warmup=0.0, seed=0))
    return {Cell(**{name: record[name] for name in names}) for record in records}


def first_grid(records: Sequence[Record], body: str) -> list[Record]:
    """Return the lines of a row from which further runs are chosen."""
    row = {"body": body, "optimizer": "adamw", "warmup": WARMUPS[0], "seed": SEEDS[0]}
    return select(records, **row, data="cifar10", blocks=6)


def imagenette_rows(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the bodies with the smallest mean loss over the learning rates, and the fixed two."""
    order = sorted(BODIES, key=lambda body: mean_loss(first_grid(records, body)))
    return [(b, "adamw") for b in BODIES if b in order[:BEST] or b in ("plain", "lipsformer")]


def very_deep_cells() -> list[Cell]:
    """Return the cells that compare both forms of CenterNorm at 12 and at 192 blocks."""
    cell = {"data": "cifar10", "optimizer": "adamw", "warmup": 0.0, "updates": DEPTH_UPDATES}
    return [
        Cell(blocks=depth, body=body, lr=multiple * OPTIMIZERS["adamw"].usual_lr, seed=seed, **cell)
        for seed in SEEDS
        for depth in VERY_DEEP
        for body in ("lipsformer, unit norm", "lipsformer")
        for multiple in VERY_DEEP_MULTIPLES
    ]


def deep(records: Sequence[Record]) -> list[Record]:
    """Return the lines of `depth_cells`."""
    return [r for r in records if r["blocks"] in DEPTHS and r["lr"] in rates("adamw")]


def depth_cells(records: Sequence[Record]) -> list[Cell]:
    """Return the cells of the depths, each body at its best stable learning rate of six blocks."""
    found = []
    for body in BODIES:
        best = max(first_grid(records, body), key=lambda r: (r["stable"], r["top1"]))
        cell = {"body": body, "optimizer": "adamw", "lr": best["lr"], "updates": DEPTH_UPDATES}
        cell |= {"data": "cifar10", "warmup": WARMUPS[0], "seed": SEEDS[0]}
        found += [Cell(blocks=depth, **cell) for depth in DEPTHS]
    return sorted(found, key=lambda cell: cell.blocks)


def next_cell(
    records: Sequence[Record], running: set[Cell], data: Sequence[str], only: Sequence[str] = ()
) -> Cell | None:
    """Return the first cell that is neither finished nor running, None if there is none.

    Args:
        records: Finished cells.
        running: Cells that are being run.
        data: Data sets to run.
        only: Names of bodies to run; empty for all.
    """
    done = cells(records) | running
    for stage in stages(records, data):
        for cell in stage:
            if cell not in done and (not only or cell.body in only):
                return cell
    return None
