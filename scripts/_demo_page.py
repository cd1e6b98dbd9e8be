"""The demo page: its parts, what happens when one of them is used, and its server."""

import html
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from data import UnreadableImageError
from data.images import ADVICE, ArrayPicture
from lipsformer.analysis.cost import count_parameters
from scripts._classifier import MAX_UPLOAD
from scripts._demo_answers import ALL_HEADS, Answers, Sample
from scripts.reporting.pictures import InlineImage

QUEUE = 16  # requests that wait; the others are refused
CSS = Path(__file__).with_name("demo.css")
NOISE = 0.1  # standard deviation of the noise that is shown first
EXCLUSIVE: Any = {  # only one event at a time uses the model
    "concurrency_id": "model",
    "concurrency_limit": 1,
    "api_visibility": "private",
}


class Page:
    """The page, whose attributes are the parts that a new picture changes.

    Args:
        answers: What the page shows.
        title: Its title.
    """

    def __init__(self, answers: Answers, title: str):
        self.answers = answers
        model, image, block = answers.model, answers.image, answers.block
        with gr.Blocks(title=title, analytics_enabled=False, delete_cache=(60, 60)) as self.blocks:
            gr.HTML(
                f"<h1>{html.escape(title)}</h1><p>{count_parameters(model.model) / 1e6:.2f} M "
                f"parameters, {len(model.classes)} classes. Pictures are not kept.</p>"
            )
            self.state = gr.State(image)
            with gr.Row():
                with gr.Column(scale=4, min_width=300):
                    self.upload = gr.File(label="Your picture", file_types=["image"], height=190)
                    self.notice = gr.HTML(elem_id="notice")
                    with gr.Row(elem_id="samples"):
                        samples = [
                            gr.Button(sample.name, elem_id=f"sample-{i}", min_width=64)
                            for i, sample in enumerate(answers.samples)
                        ]
                with gr.Column(scale=3, min_width=260):
                    self.seen = gr.HTML(answers.seen)
                with gr.Column(scale=5, min_width=300):
                    gr.HTML("<h2>Prediction</h2>")
                    self.prediction = gr.HTML(answers.predict(image))
            with gr.Row():
                with gr.Column(min_width=300):
                    gr.HTML("<h2>Where it looks</h2>")
                    with gr.Row(visible=block is not None):
                        block_menu = gr.Dropdown(
                            list(answers.heads), value=block, label="Block", scale=3, min_width=150
                        )
                        head_menu = gr.Dropdown(
                            answers.choices(block) if block else [ALL_HEADS],
                            value=ALL_HEADS,
                            label="Head",
                            scale=2,
                            min_width=90,
                        )
                    attention = gr.HTML(answers.attend(image, block, ALL_HEADS))
                with gr.Column(min_width=300):
                    gr.HTML("<h2>Under noise</h2>")
                    level = gr.Slider(0, 0.5, value=NOISE, step=0.01, label="Standard deviation")
                    noisy = gr.HTML(answers.disturb(image, NOISE))
                with gr.Column(min_width=300):
                    gr.HTML("<h2>How sensitive it is</h2>")
                    measure = gr.Button("Estimate the local Lipschitz constant")
                    self.constant = gr.HTML()
            gr.HTML("<h2>How far it may change</h2>")
            certify = gr.Button(
                "Certify and attack: seconds for small images, minutes for large ones"
            )
            self.certificate = gr.HTML()
            credit = ", ".join(dict.fromkeys(sample.credit for sample in answers.samples))
            gr.HTML(f"<footer>Samples: {credit}</footer>")

            measured = [self.constant, self.certificate]
            pictured = [self.state, self.seen, self.prediction, *measured, self.notice]
            of_image, shown = [self.state, block_menu, head_menu, level], [attention, noisy]
            taken = self.upload.upload(
                self.on_upload, self.upload, [self.upload, *pictured], **EXCLUSIVE
            )
            taken.then(self.on_image, of_image, shown, **EXCLUSIVE)
            for button, sample in zip(samples, answers.samples, strict=True):
                chosen = button.click(partial(self.on_sample, sample), None, pictured, **EXCLUSIVE)
                chosen.then(self.on_image, of_image, shown, **EXCLUSIVE)
            block_menu.input(
                self.on_block, [self.state, block_menu], [head_menu, attention], **EXCLUSIVE
            )
            head_menu.input(
                answers.attend, [self.state, block_menu, head_menu], attention, **EXCLUSIVE
            )
            live = {"trigger_mode": "always_last", "show_progress": "hidden"}
            level.input(answers.disturb, [self.state, level], noisy, **live, **EXCLUSIVE)
            measure.click(answers.measure, self.state, self.constant, **EXCLUSIVE)
            certify.click(answers.certify, self.state, self.certificate, **EXCLUSIVE)

    def on_upload(self, path: str | None) -> dict[Any, Any]:
        """Show an uploaded picture, or say why it cannot be shown."""
        if path is None:
            return {self.notice: ""}
        try:
            news = self._news(*self.answers.take(Path(path)))
        except UnreadableImageError as error:
            reason = html.escape(str(error).removesuffix(ADVICE))
            message = f'<p role="alert">{reason}. The picture before is still shown.</p>'
            return {self.upload: None, self.notice: message}
        return {self.upload: None, **news}

    def on_sample(self, sample: Sample) -> dict[Any, Any]:
        """Show one of the pictures that come with the page."""
        return self._news(*self.answers.look(ArrayPicture(sample.array), sample.name))

    def _news(self, image: np.ndarray, seen: str) -> dict[Any, Any]:
        """Return the parts that a new picture changes at once; what was measured is cleared."""
        return {
            self.state: image,
            self.seen: seen,
            self.prediction: self.answers.predict(image),
            self.constant: "",
            self.certificate: "",
            self.notice: "",
        }

    def on_image(
        self, image: np.ndarray, block: str | None, head: str, level: float
    ) -> tuple[str, str]:
        """Show where the model looks in a new picture, and its prediction under noise."""
        return self.answers.attend(image, block, head), self.answers.disturb(image, level)

    def on_block(self, image: np.ndarray, block: str) -> tuple[Any, str]:
        """Offer the heads of another block, and show their mean."""
        heads = gr.Dropdown(self.answers.choices(block), value=ALL_HEADS)
        return heads, self.answers.attend(image, block, ALL_HEADS)

    def launch(self, **options: Any) -> str:
        """Serve the page from a thread; return its address."""
        system = ["system-ui", "sans-serif"]
        thumbnails = "".join(
            f"#sample-{i} {{ background-image: url({InlineImage.of(sample.array, '').uri}); }}\n"
            for i, sample in enumerate(self.answers.samples)
        )
        _, address, _ = self.blocks.queue(max_size=QUEUE).launch(
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
