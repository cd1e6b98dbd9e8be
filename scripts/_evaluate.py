"""Evaluation of one data set, and the table of all, for `eval.py`."""

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from data import Normalize, eval_loader
from data.evalsets import EvalSet
from lipsformer.config import DataConfig
from lipsformer.engine.steps import evaluate
from scripts._certify import Certification


def evaluate_set(
    accelerator: Accelerator,
    model: nn.Module,
    eval_set: EvalSet,
    data: DataConfig,
    batch_size: int,
    proof: Certification | None,
) -> dict[str, Any]:
    """Return the figures of one data set; with a proof also the certified shares of its images."""
    batches = eval_loader(
        eval_set.dataset,
        batch_size=batch_size,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        num_workers=data.num_workers,
    )
    classifier = model if eval_set.outputs is None else Outputs(model, eval_set.outputs)
    figures = evaluate(
        accelerator,
        classifier,
        batches,
        normalize=Normalize(data.mean, data.std),
        num_images=len(eval_set.dataset),
    )
    assert figures is not None
    return figures if proof is None else {**figures, **proof.certify(eval_set, classifier, batches)}


class Outputs(nn.Module):
    """The model with only some of its logits."""

    def __init__(self, model: nn.Module, outputs: Sequence[int]):
        super().__init__()
        self.model = model
        self.outputs = list(outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[:, self.outputs]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as text."""
    width = max(len(r["set"]) for r in records)
    lines = [f"{'set':{width}} {'top-1 %':>9} {'top-5 %':>9} {'loss':>9} {'images':>8}"]
    for r in records:
        figures = f"{r['top1']:9.3f} {r['top5']:9.3f} {r['loss']:9.5f} {r['images']:8d}"
        lines.append(f"{r['set']:{width}} {figures}")
        if "mce" in r:
            mce = "none, because some of the 15 are missing"
            mce = mce if r["mce"] is None else f"{r['mce']:.2f} %"
            lines.append(f"c is the mean of {r['corruptions']} corruptions; mCE: {mce}")
    for r in records:
        for at in r.get("robustness", ()):
            lines.append(
                f"{r['set']:{width}} within {at['eps']:.4f} (2-norm): certified "
                f"{at['certified']:.3f} % (executed: the float32 program, rounding included), "
                f"{at['certified_real']:.3f} % (real: the exact network), under PGD "
                f"{at['pgd']:.3f} %, log10 bound {r['pixel_bound_log10']:.3f}"
            )
    return "\n".join(lines)
