"""Figures of certified distances, for the report and the demo page."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scripts._certify_picture import DISTANCES, FAILURE, PictureCertificate
from scripts.reporting.figures import Drawing, style
from scripts.reporting.theme import LIGHT, SERIES

CHANGE = "log10 of the change, 2-norm, pixels in [0, 1]"


@style()
def shares_figure(name: str, radii: Sequence[float], right: np.ndarray) -> Drawing:
    """Draw the share of images that are right and certified within a distance.

    Args:
        name: Name of the run.
        radii: Certified distances of the images.
        right: Whether their predictions are right, [images].
    """
    kept = np.sort(np.array(radii)[right])
    kept = kept[kept > 0.0]
    shares = 100.0 * np.arange(len(kept), 0, -1) / len(radii)
    figure = Figure(figsize=(3.9, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.log10(kept), shares, drawstyle="steps-pre")
    axes.set(xlabel=CHANGE, ylabel="right and certified, %")
    axes.set_ylim(0.0, 100.0)
    half = np.median(np.where(right, radii, 0.0))
    text = (
        "Line chart of the share of images that are right and certified within a distance. Half of "
        f"all images have at least {half:.3g}."
    )
    return Drawing(f"certified_{name.replace('/', '_')}", "Certified accuracy", text, figure)


@style()
def picture_figure(name: str, found: PictureCertificate) -> Drawing:
    """Draw the margin of a picture over the distance: what is proved, and what an attack finds.

    Args:
        name: Name of the run or model.
        found: What is proved about the picture, and what an attack finds.
    """
    ends = [found.everywhere, DISTANCES[0]]
    if found.around:
        ends.append(found.around)
    low = math.floor(math.log10(max(min(ends), 1e-300))) - 1
    high = math.log10(DISTANCES[-1])
    powers = np.linspace(low, high, 400)
    proved = found.margin * np.clip(1.0 - 10.0**powers / max(found.everywhere, 1e-300), 0.0, None)
    figure = Figure(figsize=(3.9, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(powers, proved, color=SERIES[2], alpha=0.2, linewidth=0)
    axes.plot(powers, proved, color=SERIES[2], label="proved by the constant")
    if found.around:
        axes.axvline(
            math.log10(found.around),
            color=SERIES[0],
            linestyle="--",
            label="the class is proved up to here",
        )
    steps = [low, *np.log10(DISTANCES)]
    kept = np.clip([found.margin, *found.found], 0.0, None)
    axes.plot(steps, kept, color=SERIES[1], label="found by an attack")
    axes.axhline(0.0, color=LIGHT["line"])
    axes.set(xlabel=CHANGE, ylabel="margin to the second class")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper left", ncols=2)
    file, title = f"picture_{name.replace('/', '_')}", "How far a picture may change"
    return Drawing(file, title, sentences(found), figure)


def sentences(found: PictureCertificate) -> str:
    """Say what is proved about a picture and what an attack found."""
    parts = [
        f"The margin to the second class is {found.margin:.3g}, and the Lipschitz constant of the "
        f"logits is at most 10^{found.constant_log10:.1f}: no change shorter than "
        f"{found.everywhere:.2g} changes the class."
    ]
    if found.around is not None:
        parts.append(
            f"Around this picture that is proved up to {found.around:.2g}, with a probability of "
            f"10^{math.log10(FAILURE):g} that this is wrong."
        )
    parts.append("Rounding is not counted here.")
    at = f"{found.attacked:.2g}"
    if found.attacked == math.inf:
        parts.append(f"An attack found no other class within {DISTANCES[-1]:.2g}.")
    else:
        parts.append(f"An attack changes the class with a change of length {at}.")
    return " ".join(parts)
