"""Tables and curves of the finished runs of a study."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.records import markdown, spread
from benchmarks.study.plan import Study

COLUMNS = (
    *("row", "last epoch, %", "seeds", "M parameters"),
    *("MMACs", "PFLOP", "images/s", "hours"),
)


def outcome(line: dict[str, Any]) -> str:
    """Return the last epoch's accuracy, of the raw weights, or why there is none."""
    last = last_evaluation(line)
    if line["exit_code"] != 0 or last is None:
        return f"exit code {line['exit_code']}"
    return f"{last['top1']:.2f} % after epoch {last['epoch']:g}"


def last_evaluation(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the last epoch's evaluation of the raw weights, None without one."""
    raw = [entry for entry in line["evaluations"] if entry["kind"] == "raw"]
    return raw[-1] if raw else None


def table(study: Study) -> str:
    """Return a markdown table of means over complete runs, and the runs that are missing.

    The column of the seeds names the exit codes of runs that ended early, such as diverged ones.
    """
    results = study.lines()
    lines = []
    for row in study.rows:
        own = [line for line in results if line["row"] == row]
        finished = [line for line in own if line["exit_code"] == 0]
        failed = ", ".join(f"exit code {c}" for line in own if (c := line["exit_code"]) != 0)
        if not own:
            continue
        if not finished:
            lines.append((row, failed, len(own), *5 * ("",)))
            continue
        last = [last_evaluation(line) for line in finished]
        first = finished[0]
        cells = [
            row,
            spread([entry["top1"] for entry in last if entry is not None], 2),
            f"{len(finished)}, and {failed}" if failed else str(len(finished)),
            f"{first['parameters'] / 1e6:.2f}",
            f"{first['gmacs'] * 1e3:.1f}",
            f"{first['pflop']:.3f}",
            f"{statistics.median(line['images_per_s'] for line in finished):.0f}",
            f"{sum(line['wall_seconds'] for line in finished) / 3600:.2f}",
        ]
        lines.append(cells)
    text = markdown(COLUMNS, lines)
    done = {(line["row"], line["seed"]) for line in results}
    missing = [f"`{row}` (seed {seed})" for row, seed in study.runs() if (row, seed) not in done]
    if missing:
        text += f"\n\nNot run: {', '.join(missing)}."
    return text


def plot(study: Study, path: Path) -> None:
    """Draw the accuracy of every finished run over its epochs."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    rows = list(study.rows)
    results = study.lines()
    for row in rows:
        for index, line in enumerate(own for own in results if own["row"] == row):
            raw = [entry for entry in line["evaluations"] if entry["kind"] == "raw"]
            style = ("-", "--", ":")[rows.index(row) // 10 % 3]
            axes.plot(
                [entry["epoch"] for entry in raw],
                [entry["top1"] for entry in raw],
                style,
                color=f"C{rows.index(row) % 10}",
                label=row if index == 0 else None,
            )
    axes.set(xlabel="epoch", ylabel="accuracy, %", title=study.title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)
