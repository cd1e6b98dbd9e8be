"""Compare the data loader's images per second and core with timm's, and time its stages.

    python -m benchmarks.loader --root datasets --output benchmarks/results/loader.json

Both loaders run in this process, on one thread, from the file to the uint8 batch that goes to the
device, with equal settings and on the same files; they take turns in random order, and the least
CPU time counts, so that a busy machine favors neither. Normalization, erasing and mixing follow on
the device in both.

Three sets: the ImageNet sample as stored (short side 256), the same enlarged to the sizes that the
index gives for the originals (JPEG quality 90), and the untouched originals among the odd files.
"""

import csv
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import PIL
import simplejpeg
import timm
import torch
import torchvision
from PIL import Image
from timm.data import ImageDataset, auto_augment, create_loader
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision.transforms import v2

from benchmarks.records import as_json, write_record
from benchmarks.turns import take_turns
from data import TrainBatches, build_batch_transform, build_datasets, eval_loader
from data.augment import Sample, finish
from data.build import train_transform
from data.images import EncodedPicture, read_picture
from data.rng import preserve_rng, seed_all
from lipsformer._commands import documented_parser
from lipsformer.config import AugmentConfig, DataConfig

BATCH_SIZE = 64
RECIPE = AugmentConfig(auto_augment="rand-m9-mstd0.5-inc1", reprob=0.25)


def timms_loader(folder: Path, *, train: bool) -> Iterable:
    """Return timm's loader up to the batch that it sends to the device."""
    settings: dict[str, Any] = {}
    if train:
        settings = {"auto_augment": RECIPE.auto_augment, "re_prob": RECIPE.reprob}
    loader = create_loader(
        ImageDataset(str(folder)),
        input_size=(3, 224, 224),
        batch_size=BATCH_SIZE,
        is_training=train,
        interpolation="bicubic",
        crop_pct=0.875,
        num_workers=0,
        persistent_workers=False,
        pin_memory=False,
        device=torch.device("cpu"),
        **settings,
    )
    if train:
        for transform in loader.dataset.transform.transforms:
            for op in getattr(transform, "ops", ()):
                if op.aug_fn is auto_augment.posterize:
                    op.aug_fn = _posterize
    return loader.loader  # without the part that works on the device


def _posterize(image: Image.Image, bits_to_keep: int, **_: object) -> Image.Image:
    """timm 1.0.31 asks for 0 bits, which Pillow 13 refuses."""
    return auto_augment.posterize(image, max(bits_to_keep, 1))


def our_loader(folder: Path, *, train: bool, exact_eval: bool = True) -> Iterable:
    """Return this repository's loader up to the batch that it sends to the device."""
    data = DataConfig(
        source="folder",
        root=str(folder.parent),
        train_split=folder.name,
        val_split=folder.name,
        exact_eval=exact_eval,
    )
    train_set, val_set = build_datasets(data, RECIPE, seed=0)
    if not train:
        return eval_loader(val_set, batch_size=BATCH_SIZE, rank=0, world_size=1, num_workers=0)
    batches = TrainBatches(
        train_set,
        global_batch_size=BATCH_SIZE,
        batch_size_per_device=BATCH_SIZE,
        rank=0,
        world_size=1,
        seed=0,
        num_workers=0,
        drop_last=False,
        pin_memory=False,
    )
    return (batch for update in batches.epoch(0) for batch in update.micro_batches)


def cpu_seconds_per_image(batches: Iterable) -> float:
    """Return the CPU time of one pass, per image."""
    started, images = time.process_time(), 0
    for batch in batches:
        images += len(batch[0])
    return (time.process_time() - started) / images


def compare(folder: Path, rounds: int) -> dict[str, Any]:
    """Return each loader's images per CPU second in its best round: other work only slows it."""
    makers: dict[str, Callable[[], Iterable]] = {
        "train_timm": lambda: timms_loader(folder, train=True),
        "train_ours": lambda: our_loader(folder, train=True),
        "eval_timm": lambda: timms_loader(folder, train=False),
        "eval_ours_exact": lambda: our_loader(folder, train=False),
        "eval_ours_fast": lambda: our_loader(folder, train=False, exact_eval=False),
    }
    seconds = take_turns(
        makers, lambda name: cpu_seconds_per_image(makers[name]()), rounds=rounds, warmup=0
    )
    rates = {name: 1 / min(times) for name, times in seconds.items()}
    return {
        "images_per_s_per_core": {name: round(rate, 1) for name, rate in rates.items()},
        "times_timm": {
            name: round(rate / rates[name.split("_")[0] + "_timm"], 2)
            for name, rate in rates.items()
            if "ours" in name
        },
        "seconds_per_image": seconds,
    }


def _cpu_ms(function: Callable[[Any], object], items: Iterable) -> float:
    """Return the CPU milliseconds of calling a function with every item."""
    started = time.process_time()
    for item in items:
        function(item)
    return (time.process_time() - started) * 1e3


def stages(folder: Path) -> dict[str, Any]:
    """Return the CPU milliseconds per image of each stage of training, and its share."""
    files = [str(path) for path in sorted(folder.rglob("*.JPEG"))]
    transform = train_transform(DataConfig(source="folder"), RECIPE)
    spent: dict[str, float] = {}

    def timed(stage: str, items: Iterable, function: Callable) -> list:
        results = []
        call = lambda indexed: results.append(function(*indexed))  # noqa: E731
        spent[stage] = _cpu_ms(call, enumerate(items)) / len(results)
        return results

    def seeded_draw(index: int, picture: EncodedPicture) -> Sample:
        seed_all(index)
        return transform.draw(picture)

    with preserve_rng():
        timed("seeds", files, lambda index, _: seed_all(index))
        pictures = timed("read", files, lambda _, file: read_picture(file))
        timed("header", pictures, lambda _, picture: picture.size)
        timed("decode", pictures, lambda _, picture: picture.pixels())
        samples = timed("seeds and draws", pictures, seeded_draw)
        crops = timed(
            "decode, crop and resize",
            samples,
            lambda _, sample: Sample(
                *finish([Sample(sample.image, sample.steps[:1])]), sample.steps[1:]
            ),
        )
        images = timed("RandAugment", crops, lambda _, sample: torch.from_numpy(*finish([sample])))
        batches = [images[i : i + BATCH_SIZE] for i in range(0, len(images), BATCH_SIZE)]
        spent["collate"] = _cpu_ms(torch.stack, batches) / len(files)
    # The second stage of decoding holds the header and the first, at the size that the crop needs.
    parts = ("seeds and draws", "read", "decode, crop and resize", "RandAugment", "collate")
    total = sum(spent[part] for part in parts)
    return {
        "ms_per_image": {stage: round(spent[stage], 4) for stage in spent},
        "share_percent": {part: round(100 * spent[part] / total, 1) for part in parts},
    }


def on_device() -> dict[str, Any]:
    """Return the CPU milliseconds per image of the work on the device, and the bytes sent to it."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH_SIZE, 3, 224, 224)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 1000, (BATCH_SIZE,), generator=generator)
    data = DataConfig(source="folder")
    paper = replace(RECIPE, mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    transform = build_batch_transform(data, paper, num_classes=1000, seed=0)
    ways: dict[str, Callable[[int], object]] = {
        "normalize": lambda _: transform.normalize(images),
        "normalize, erase and mix": lambda n: transform(
            images, labels, update=n, micro_step=0, rank=0
        ),
    }
    spent = {}
    for name, way in ways.items():
        way(0)
        spent[name] = round(_cpu_ms(way, range(20)) / (20 * BATCH_SIZE), 4)
    return {"ms_per_image_on_this_cpu": spent, "bytes_per_image": images[0].nbytes}


def crops(folder: Path) -> dict[str, float]:
    """Return the CPU ms per image to decode, crop at random and resize (bicubic, antialiased)."""
    contents = [path.read_bytes() for path in sorted(folder.rglob("*.JPEG"))]
    timms = RandomResizedCropAndInterpolation(224, interpolation="bicubic")
    v2s = v2.RandomResizedCrop(224, interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    ours = train_transform(
        DataConfig(source="folder"), replace(RECIPE, auto_augment=None, hflip=0.0)
    )
    ways: dict[str, Callable[[bytes], object]] = {
        "Pillow, timm": lambda content: timms(EncodedPicture(content, "").image()),
        "torchvision decode_jpeg, v2": lambda content: v2s(
            torchvision.io.decode_jpeg(
                torch.frombuffer(bytearray(content), dtype=torch.uint8),
                mode=torchvision.io.ImageReadMode.RGB,
            )
        ),
        "ours": lambda content: ours(EncodedPicture(content, "")),
    }
    return {name: round(_cpu_ms(way, contents) / len(contents), 4) for name, way in ways.items()}


def decoders(folder: Path) -> dict[str, float]:
    """Return the CPU milliseconds per image of the decoders; all of them give the same pixels."""
    contents = [path.read_bytes() for path in sorted(folder.rglob("*.JPEG"))]
    ways: dict[str, Callable[[bytes], object]] = {
        "Pillow": lambda content: EncodedPicture(content, "").image(),
        "torchvision": lambda content: torchvision.io.decode_jpeg(
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
        ),
        "simplejpeg": lambda content: simplejpeg.decode_jpeg(content),
        "OpenCV": lambda content: cv2.imdecode(
            torch.frombuffer(bytearray(content), dtype=torch.uint8).numpy(), cv2.IMREAD_COLOR_RGB
        ),
    }
    return {name: round(_cpu_ms(way, contents) / len(contents), 4) for name, way in ways.items()}


def make_sets(root: Path, scratch: Path, limit: int) -> dict[str, Path]:
    """Write the three sets as ImageFolder trees of at most `limit` images, and return them."""
    sample = root / "imagenet-1k-sample"
    sets = {name: scratch / name for name in ("short side 256", "original sizes", "originals")}
    with open(sample / "index.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows[:: max(1, len(rows) // limit)]:
        source = sample / row["file"]
        for name in ("short side 256", "original sizes"):
            (sets[name] / row["wnid"]).mkdir(parents=True)
        shutil.copy(source, sets["short side 256"] / row["wnid"] / source.name)
        size = int(row["orig_w"]), int(row["orig_h"])
        with Image.open(source) as image:
            image.resize(size, Image.Resampling.BICUBIC).save(
                sets["original sizes"] / row["wnid"] / source.name, quality=90
            )
    for copy in range(max(1, limit // 23)):  # timm drops what is left of a last batch
        shutil.copytree(root / "imagenet-1k-odd" / "original", sets["originals"] / f"copy {copy}")
    return sets


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the unpacked sets")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each loader")
    parser.add_argument("--images", type=int, default=250, help="images per set")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "what": "CPU time of one core, file to uint8 batch; recipe rand-m9-mstd0.5-inc1 at 224 px",
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],  # of the minute before
        "versions": {
            module.__name__: module.__version__
            for module in (torch, torchvision, timm, PIL, cv2, simplejpeg)
        },
        "rounds": arguments.rounds,
        "on_device": on_device(),
        "sets": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder in make_sets(arguments.root, Path(scratch), arguments.images).items():
            result = compare(folder, arguments.rounds)
            result |= stages(folder)
            result |= {"decoders_ms_per_image": decoders(folder)}
            result |= {"crops_ms_per_image": crops(folder)}
            record["sets"][name] = result
            shown = {key: value for key, value in result.items() if key != "seconds_per_image"}
            print(name, as_json(shown))
    write_record(arguments.output, record)


if __name__ == "__main__":
    main()
