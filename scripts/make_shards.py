"""Pack one split of images into tar shards in WebDataset's layout, for network disks.

    python -m scripts.make_shards datasets/imagenette-160/train shards/imagenette-160/train
    python -m scripts.make_shards datasets/imagenet-1k shards/imagenet-1k/val --parquet validation
    python -m scripts.make_shards --verify shards/imagenette-160/train

The source is an ImageFolder tree or a split of Hugging Face parquet files. The files of a tree are
packed unchanged, in a random order that the seed decides. Parquet images keep their order. The same
command continues after an interruption and keeps the complete shards. It is refused if a file of
the source has another size or time of change than at the first start. Train from shards with
`data.source=shards data.root=shards data.name=imagenette-160`. Exit codes: 0 done; 1 a shard is
damaged; 2 a mistake in the arguments or the source.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.build import build_source
from data.errors import DataError
from data.images import size_and_time
from data.parquet import ParquetSource
from data.shards import (
    INDEX,
    checksum,
    is_complete,
    is_intact,
    read_index,
    shard_members,
    shard_name,
    write_index,
    write_shard,
)
from data.sources import FolderSource
from lipsformer._commands import documented_parser, user_errors
from lipsformer._errors import ConfigError
from lipsformer._files import read_json, write_atomically
from lipsformer.config import DataConfig

PLAN = "plan.json"


def make(
    source: FolderSource | ParquetSource,
    path: Path,
    *,
    described: str,
    images_per_shard: int,
    seed: int,
) -> None:
    """Write the shards that are missing or damaged, and then the index.

    Args:
        source: The images.
        path: Folder of the shards.
        described: Description of the source, which the plan stores.
        images_per_shard: Number of images in every shard but the last.
        seed: Seed of the order.

    Raises:
        DataError: If `path` holds other files, or shards of another plan.
    """
    plan = {
        "source": described,
        "images": len(source.labels),
        "contents": _fingerprint(source),
        "sizes and times of its files": _sizes_and_times(source),
        "images_per_shard": images_per_shard,
        "seed": seed,
    }
    # Plans of earlier versions lack the sums.
    found = plan | (read_json(path / PLAN) if (path / PLAN).exists() else {})
    if other := [key for key in plan if found[key] != plan[key]]:
        raise DataError(
            f"{path} holds shards that differ in {', '.join(other)}; choose another folder"
        )
    # A start that ended while it wrote its plan has left a part of it.
    others = {p.name for p in path.iterdir()} - {f".{PLAN}"} if path.exists() else set()
    if others and not (path / PLAN).exists():
        raise DataError(f"{path} is not empty, and its files are no shards; choose another folder")
    path.mkdir(parents=True, exist_ok=True)
    if not (path / PLAN).exists():
        write_atomically(path / PLAN, json.dumps(plan))
    members = shard_members(source, images_per_shard, seed)
    checksums, known = [], _known_checksums(path)
    for number, indices in enumerate(_progress(members)):
        shard = path / shard_name(number)
        found = checksum(shard) if is_complete(shard) else None
        if found is None or known.get(shard.name, found) != found:
            write_shard(source, indices, shard)
            found = checksum(shard)
        checksums.append(found)
    write_index(source, path, checksums)


def _known_checksums(path: Path) -> dict[str, str]:
    """Return the sums of an earlier run by shard; none if its index is missing or damaged."""
    try:
        return {shard["file"]: shard["sha256"] for shard in read_index(path)["shards"]}
    except DataError:
        return {}


def _fingerprint(source: FolderSource | ParquetSource) -> str:
    """Return a sum over the classes, the labels and the names of the images."""
    digest = hashlib.sha256(json.dumps(source.classes).encode())
    digest.update(source.labels.astype(np.int64).tobytes())
    for name in source.names():
        digest.update(name + b"\0")
    return digest.hexdigest()


def _sizes_and_times(source: FolderSource | ParquetSource) -> str:
    """Return a sum that changes if a file of the source is replaced by another one of its name."""
    count = len(source.labels)
    folder = isinstance(source, FolderSource)
    files = map(source.file, range(count)) if folder else source.files
    return hashlib.sha256(json.dumps([size_and_time(file) for file in files]).encode()).hexdigest()


def verify(path: Path) -> list[str]:
    """Return the names of the shards that changed since they were written."""
    if not (path / INDEX).exists():
        raise DataError(f"no {INDEX} in {path}: it holds no complete shards")
    shards = {shard["file"]: shard["sha256"] for shard in read_index(path)["shards"]}
    return [name for name in _progress(list(shards)) if not is_intact(path / name, shards[name])]


def _progress(items: list) -> tqdm:
    return tqdm(items, unit="shard", disable=not sys.stderr.isatty())


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("source", type=Path, nargs="?", help="folder of class folders, or parquet")
    parser.add_argument("shards", type=Path, help="folder of the shards")
    parser.add_argument("--images-per-shard", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the order")
    parser.add_argument(
        "--parquet", metavar="SPLIT", help="the source is this split of parquet files"
    )
    parser.add_argument("--skip-list", help="files to leave out, listed by check-data")
    parser.add_argument("--verify", action="store_true", help="only check existing shards")
    return parser


@user_errors(ConfigError, DataError)
def main(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    parser = parser or make_parser()
    args = parser.parse_intermixed_args(argv)
    if args.images_per_shard < 1:
        parser.error(f"--images-per-shard {args.images_per_shard} must be at least 1")
    if args.verify == (args.source is not None):
        parser.error("give a source and a folder for shards, or --verify and a folder of shards")
    if args.verify:
        for option in ("images_per_shard", "seed", "parquet", "skip_list"):
            if getattr(args, option) != parser.get_default(option):
                parser.error(
                    f"--verify reads the shards alone: leave --{option} out".replace("_", "-")
                )
        damaged = verify(args.shards)
        print("\n".join(f"damaged: {name}" for name in damaged) or "all shards are intact")
        return 1 if damaged else 0
    folder = args.source.resolve()
    data = DataConfig(
        source="parquet" if args.parquet else "folder",
        root=str(folder if args.parquet else folder.parent),
        skip_list=args.skip_list,
    )
    source = build_source(data, args.parquet or folder.name)
    assert isinstance(source, FolderSource | ParquetSource)
    try:
        make(
            source,
            args.shards,
            described=f"{folder} {args.parquet or ''}".strip(),
            images_per_shard=args.images_per_shard,
            seed=args.seed,
        )
    except OSError as error:
        raise DataError(
            f"the shards in {args.shards} cannot be written: {error}; make room on the disk and "
            "repeat the command, which keeps the complete shards, or choose another folder"
        ) from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
