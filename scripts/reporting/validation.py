"""What the best weights of a run make of its validation images, and where they look."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from timm.data import ImageNetInfo
from torch import Tensor, nn

from data import DataError, Normalize, build_eval_dataset, collate
from data.dataset import ImageDataset
from data.loader import EvalBatches
from lipsformer._configfile import ConfigError
from lipsformer.analysis.attention_maps import attention_maps
from lipsformer.analysis.errors import confusion_matrix, most_confused_pairs, worst_mistakes
from lipsformer.config import Config
from lipsformer.engine.checkpoint import (
    CHECKPOINTS,
    EMA,
    MODEL,
    CheckpointError,
    CheckpointFolder,
    locate,
)
from scripts.measure_lipschitz import load_model
from scripts.reporting.pictures import InlineImage, overlaid
from scripts.reporting.runs import RunLog

MISTAKES = 12
PAIRS = 12
ATTENTION_IMAGES = 4


@dataclass(frozen=True)
class Mistake:
    """One image of high loss."""

    picture: InlineImage
    label: str
    predicted: str
    confidence: float
    label_probability: float


@dataclass(frozen=True)
class AttentionColumn:
    """The maps of one attention module for all sample images."""

    name: str
    low: float
    high: float
    pictures: list[InlineImage]


@dataclass(frozen=True)
class Validation:
    """What a model makes of validation images.

    Attributes:
        weights: the file that the model was read from.
        num_images: how many were looked at, evenly spaced over the data set.
        total_images: how many there are.
        top1: percent of those looked at.
        classes: names.
        counts: the confusion matrix, [K, K].
        pairs: (class, predicted class, images, share of the class).
        mistakes: wrong ones first, each part by its loss.
        samples: the images of the attention maps.
        attention: one column per stage; or the reason why there are none.
    """

    weights: Path
    num_images: int
    total_images: int
    top1: float
    classes: list[str]
    counts: np.ndarray
    pairs: list[tuple[str, str, int, float]]
    mistakes: list[Mistake]
    samples: list[InlineImage]
    attention: list[AttentionColumn] | str


def validate(run: RunLog, limit: int) -> Validation | str:
    """Runs the model over validation images; the reason, where weights or data are not there.

    Args:
        run: whose weights and data.
        limit: largest number of images.
    """
    try:
        return _validate(run, limit)
    except (CheckpointError, ConfigError, DataError, OSError) as error:
        return str(error)


def _validate(run: RunLog, limit: int) -> Validation:
    weights = best_weights(run)
    card = json.loads((weights.parent / "config.json").read_text())
    dataset = build_eval_dataset(run.config.data, classes=card["label_names"])
    model = load_model(str(weights)).eval().to(device())
    chosen = range(0, len(dataset), -(-len(dataset) // limit))
    logits, labels = predict(model, dataset, chosen, run.config)
    predicted, probabilities = logits.argmax(-1), logits.softmax(-1)
    classes = readable(dataset.classes)
    counts = confusion_matrix(labels, predicted, len(classes))
    sizes = counts.sum(1).tolist()

    def mistake(index: int) -> Mistake:
        label, guess = int(labels[index]), int(predicted[index])
        text = f"class {classes[label]}, predicted {classes[guess]}"
        return Mistake(
            picture=InlineImage.of(pixels(dataset, chosen[index]), text),
            label=classes[label],
            predicted=classes[guess],
            confidence=float(probabilities[index, guess]),
            label_probability=float(probabilities[index, label]),
        )

    samples = chosen[:: -(-len(chosen) // ATTENTION_IMAGES)]
    return Validation(
        weights=weights,
        num_images=len(chosen),
        total_images=len(dataset),
        top1=100 * float(predicted.eq(labels).double().mean()),
        classes=classes,
        counts=counts.numpy(),
        pairs=[
            (classes[label], classes[guess], count, count / sizes[label])
            for label, guess, count in most_confused_pairs(counts, PAIRS)
        ],
        mistakes=[mistake(i) for i in worst_mistakes(logits, labels, MISTAKES).tolist()],
        samples=[
            InlineImage.of(pixels(dataset, i), f"sample of class {classes[dataset.labels[i]]}")
            for i in samples
        ],
        attention=attention_columns(model, dataset, samples, run.config),
    )


def readable(classes: Sequence[str]) -> list[str]:
    """Names of classes; for WordNet numbers of ImageNet their words, with the number if shared."""
    imagenet = ImageNetInfo()
    if not set(classes) <= set(imagenet.label_names()):
        return list(classes)
    words = [imagenet.label_name_to_description(name).partition(",")[0] for name in classes]
    return [
        word if words.count(word) == 1 else f"{word} ({name})"
        for word, name in zip(words, classes, strict=True)
    ]


def best_weights(run: RunLog) -> Path:
    """The file of the best weights; of a run that has not ended, of its newest checkpoint.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    if run.summary is None:
        folder = locate(run.folder)
        return folder / (EMA if (folder / EMA).exists() else MODEL)
    best = run.summary["best"]
    folder = CheckpointFolder(run.folder / CHECKPOINTS, keep=1).path_of(best["update"])
    return locate(folder) / {"raw": MODEL, "ema": EMA}[best["weights"]]


def device() -> torch.device:
    """The accelerator if there is one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


@torch.no_grad()
def predict(
    model: nn.Module, dataset: ImageDataset, chosen: range, config: Config
) -> tuple[Tensor, Tensor]:
    """Logits [N, K] and labels [N] of the chosen images, in float32 on the CPU."""
    normalize = Normalize(config.data.mean, config.data.std)
    batches = EvalBatches(dataset, config.train.eval_batch_size, chosen, config.data.num_workers)
    pairs = [(model(normalize(i.to(device()))).float().cpu(), labels) for i, labels in batches]
    logits, labels = zip(*pairs, strict=True)
    return torch.cat(logits), torch.cat(labels)


def attention_columns(
    model: nn.Module, dataset: ImageDataset, samples: range, config: Config
) -> list[AttentionColumn] | str:
    """Maps of the last attention of each stage, heads averaged; or why there are none."""
    arrays = [pixels(dataset, index) for index in samples]
    images, _ = collate([dataset[index] for index in samples])
    normalize = Normalize(config.data.mean, config.data.std)
    try:
        maps = attention_maps(model, normalize(images.to(device())))
    except TypeError as error:
        return str(error)
    columns = []
    for name in last_of_each_size(maps):
        received = maps[name].mean(1).cpu().numpy()
        low, high = float(received.min()), float(received.max())
        shares = (received - low) / max(high - low, 1e-9)
        pictures = [
            InlineImage.of(overlaid(array, share), f"attention in {name}")
            for array, share in zip(arrays, shares, strict=True)
        ]
        columns.append(AttentionColumn(name.removesuffix(".attn"), low, high, pictures))
    return columns or "no attention module of the model sees more than one token"


def last_of_each_size(maps: dict[str, Tensor]) -> list[str]:
    """Names of the deepest modules for each extent of the map; single tokens are left out.

    Where all maps have one extent, as in a ViT, the first, a middle and the last module.
    """
    last = {tuple(received.shape[2:]): name for name, received in maps.items()}
    if len(last) == 1 and len(maps) > 2:
        names = list(maps)
        return [names[0], names[len(names) // 2], names[-1]]
    return [name for size, name in last.items() if size != (1, 1)]


def pixels(dataset: ImageDataset, index: int) -> np.ndarray:
    """The image as the model gets it before normalisation, uint8 [H, W, 3]."""
    return np.ascontiguousarray(dataset[index][0].numpy())
