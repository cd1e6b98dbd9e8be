"""What the demo page shows: a model's answers about a picture, as HTML."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from data.images import ArrayPicture, EncodedPicture, Picture
from data.sources import digits
from lipsformer.analysis.bounds import UnknownModuleError
from scripts._classifier import Classifier
from scripts.reporting.certificates import picture_figure
from scripts.reporting.pictures import InlineImage, overlaid

MIN_TOKENS = 64  # of the map that is shown first
ALL_HEADS = "mean"


@dataclass(frozen=True)
class Sample:
    """A picture that comes with the page.

    Attributes:
        name: Its name on the page.
        array: uint8 [H, W] or [H, W, 3].
        credit: Its source, as HTML.
    """

    name: str
    array: np.ndarray
    credit: str


def load_samples(model: Classifier) -> list[Sample]:
    """Return pictures of scikit-learn; for a model of digits, held-out digits come first."""
    from sklearn.datasets import load_sample_image

    def photo(name: str, author: str) -> Sample:
        page = f"https://www.flickr.com/photos/{author}"
        credit = f'{name} by <a href="{page}" rel="noreferrer">{author}</a> (CC BY 2.0)'
        return Sample(name, load_sample_image(f"{name}.jpg"), credit)

    photos = [photo("china", "danielbuechele"), photo("flower", "vultilion")]
    if model.classes != [str(digit) for digit in range(10)]:
        return photos
    held_out = digits("val", img_size=model.data.img_size, interpolation=model.data.interpolation)
    first = {digit: held_out.labels.tolist().index(digit) for digit in (3, 5, 8)}
    return [
        *(
            Sample(f"digit {d}", held_out.images[i], "digits of scikit-learn")
            for d, i in first.items()
        ),
        *photos,
    ]


def figure(array: np.ndarray, text: str, caption: str = "") -> str:
    """Return an image as HTML that contains it, so that no file is made."""
    source = InlineImage.of(array, text).uri
    words = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure><img src="{source}" alt="{html.escape(text)}">{words}</figure>'


def bars(classes: Sequence[str], probabilities: Tensor, before: Tensor | None = None) -> str:
    """Return bars of the five best classes as HTML.

    Args:
        classes: Names of the K classes.
        probabilities: Their probabilities, [K].
        before: Probabilities to mark on the bars, [K].
    """
    rows = []
    best = probabilities.topk(min(5, len(classes)))
    for share, index in zip(*(part.tolist() for part in best), strict=True):
        mark = "" if before is None else f'<i style="left:{100 * before[index]:.2f}%"></i>'
        rows.append(
            f"<li><span>{html.escape(classes[index])}</span><b>{100 * share:.1f} %</b>"
            f'<div><div style="width:{100 * share:.2f}%"></div>{mark}</div></li>'
        )
    return f'<ol class="bars">{"".join(rows)}</ol>'


class Answers:
    """The contents of the page. Images are uint8 [H, W, 3] of the size that the model takes."""

    def __init__(self, model: Classifier):
        self.model = model
        self.samples = load_samples(model)
        first = self.samples[0]
        self.image, self.seen = self.look(ArrayPicture(first.array), first.name)
        try:
            maps = model.attention(self.image)
        except TypeError as error:
            maps, self.no_attention = {}, str(error)
        self.heads = {block: len(received) for block, received in maps.items()}
        fine = [block for block, received in maps.items() if received[0].size >= MIN_TOKENS]
        self.block = (fine or list(maps) or [None])[-1]

    def take(self, path: Path) -> tuple[np.ndarray, str]:
        """Like `look`, for a file, which is then deleted."""
        try:
            picture = EncodedPicture(path.read_bytes(), path.name)
        finally:
            path.unlink(missing_ok=True)
        return self.look(picture, path.name)

    def look(self, picture: Picture, name: str) -> tuple[np.ndarray, str]:
        """Return the image that the model sees of a picture, and its figure as HTML.

        Raises:
            UnreadableImageError: If the picture cannot be used.
        """
        image = self.model.prepare(picture)
        width, height = picture.size
        caption = (
            f"<b>{html.escape(name)}</b>, {width} x {height} pixels, as the model sees it: "
            f"{image.shape[1]} x {image.shape[0]}"
        )
        return image, figure(image, f"{name}, as the model sees it", caption)

    def predict(self, image: np.ndarray) -> str:
        """Return the five best classes of an image as HTML."""
        return bars(self.model.classes, self.model.probabilities(image))

    def attend(self, image: np.ndarray, block: str | None, head: str) -> str:
        """Return the attention of a block and head, drawn over the image, as HTML."""
        if block is None:
            return f"<p>{html.escape(self.no_attention)}</p>"
        heads = self.model.attention(image)[block]
        received = heads.mean(0) if head == ALL_HEADS else heads[int(head) - 1]
        low, high = float(received.min()), float(received.max())
        shares = (received - low) / max(high - low, 1e-9)
        caption = (
            f'{low:.2f} <i class="scale"></i> {high:.2f}<br>Attention that each of the '
            f"{received.shape[1]} x {received.shape[0]} tokens receives; 1 were it uniform."
        )
        text = f"attention that the tokens of {block} receive, head: {head}"
        return figure(overlaid(image, shares), text, caption)

    def choices(self, block: str) -> list[str]:
        """Return the names of the heads of a block."""
        return [ALL_HEADS, *(str(head + 1) for head in range(self.heads[block]))]

    def disturb(self, image: np.ndarray, level: float) -> str:
        """Return the prediction under noise, with marks for the prediction without it, as HTML."""
        noisy = self.model.with_noise(image, level)
        caption = (
            f"Noise of length {noisy.length:.2f} moved the logits by {noisy.moved:.2f}. "
            "The marks are the prediction without it."
        )
        shown = figure(noisy.image, f"the picture with noise of {level:g}", caption)
        before = self.model.probabilities(image)
        return shown + bars(self.model.classes, noisy.probabilities, before)

    def measure(self, image: np.ndarray) -> str:
        """Return the local Lipschitz constant at an image as HTML."""
        found = self.model.sensitivity(image)
        reach = found.margin / (2**0.5 * found.constant)
        caption = (
            f"<strong>{found.constant:.3g}</strong> Local Lipschitz constant from pixel values in "
            "[0, 1] to logits, both in the 2-norm: a change of small length r moves the logits by "
            f"up to {found.constant:.3g} r, most of all in the bright pixels. The second class is "
            f"{found.margin:.2f} behind: to first order, no change shorter than {reach:.2g} puts "
            "it in front."
        )
        return figure(
            overlaid(image, found.direction), "the pixels that move the logits most", caption
        )

    def certify(self, image: np.ndarray) -> str:
        """Return what is proved about an image, and what an attack finds, as HTML."""
        try:
            drawing = picture_figure(self.model.name, self.model.certify(image))
        except UnknownModuleError as error:
            return f"<p>Nothing is proved about this model: {html.escape(str(error))}</p>"
        source = InlineImage(drawing.png(), "png", drawing.title).uri
        text = html.escape(drawing.text)
        return (
            f'<figure><img src="{source}" alt="{drawing.title}" class="chart">'
            f"<figcaption>{text}</figcaption></figure>"
        )
