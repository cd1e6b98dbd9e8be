"""The README.md of a model on the Hugging Face Hub, written from the records of its run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from lipsformer._configfile import dump_config
from lipsformer._errors import ConfigError
from lipsformer.analysis.cost import count_parameters
from lipsformer.config import Config
from lipsformer.engine.run_files import CONFIG, ENVIRONMENT
from lipsformer.engine.run_folder import Weights

TEXT = """---
{metadata}
---

# {name}

{architecture}: {classes} classes, {parameters:,} parameters, images of {side} x {side} pixels.

## Use

timm finds an architecture by its name and has no plugin mechanism. **`import lipsformer` comes
first**: it registers the LipsFormer models, which timm and transformers do not know otherwise.

```python
import lipsformer  # before the model is created
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True)  # or "hf-hub:USER/NAME"
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```

```python
import lipsformer  # before the model is loaded
from transformers import pipeline

classify = pipeline("image-classification", "FOLDER")  # or "USER/NAME"
```

## Measured

| figure | value |
|---|---|
{figures}

{evaluation}
{note}
## Preprocessing

Resize of the shorter side to {resized} pixels ({interpolation}), center crop of {side}, values in
[0, 1] minus {mean}, divided by {std}.

## Training

{training}

`{file}` holds every setting of the run. This command trains with them:

    lipsformer train --config FOLDER/{file}
"""
TRAINING = "train.yaml"  # the config of the run, in the folder of the card


def model_card(model: Any, weights: Weights, *, which: str, note: str | None) -> str:
    """Return the card of a model with these weights; every figure was recorded by the run.

    Args:
        model: The model.
        weights: Its weights.
        which: Whether the "best" or the "last" weights of the run were wanted.
        note: A paragraph on the data, the purpose and the limits of the model.

    Raises:
        ConfigError: If the run did not evaluate the weights, or its records are not there.
    """
    figures, run, cfg = weights.figures, weights.run, model.pretrained_cfg
    for file in (CONFIG, ENVIRONMENT):
        if not (run.path / file).is_file():
            raise ConfigError(
                f"{run.path} has no {file}, which the model card needs: put {weights.folder.name} "
                "back into the checkpoints of its run, or leave out the format hf"
            )
    if figures is None:
        raise ConfigError(
            f"{run.path} holds no evaluation of {weights.file}: "
            "export a checkpoint that was evaluated"
        )
    config, start = run.config(), run.environment()[-1]
    data = config.data.name or config.data.source
    name = f"{cfg['architecture']}.{data}"
    split, part = config.data.val_split, "images"
    if config.data.holdout > 0:
        split, part = config.data.train_split, "images that were held out"
    metrics = {"top-1 accuracy (%)": figures["top1"], "top-5 accuracy (%)": figures["top5"]}
    chosen, summary = "", run.summary()
    is_best = summary is not None and summary["best"]["update"] == weights.step
    if which == "best" and is_best:
        chosen = " The weights were chosen among those of the run by their top-1 on these images."
    side = cfg["input_size"][-1]
    return TEXT.format(
        metadata=_metadata(name, cfg.get("license"), data, split, metrics).to_yaml(),
        name=name,
        architecture=cfg["architecture"],
        classes=model.num_classes,
        parameters=count_parameters(model),
        side=side,
        figures="\n".join(
            f"| {metric} | {value:.4g} |"
            for metric, value in {**metrics, "cross entropy": figures["loss"]}.items()
        ),
        evaluation=(
            f"On the {figures['images']} {part} of the split `{split}` of {data}, with "
            f"{config.data.img_size} x {config.data.img_size} pixels, "
            f"{'averaged (EMA)' if weights.kind == 'ema' else 'raw'} weights after "
            f"{weights.step} updates.{chosen}"
        ),
        note=f"\n{note}\n" if note else "",
        resized=int(side / cfg["crop_pct"]),
        interpolation=cfg["interpolation"],
        mean=tuple(cfg["mean"]),
        std=tuple(cfg["std"]),
        training=_training(config, data, start),
        file=TRAINING,
    )


def training_config(weights: Weights) -> str:
    """Return the config of the run of these weights, without paths but those of its inputs.

    The inputs are files without which the run cannot be repeated: `model.checkpoint`,
    `data.skip_list` and a teacher.
    """
    config = weights.run.config()
    data = replace(config.data, root=None)
    output_dir = f"outputs/{config.model.name}"
    run = replace(config.run, output_dir=output_dir, resume="auto", trackers=())
    return dump_config(replace(config, data=data, run=run))


def _metadata(
    name: str, license: str | None, data: str, split: str, metrics: Mapping[str, float]
) -> ModelCardData:
    """Return the head of the card, which the Hub reads."""
    return ModelCardData(
        model_name=name,
        license=license,
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "transformers", "lipsformer"],
        eval_results=[
            EvalResult(
                task_type="image-classification",
                dataset_type=data,
                dataset_name=data,
                dataset_split=split,
                metric_type="accuracy",
                metric_name=metric,
                metric_value=value,
            )
            for metric, value in metrics.items()
        ],
    )


def _training(config: Config, data: str, start: Mapping[str, Any]) -> str:
    """Return how the model was trained, from its config and the environment of its last start."""
    packages = ", ".join(f"{package} {version}" for package, version in start["packages"].items())
    return (
        f"{config.train.epochs} epochs of {data} with a global batch of "
        f"{config.train.global_batch_size}, {config.optim.name} at a learning rate of "
        f"{config.optim.lr:g} after {config.schedule.warmup_epochs:g} epochs of warmup, "
        f"precision {config.train.precision}, seed {config.train.seed}; code at commit "
        f"{start['git_commit']}. {packages}."
    )
