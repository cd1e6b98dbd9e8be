"""The tables of the predictions, as Markdown."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.gpu_predictions.cubins import ARCHITECTURES
from benchmarks.gpu_predictions.devices import DEVICES
from benchmarks.records import markdown

REFERENCE = "swin_tiny_patch4_window7_224"
STATE_BYTES = 16  # per parameter: weight, gradient and two moments of AdamW in float32
Record = dict[str, Any]
Column = tuple[str, Callable[[Record], float], str]


def peak_gigabytes(record: Record, batch: int) -> float:
    """Return the memory of a compiled step, which grows linearly with the batch.

    The gradients count twice, in the state and in the peak of the backward pass, so it is slightly
    too large.
    """
    per_image = record["compiled"]["peak_bytes"] / record["batch_size"]
    return (STATE_BYTES * record["parameters"] + per_image * batch) / 1e9


def _operators(part: str) -> Callable[[Record], float]:
    return lambda record: record["eager"]["operators"][part]


def _kernels(record: Record) -> float:
    return record["compiled"]["forward_kernels"] + record["compiled"]["backward_kernels"]


def _per_image(part: str, key: str, unit: float) -> Callable[[Record], float]:
    return lambda record: record[part][key] / record["batch_size"] / unit


def _milliseconds(device: str) -> Callable[[Record], float]:
    return lambda record: record["compiled"]["least_seconds"][device] * 1e3


def _peak(batch: int) -> Callable[[Record], float]:
    return lambda record: peak_gigabytes(record, batch)


TABLES: dict[str, Sequence[Column]] = {
    "Operators of an eager step and kernels of a compiled one": (
        ("forward", _operators("forward"), ".0f"),
        ("backward", _operators("backward"), ".0f"),
        ("AdamW", _operators("optimizer"), ".0f"),
        ("all but AdamW", lambda r: _operators("forward")(r) + _operators("backward")(r), ".0f"),
        ("compiled", _kernels, ".0f"),
    ),
    "Work of a compiled step per image": (
        ("GFLOP of products", _per_image("compiled", "products", 1e9), ".1f"),
        ("MB read and written", _per_image("compiled", "bytes", 1e6), ".0f"),
        ("MB saved, eager", _per_image("eager", "saved_bytes", 1e6), ".1f"),
        ("MB saved, compiled", _per_image("compiled", "saved_bytes", 1e6), ".1f"),
    ),
    "Peak memory of a compiled step by batch size, GB": tuple(
        (str(batch), _peak(batch), ".1f") for batch in (32, 64, 128, 256, 512)
    ),
    "Least time of a compiled step, ms": tuple(
        (device, _milliseconds(device), ".2f") for device in DEVICES
    ),
}
HOST_COLUMNS = (
    *("model", "graphs", "breaks", "waits", "kernels"),
    *("with spills", "registers", "occupancy", "128-bit loads"),
)
TRITON_COLUMNS = (
    *("kernel", "GPU", "channels", "registers"),
    *("spilled bytes", "occupancy", "loads by bits"),
)


def page(records: Iterable[Record]) -> str:
    """Return the tables of the models, with ratios to Swin-Tiny, and that of the Triton kernels."""
    known = list(records)
    rows = sorted((r for r in known if "model" in r), key=lambda record: record["model"])
    reference = next((record for record in rows if record["model"] == REFERENCE), None)
    tables = [*(_table(title, rows, reference) for title in TABLES), _host_table(rows)]
    return "\n\n".join([*tables, *(_kernel_table(r["kernels"]) for r in known if "kernels" in r)])


def _host_table(rows: Sequence[Record]) -> str:
    """Return what a step asks of the host, and what Inductor's kernels need on an H100."""
    shown = []
    for row in rows:
        regions = row.get("regions")
        waits = row["eager"].get("host_reads")
        kernels = row.get("compiled", {}).get("generated", {}).get("H100")
        if regions is None and waits is None and kernels is None:
            continue
        cells = [
            f"`{row['model']}`",
            *((regions["graphs"], sum(regions["breaks"].values())) if regions else ("", "")),
            "" if waits is None else sum(waits.values()),
        ]
        if kernels is None:
            cells += [""] * 5
        else:
            loads = kernels["loads_by_bits"]
            cells += [
                kernels["kernels"],
                len(kernels["spilling"]),
                f"up to {kernels['registers']}",
                f"from {100 * kernels['occupancy']:.0f} %",
                f"{100 * loads.get('128', 0) / sum(loads.values()):.0f} %",
            ]
        shown.append(cells)
    title = "The host in a step, and the Triton kernels that Inductor writes for an H100:"
    return f"{title}\n\n{markdown(HOST_COLUMNS, shown)}"


def _kernel_table(kernels: Sequence[Record]) -> str:
    rows = []
    for row in kernels:
        loads = ", ".join(f"{bits}: {number}" for bits, number in row["loads_by_bits"].items())
        cells = (
            f"`{row['kernel']}`",
            ARCHITECTURES[row["architecture"]].gpu,
            *(row[key] for key in ("channels", "registers", "spilled_bytes")),
            f"{100 * row['occupancy']:.0f} %",
            loads,
        )
        rows.append(cells)
    title = "Triton kernels of graph attention, 8 heads, float32:"
    return f"{title}\n\n{markdown(TRITON_COLUMNS, rows)}"


def _table(title: str, rows: Sequence[Record], reference: Record | None) -> str:
    columns = TABLES[title]
    header = ("model", *(name for name, _, _ in columns))
    cells = (
        (f"`{row['model']}`", *(_cell(row, reference, value, form) for _, value, form in columns))
        for row in rows
    )
    return f"{title}:\n\n{markdown(header, cells)}"


def _cell(
    row: Record, reference: Record | None, value: Callable[[Record], float], form: str
) -> str:
    """Return a figure and its ratio to Swin-Tiny; nothing if the model was not compiled."""
    try:
        cell = format(value(row), form)
        if reference is not None and row["image_size"] == reference["image_size"]:
            cell += f" ({value(row) / value(reference):.2f}x)"
    except KeyError:
        return ""
    return cell
