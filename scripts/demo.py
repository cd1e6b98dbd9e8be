"""Serve a web page on which a model classifies your own pictures.

    python -m scripts.demo --checkpoint outputs/demo

The page shows the five most probable classes of a picture, the attention of a block and a head, how
the prediction changes under noise, and an estimate of the local Lipschitz constant. The server
listens on localhost only, unless --host says otherwise. It loads nothing from the network and does
not store uploads. It needs `pip install 'lipsformer[train,web]'`. Exit code 2 means a mistake in
the arguments.
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
from lipsformer._configfile import ConfigError
from lipsformer.analysis.cost import count_parameters
from lipsformer.engine.checkpoint import CheckpointError
from lipsformer.engine.distributed import EXIT_USER_ERROR
from scripts._demo_model import DemoModel
from scripts.reporting.pictures import InlineImage, overlaid

MAX_UPLOAD = 20 * 2**20  # bytes
MIN_TOKENS = 64  # the map that is shown first has at least so many tokens
ALL_HEADS = "mean"
CSS = Path(__file__).with_name("demo.css")


@dataclass(frozen=True)
class Sample:
    """A sample picture of the page.

    Attributes:
        name: Name on the page.
        array: uint8 [H, W] or [H, W, 3].
        credit: Origin of the picture, as HTML.
    """

    name: str
    array: np.ndarray
    credit: str


def load_samples(model: DemoModel) -> list[Sample]:
    """Load scikit-learn's photos, after held-out digits if the model classifies digits."""
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
    """Return the HTML of an image that is part of the page, so that no file is written."""
    source = InlineImage.of(array, text).uri
    words = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure><img src="{source}" alt="{html.escape(text)}">{words}</figure>'


def bars(classes: Sequence[str], probabilities: Tensor, before: Tensor | None = None) -> str:
    """Return the HTML of the five most probable classes.

    Args:
        classes: Names of the K classes.
        probabilities: Probabilities [K], drawn as bars.
        before: Other probabilities [K], drawn as marks on the bars.
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
    """Compute what the page shows. Images are uint8 [H, W, 3] in the model's input size."""

    def __init__(self, model: DemoModel):
        self.model = model
        self.samples = load_samples(model)
        first = self.samples[0]
        self.image, self.figure = self.prepare(ArrayPicture(first.array), first.name)
        try:
            maps = model.attention(self.image)
        except TypeError as error:
            maps, self.no_attention = {}, str(error)
        self.heads = {block: len(received) for block, received in maps.items()}
        fine = [block for block, received in maps.items() if received[0].size >= MIN_TOKENS]
        self.block = (fine or list(maps) or [None])[-1]

    def prepare_upload(self, path: Path) -> tuple[np.ndarray, str]:
        """Do the same as `prepare` for a file, and delete the file."""
        try:
            picture = EncodedPicture(path.read_bytes(), path.name)
        finally:
            path.unlink(missing_ok=True)
        return self.prepare(picture, path.name)

    def prepare(self, picture: Picture, name: str) -> tuple[np.ndarray, str]:
        """Return the model's input for a picture, and the HTML that shows it.

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
        """Return the HTML of the five most probable classes of an image."""
        return bars(self.model.classes, self.model.probabilities(image))

    def draw_attention(self, image: np.ndarray, block: str | None, head: str) -> str:
        """Return the HTML of the attention of a block and head, drawn over the image."""
        if block is None:
            return f"<p>{html.escape(self.no_attention)}</p>"
        heads = self.model.attention(image)[block]
        received = heads.mean(0) if head == ALL_HEADS else heads[int(head) - 1]
        low, high = float(received.min()), float(received.max())
        shares = (received - low) / max(high - low, 1e-9)
        caption = (
            f'{low:.2f} <i class="scale"></i> {high:.2f}<br>Attention that each of the '
            f"{received.shape[1]} x {received.shape[0]} tokens receives; 1 if it were uniform."
        )
        text = f"attention that the tokens of {block} receive, head: {head}"
        return figure(overlaid(image, shares), text, caption)

    def head_choices(self, block: str) -> list[str]:
        """List the heads of a block."""
        return [ALL_HEADS, *(str(head + 1) for head in range(self.heads[block]))]

    def add_noise(self, image: np.ndarray, level: float) -> str:
        """Return the HTML of the prediction with noise, and without noise as marks."""
        noisy = self.model.with_noise(image, level)
        caption = (
            f"Noise of length {noisy.length:.2f} moved the logits by {noisy.moved:.2f}. "
            "The marks show the prediction without noise."
        )
        shown = figure(noisy.image, f"the picture with noise of {level:g}", caption)
        before = self.model.probabilities(image)
        return shown + bars(self.model.classes, noisy.probabilities, before)

    def measure(self, image: np.ndarray) -> str:
        """Return the HTML of the local Lipschitz constant at an image."""
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


def build(answers: Answers, title: str) -> Any:
    """Build the page as Gradio's `Blocks`."""
    import gradio as gr

    def on_upload(path: str | None) -> dict[Any, Any]:
        if path is None:
            return {notice: ""}
        try:
            return {upload: None, notice: "", **update(*answers.prepare_upload(Path(path)))}
        except UnreadableImageError as error:
            reason = html.escape(str(error).removesuffix(ADVICE))
            message = f'<p role="alert">{reason}. The page still shows the previous picture.</p>'
            return {upload: None, notice: message}

    def on_sample(sample: Sample) -> dict[Any, Any]:
        return {notice: "", **update(*answers.prepare(ArrayPicture(sample.array), sample.name))}

    def update(image: np.ndarray, shown: str) -> dict[Any, Any]:
        return {state: image, seen: shown, prediction: answers.predict(image), constant: ""}

    def on_block(image: np.ndarray, block: str) -> tuple[Any, str]:
        heads = gr.Dropdown(answers.head_choices(block), value=ALL_HEADS)
        return heads, answers.draw_attention(image, block, ALL_HEADS)

    def on_image(image: np.ndarray, block: str | None, head: str, level: float) -> tuple[str, str]:
        return answers.draw_attention(image, block, head), answers.add_noise(image, level)

    image, model, block = answers.image, answers.model, answers.block
    intro = (
        f"<h1>{html.escape(title)}</h1><p>{count_parameters(model.model) / 1e6:.2f} M parameters, "
        f"{len(model.classes)} classes. Uploads are not stored.</p>"
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
                seen = gr.HTML(answers.figure)
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
                        answers.head_choices(block) if block else [ALL_HEADS],
                        value=ALL_HEADS,
                        label="Head",
                        scale=2,
                        min_width=90,
                    )
                attention = gr.HTML(answers.draw_attention(image, block, ALL_HEADS))
            with gr.Column(min_width=300):
                gr.HTML("<h2>Under noise</h2>")
                level = gr.Slider(0, 0.5, value=0.1, step=0.01, label="Standard deviation")
                noisy = gr.HTML(answers.add_noise(image, 0.1))
            with gr.Column(min_width=300):
                gr.HTML("<h2>How sensitive it is</h2>")
                measure = gr.Button("Estimate the local Lipschitz constant")
                constant = gr.HTML()
        gr.HTML(f"<footer>Samples: {credit}</footer>")

        alone: Any = {  # the model answers one event at a time
            "concurrency_id": "model",
            "concurrency_limit": 1,
            "api_visibility": "private",
        }
        pictured = [state, seen, prediction, constant, notice]
        for event in (
            upload.upload(on_upload, upload, [upload, *pictured], **alone),
            *(
                button.click(partial(on_sample, sample), None, pictured, **alone)
                for button, sample in zip(buttons, answers.samples, strict=True)
            ),
        ):
            event.then(on_image, [state, blocks, heads, level], [attention, noisy], **alone)
        blocks.input(on_block, [state, blocks], [heads, attention], **alone)
        heads.input(answers.draw_attention, [state, blocks, heads], attention, **alone)
        live = {"trigger_mode": "always_last", "show_progress": "hidden"}
        level.input(answers.add_noise, [state, level], noisy, **live, **alone)
        measure.click(answers.measure, state, constant, **alone)
    return page


def launch(page: Any, samples: Sequence[Sample], **options: Any) -> str:
    """Serve the page from a thread, and return its address."""
    import gradio as gr

    system = ["system-ui", "sans-serif"]
    thumbnails = "".join(
        f"#sample-{i} {{ background-image: url({InlineImage.of(sample.array, '').uri}); }}\n"
        for i, sample in enumerate(samples)
    )
    _, address, _ = page.launch(
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


def serve(checkpoint: str, *, host: str, port: int | None) -> None:
    """Serve the page until a signal stops it. All its files are in a temporary folder.

    Raises:
        CheckpointError: If there are no usable weights.
        ConfigError: If the files do not say to which model the weights belong.
    """
    answers = Answers(DemoModel.of_checkpoint(checkpoint))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["GRADIO_TEMP_DIR"] = folder
        page = build(answers, f"{answers.model.name} on your pictures")
        address = launch(page, answers.samples, server_name=host, server_port=port)
        print(f"open {address}", flush=True)
        threading.Event().wait()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="run, checkpoint, or timm's folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860 on")
    return parser


def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run the command line."""
    args = (parser or make_parser()).parse_intermixed_args(argv)
    try:
        serve(args.checkpoint, host=args.host, port=args.port)
    except ImportError as error:
        message = f"{error.name} is missing: pip install 'lipsformer[train,web]'"
    except (CheckpointError, ConfigError, DataError, OSError) as error:
        message = str(error)
    else:
        return 0
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
