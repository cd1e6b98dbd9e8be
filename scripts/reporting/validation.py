"""Predictions of a run's model for its validation images, and its attention."""

import logging
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
from lipsformer._errors import ConfigError
from lipsformer._files import read_json
from lipsformer.analysis.attention_maps import attention_maps
from lipsformer.analysis.errors import confusion_matrix, most_confused_pairs, worst_mistakes
from lipsformer.config import Config
from lipsformer.engine.run_files import CheckpointError, manifest_entry
from lipsformer.engine.run_folder import RunFolder, Weights
from lipsformer.engine.weights import load_model
from scripts._certificate import FILE
from scripts._certify_picture import certify_picture
from scripts.reporting.certificates import picture_figure, shares_figure
from scripts.reporting.figures import Drawing
from scripts.reporting.pictures import InlineImage, overlaid
from scripts.reporting.runs import RunLog

logger = logging.getLogger("lipsformer.report")

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
    """Predictions for validation images.

    Attributes:
        weights: The file of the weights.
        num_images: Number of evaluated images, evenly spaced over the data set.
        total_images: Length of the data set.
        top1: Percent of the evaluated images.
        classes: Names of the classes.
        counts: The confusion matrix, [K, K].
        pairs: (class, predicted class, images, share of the class).
        mistakes: Images of high loss; wrongly classified ones come first.
        samples: The images of the attention maps.
        attention: One column per stage, or the reason why there are none.
        certificates: Figures of the certificate that lies beside the weights; none without one.
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
    certificates: list[Drawing]


def validate(run: RunLog, limit: int, which: str = "best") -> Validation | str:
    """Evaluate the model of a run; return the reason if weights or data are missing.

    Args:
        run: The run.
        limit: Largest number of images.
        which: Which weights, "best" or "last".
    """
    try:
        return _validate(run, limit, which)
    except (CheckpointError, ConfigError, DataError, OSError) as error:
        return str(error)


def _validate(run: RunLog, limit: int, which: str) -> Validation:
    weights = RunFolder(run.folder).weights(which)
    logger.info("%s", weights)
    dataset = build_eval_dataset(run.config.data, classes=weights.classes())
    model = load_model(weights).eval().to(device())
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
        weights=weights.file,
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
        certificates=certificate_figures(run, weights, model, dataset),
    )


def certificate_figures(
    run: RunLog, weights: Weights, model: nn.Module, dataset: ImageDataset
) -> list[Drawing]:
    """Draw the certificate of these weights, and what an attack finds for the first image.

    The folder of a checkpoint may hold that of its other weights, raw or EMA, instead.
    """
    file = weights.folder / FILE
    if not file.exists():
        return []
    certificate = read_json(file)
    if certificate["weights"]["sha256"] != manifest_entry(weights.file)["sha256"]:
        logger.info("left out    %s, which is not of these weights", file)
        return []
    claims = next(iter(certificate["sets"].values()))
    premises = claims["premises"]
    right = np.argmax(premises["logits"], axis=1) == np.array(premises["labels"])
    picture = certify_picture(model, dataset[0][0].permute(2, 0, 1), run.config.data)
    shares = [shares_figure(run.name, claims["executed"], right)] if any(claims["executed"]) else []
    return [*shares, picture_figure(run.name, picture)]


def readable(classes: Sequence[str]) -> list[str]:
    """Return the names of classes; replace WordNet numbers of ImageNet by words.

    Bytes of a folder's name that are not UTF-8 are escaped, because no page can hold them.
    """
    imagenet = ImageNetInfo()
    if not set(classes) <= set(imagenet.label_names()):
        return [name.encode("utf-8", "backslashreplace").decode() for name in classes]
    words = [imagenet.label_name_to_description(name).partition(",")[0] for name in classes]
    return [
        word if words.count(word) == 1 else f"{word} ({name})"
        for word, name in zip(words, classes, strict=True)
    ]


def device() -> torch.device:
    """Return the accelerator if there is one, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


@torch.no_grad()
def predict(
    model: nn.Module, dataset: ImageDataset, chosen: range, config: Config
) -> tuple[Tensor, Tensor]:
    """Return logits [N, K] and labels [N] of the chosen images, in float32 on the CPU."""
    normalize = Normalize(config.data.mean, config.data.std)
    batches = EvalBatches(dataset, config.train.eval_batch_size, chosen, config.data.num_workers)
    pairs = [(model(normalize(i.to(device()))).float().cpu(), labels) for i, labels in batches]
    logits, labels = zip(*pairs, strict=True)
    return torch.cat(logits), torch.cat(labels)


def attention_columns(
    model: nn.Module, dataset: ImageDataset, samples: range, config: Config
) -> list[AttentionColumn] | str:
    """Return head averages of the last attention of each stage; or why there are none."""
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
    """Return the names of the deepest module for each size of map; single tokens are left out.

    If all maps have the same size, as in a ViT, return the first, a middle and the last module.
    """
    last = {tuple(received.shape[2:]): name for name, received in maps.items()}
    if len(last) == 1 and len(maps) > 2:
        names = list(maps)
        return [names[0], names[len(names) // 2], names[-1]]
    return [name for size, name in last.items() if size != (1, 1)]


def pixels(dataset: ImageDataset, index: int) -> np.ndarray:
    """Return the image as the model gets it before normalization, uint8 [H, W, 3]."""
    return dataset[index][0].numpy()
