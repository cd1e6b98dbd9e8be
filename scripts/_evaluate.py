"""What `eval.py` evaluates, the evaluation of one data set, and the table of all."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data import Normalize, build_eval_dataset, build_eval_sets, eval_loader
from data.evalsets import STANDARD, EvalSet
from lipsformer._errors import ConfigError
from lipsformer.config import Config, DataConfig
from lipsformer.engine.build import build_model
from lipsformer.engine.evaluation import evaluate
from lipsformer.engine.preflight import try_images
from lipsformer.engine.run_folder import Weights
from lipsformer.engine.weights import load_model, load_weights
from scripts._certify import Certification
from scripts._data_config import data_config
from scripts._histogram import bars


def data_of(
    weights: Weights, config: Config | None, settings: Sequence[str], imagenet: bool
) -> DataConfig:
    """Return the data to evaluate on, which are those of the config.

    A folder of timm's format, which no run wrote, has no config. There the settings name the
    images, and timm's description of the model gives their preprocessing.

    Args:
        weights: The weights to evaluate.
        config: The config of the run, or the one that the user gave.
        settings: `key=value` of `--data`. `config` contains them already.
        imagenet: Whether the images are sets of ImageNet, each in a folder.

    Raises:
        ConfigError: If neither a config nor timm's description is there, or if the settings name a
            split and the run evaluates images that it has held out.
    """
    if config is not None:
        split, share = config.data.val_split, config.data.holdout
        if share > 0 and any(setting.startswith("val_split=") for setting in settings):
            raise ConfigError(
                f"--data val_split={split} has no effect, because data.holdout={share:g} evaluates "
                f"images of {config.data.train_split} that training leaves out: add holdout=0"
            )
        return config.data
    known = weights.timm_config()
    if known is None:
        raise ConfigError(
            f"{weights.file}: its folder has no config.json; give --config configs/x.yaml"
        )
    settings = ["source=folder", *settings] if imagenet else settings
    origin = f"{weights.folder} with --data"
    return data_config(known["pretrained_cfg"], settings, origin=origin)


def sets_of(
    weights: Weights, data: DataConfig, names: Sequence[str] | None, class_map: str | None
) -> list[EvalSet]:
    """Return ImageNet's sets of these names, or without names the validation set of the data."""
    classes = weights.classes()
    if not names:
        return [EvalSet("data", build_eval_dataset(data, classes=classes, class_map=class_map))]
    known = weights.timm_config()
    num_classes = known["num_classes"] if known else len(STANDARD)
    return build_eval_sets(names, data, classes, num_classes)


def model_of(weights: Weights, config: Config | None, classes: Sequence[str]) -> nn.Module:
    """Return the model that config.json describes, or else the config, with its weights."""
    if weights.timm_config() is not None:
        return load_model(weights)
    assert config is not None
    model = build_model(config, classes)
    load_weights(model, weights.file)
    return model


def check_model(model: nn.Module, img_size: int, sets: Sequence[EvalSet]) -> None:
    """Refuse images or classes that a model does not take.

    Raises:
        ConfigError: If the model fails on an image of this size, or has too few logits.
    """
    refusal = f"the model does not take images of data.img_size={img_size}"
    logits = try_images(model.eval(), torch.zeros(1, 3, img_size, img_size), refusal)
    for eval_set in sets:
        classes = len(eval_set.dataset.classes)
        if eval_set.outputs is None and classes > logits.shape[1]:
            raise ConfigError(
                f"the data have {classes} classes and the model {logits.shape[1]} outputs: choose "
                "the data that it was trained on, or --class-map"
            )


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
        normalize=Normalize(data.mean, data.std, next(model.parameters()).dtype),
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
                f"{at['certified']:.3f} % (executed: the {r['dtype']} program, rounding included), "
                f"{at['certified_real']:.3f} % (real: the exact network), under PGD "
                f"{at['pgd']:.3f} % of {r['attacked']} images, log10 bound "
                f"{r['pixel_bound_log10']:.3f}"
            )
        for kind, counted in r.get("radii", {}).items():
            lines += [f"{r['set']:{width}} certified distances ({kind}) and their images:"]
            lines += bars(counted)
    return "\n".join(lines)
