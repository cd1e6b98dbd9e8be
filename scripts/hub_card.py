"""The README.md of a model on the Hugging Face Hub, written from the records of its run."""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from lipsformer._configfile import ConfigError
from lipsformer.analysis.cost import count_parameters
from lipsformer.engine.checkpoint import CHECKPOINTS, EMA, MODEL, locate, read_state
from scripts.reporting.runs import RunLog, read_runs
from scripts.reporting.validation import best_weights

KINDS = {MODEL: "raw", EMA: "ema"}  # of an evaluation, by the file of the weights

TEXT = """---
{metadata}
---

# {name}

{architecture}: {classes} classes, {parameters:,} parameters, images of {side} x {side} pixels.

## Use

timm finds an architecture by its name and has no plugin mechanism: **`import lipsformer` comes
first**, it registers LipsFormer's, which timm and transformers do not know otherwise.

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

## Preprocessing

Resize of the shorter side to {resized} pixels ({interpolation}), centre crop of {side}, values in
[0, 1] minus {mean}, divided by {std}.

## Training

{training}
"""


def find_weights(path: Path) -> tuple[Path, RunLog]:
    """The file of weights that a run or one of its checkpoints stands for, and the run.

    Of a run these are its best ones, of a checkpoint the EMA's if there are any.

    Raises:
        CheckpointError: if there are none, or they are damaged.
        ConfigError: if it is not a run of train.py.
    """
    if (path / CHECKPOINTS).is_dir():
        (run,) = read_runs([path])
        return best_weights(run), run
    folder = locate(path)
    (run,) = read_runs([folder.resolve().parent.parent])
    return folder / (EMA if (folder / EMA).exists() else MODEL), run


def evaluation_of(weights: Path, run: RunLog) -> dict[str, Any]:
    """The run's record of the evaluation of these weights.

    Raises:
        ConfigError: if they were not evaluated.
    """
    update, kind = read_state(weights.parent)["update"], KINDS[weights.name]
    for record in run.records:
        if record["kind"] == kind and record["update"] == update:
            return record
    raise ConfigError(
        f"{run.folder} holds no evaluation of {weights}: export a checkpoint that was evaluated"
    )


def model_card(model: Any, weights: Path, run: RunLog) -> str:
    """The card of a model with these weights; every figure is one that the run recorded.

    Raises:
        ConfigError: if the weights were not evaluated.
    """
    record, config, cfg = evaluation_of(weights, run), run.config, model.pretrained_cfg
    data = config.data.name or config.data.source
    name = f"{cfg['architecture']}.{data}"
    metrics = {"top-1 accuracy (%)": record["top1"], "top-5 accuracy (%)": record["top5"]}
    metadata = ModelCardData(
        model_name=name,
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "transformers", "lipsformer"],
        eval_results=[
            EvalResult(
                task_type="image-classification",
                dataset_type=data,
                dataset_name=data,
                dataset_split=config.data.val_split,
                metric_type="accuracy",
                metric_name=metric,
                metric_value=value,
            )
            for metric, value in metrics.items()
        ],
    )
    chosen = ""
    if run.summary is not None and run.summary["best"]["update"] == record["update"]:
        chosen = " The checkpoint was chosen among those of its run by its top-1 on these images."
    start = run.starts[-1]
    packages = ", ".join(f"{package} {version}" for package, version in start["packages"].items())
    side = cfg["input_size"][-1]
    return TEXT.format(
        metadata=metadata.to_yaml(),
        name=name,
        architecture=cfg["architecture"],
        classes=model.num_classes,
        parameters=count_parameters(model),
        side=side,
        figures="\n".join(
            f"| {metric} | {value:.4g} |"
            for metric, value in {**metrics, "cross entropy": record["loss"]}.items()
        ),
        evaluation=(
            f"On the {record['images']} images of the split `{config.data.val_split}` of {data}, "
            f"{'averaged (EMA)' if record['kind'] == 'ema' else 'raw'} weights after "
            f"{record['update']} updates.{chosen}"
        ),
        resized=int(side / cfg["crop_pct"]),
        interpolation=cfg["interpolation"],
        mean=tuple(cfg["mean"]),
        std=tuple(cfg["std"]),
        training=(
            f"{config.train.epochs} epochs of {data} with a global batch of "
            f"{config.train.global_batch_size}, AdamW at a learning rate of {config.optim.lr:g} "
            f"after {config.schedule.warmup_epochs:g} epochs of warmup, precision "
            f"{config.train.precision}, seed {config.train.seed}; code at commit "
            f"{start['git_commit']}{' with changes' if start['git_changed'] else ''}. {packages}."
        ),
    )
