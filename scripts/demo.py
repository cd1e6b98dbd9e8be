"""Serve a page on which a model classifies your pictures.

    python -m scripts.demo --checkpoint outputs/demo

The page shows the five best classes of a picture, where a block and a head attend, how the
prediction changes under noise, an estimate of the local Lipschitz constant, and how far the picture
may change: what is proved, and what an attack finds. The server listens on localhost unless --host
names another address, loads nothing from the network, and does not store uploads. It needs
`pip install 'lipsformer[train,web]'`. Exit code 2 for a mistake.
"""

import argparse
import html
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from data import DataError, UnreadableImageError
from data.images import ADVICE, ArrayPicture, EncodedPicture, Picture
from data.sources import digits
from lipsformer._checks import require
from lipsformer._commands import documented_parser, user_errors
from lipsformer._errors import ConfigError
from lipsformer.analysis.bounds import UnknownModuleError
from lipsformer.analysis.cost import count_parameters
from lipsformer.engine.run_files import CheckpointError
from lipsformer.engine.run_folder import WHICH, WHICH_HELP, find_weights
from scripts._classifier import MAX_UPLOAD, Classifier
from scripts.reporting.certificates import picture_figure
from scripts.reporting.pictures import InlineImage, overlaid

QUEUE = 16  # requests that wait; the others are refused
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MIN_TOKENS = 64  # of the map that is shown first
ALL_HEADS = "mean"
CSS = Path(__file__).with_name("demo.css")


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
            drawing = picture_figure(self.model.certify(image))
        except UnknownModuleError as error:
            return f"<p>Nothing is proved about this model: {html.escape(str(error))}</p>"
        source = InlineImage(drawing.png(), "png", drawing.title).uri
        text = html.escape(drawing.text)
        return (
            f'<figure><img src="{source}" alt="{drawing.title}" class="chart">'
            f"<figcaption>{text}</figcaption></figure>"
        )


def build(answers: Answers, title: str) -> Any:
    """Build the page as Gradio's `Blocks`."""
    import gradio as gr

    def on_upload(path: str | None) -> dict[Any, Any]:
        if path is None:
            return {notice: ""}
        try:
            return {upload: None, notice: "", **news(*answers.take(Path(path)))}
        except UnreadableImageError as error:
            reason = html.escape(str(error).removesuffix(ADVICE))
            message = f'<p role="alert">{reason}. The picture before is still shown.</p>'
            return {upload: None, notice: message}

    def on_sample(sample: Sample) -> dict[Any, Any]:
        return {notice: "", **news(*answers.look(ArrayPicture(sample.array), sample.name))}

    def news(image: np.ndarray, shown: str) -> dict[Any, Any]:
        texts = {prediction: answers.predict(image), constant: "", certificate: ""}
        return {state: image, seen: shown, **texts}

    def on_block(image: np.ndarray, block: str) -> tuple[Any, str]:
        heads = gr.Dropdown(answers.choices(block), value=ALL_HEADS)
        return heads, answers.attend(image, block, ALL_HEADS)

    def on_image(image: np.ndarray, block: str | None, head: str, level: float) -> tuple[str, str]:
        return answers.attend(image, block, head), answers.disturb(image, level)

    image, model, block = answers.image, answers.model, answers.block
    intro = (
        f"<h1>{html.escape(title)}</h1><p>{count_parameters(model.model) / 1e6:.2f} M parameters, "
        f"{len(model.classes)} classes. Pictures are not kept.</p>"
    )
    credit = ", ".join(dict.fromkeys(sample.credit for sample in answers.samples))
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=(60, 60)) as page:
        gr.HTML(intro)
        state = gr.State(image)
        with gr.Row():
            with gr.Column(scale=4, min_width=300):
                upload = gr.File(label="Your picture", file_types=["image"], height=190)
                notice = gr.HTML(elem_id="notice")
                with gr.Row(elem_id="samples"):
                    buttons = [
                        gr.Button(sample.name, elem_id=f"sample-{i}", min_width=64)
                        for i, sample in enumerate(answers.samples)
                    ]
            with gr.Column(scale=3, min_width=260):
                seen = gr.HTML(answers.seen)
            with gr.Column(scale=5, min_width=300):
                gr.HTML("<h2>Prediction</h2>")
                prediction = gr.HTML(answers.predict(image))
        with gr.Row():
            with gr.Column(min_width=300):
                gr.HTML("<h2>Where it looks</h2>")
                with gr.Row(visible=block is not None):
                    blocks = gr.Dropdown(
                        list(answers.heads), value=block, label="Block", scale=3, min_width=150
                    )
                    heads = gr.Dropdown(
                        answers.choices(block) if block else [ALL_HEADS],
                        value=ALL_HEADS,
                        label="Head",
                        scale=2,
                        min_width=90,
                    )
                attention = gr.HTML(answers.attend(image, block, ALL_HEADS))
            with gr.Column(min_width=300):
                gr.HTML("<h2>Under noise</h2>")
                level = gr.Slider(0, 0.5, value=0.1, step=0.01, label="Standard deviation")
                noisy = gr.HTML(answers.disturb(image, 0.1))
            with gr.Column(min_width=300):
                gr.HTML("<h2>How sensitive it is</h2>")
                measure = gr.Button("Estimate the local Lipschitz constant")
                constant = gr.HTML()
        gr.HTML("<h2>How far it may change</h2>")
        certify = gr.Button("Certify and attack: seconds for small images, minutes for large ones")
        certificate = gr.HTML()
        gr.HTML(f"<footer>Samples: {credit}</footer>")

        exclusive: Any = {  # only one event at a time uses the model
            "concurrency_id": "model",
            "concurrency_limit": 1,
            "api_visibility": "private",
        }
        pictured = [state, seen, prediction, constant, certificate, notice]
        for event in (
            upload.upload(on_upload, upload, [upload, *pictured], **exclusive),
            *(
                button.click(partial(on_sample, sample), None, pictured, **exclusive)
                for button, sample in zip(buttons, answers.samples, strict=True)
            ),
        ):
            event.then(on_image, [state, blocks, heads, level], [attention, noisy], **exclusive)
        blocks.input(on_block, [state, blocks], [heads, attention], **exclusive)
        heads.input(answers.attend, [state, blocks, heads], attention, **exclusive)
        live = {"trigger_mode": "always_last", "show_progress": "hidden"}
        level.input(answers.disturb, [state, level], noisy, **live, **exclusive)
        measure.click(answers.measure, state, constant, **exclusive)
        certify.click(answers.certify, state, certificate, **exclusive)
    return page


def launch(page: Any, samples: Sequence[Sample], **options: Any) -> str:
    """Serve the page from a thread; return its address."""
    import gradio as gr

    system = ["system-ui", "sans-serif"]
    thumbnails = "".join(
        f"#sample-{i} {{ background-image: url({InlineImage.of(sample.array, '').uri}); }}\n"
        for i, sample in enumerate(samples)
    )
    _, address, _ = page.queue(max_size=QUEUE).launch(
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        max_file_size=MAX_UPLOAD,
        theme=gr.themes.Default(font=system, font_mono=["ui-monospace", "monospace"]),
        css=CSS.read_text() + thumbnails,
        **options,
    )
    return address


def serve(checkpoint: str, which: str, *, host: str, port: int | None) -> None:
    """Serve the page until it is interrupted; all files that it writes are removed at the end.

    Raises:
        CheckpointError: If there are no usable weights.
        ConfigError: If it is not known which model they belong to.
    """
    if host not in LOOPBACK:
        print(
            f"warning: whoever reaches {host} can use the page, which asks for no password",
            file=sys.stderr,
        )
    weights = find_weights(checkpoint, which)
    print(weights, flush=True)
    answers = Answers(Classifier.from_weights(weights))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["GRADIO_TEMP_DIR"] = folder
        page = build(answers, f"{answers.model.name} on your pictures")
        address = launch(page, answers.samples, server_name=host, server_port=port)
        print(f"open {address}", flush=True)
        threading.Event().wait()


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("--checkpoint", required=True, help="run, checkpoint or timm's folder")
    parser.add_argument("--weights", choices=WHICH, default="best", help=WHICH_HELP)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860 on")
    return parser


@user_errors(CheckpointError, ConfigError, DataError, OSError)
def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    require(
        args.port is None or 0 <= args.port <= 65535, "--port", args.port, "must be in [0, 65535]"
    )
    try:
        serve(args.checkpoint, args.weights, host=args.host, port=args.port)
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is missing: pip install 'lipsformer[train,web]'"
        ) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
