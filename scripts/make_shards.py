"""Packs one split of an ImageFolder tree into tar shards (WebDataset's layout), for network disks.

    python -m scripts.make_shards datasets/imagenette-160/train shards/imagenette-160/train
    python -m scripts.make_shards --verify shards/imagenette-160/train

Image files go in unchanged, in a random order that the seed fixes. Started again after an
interruption it keeps the shards that are complete. Train from them with `data.source=shards`,
`data.root=shards`, `data.name=imagenette-160`. Exit codes: 0 done; 1 a shard is damaged; 2 a
mistake in the arguments or the tree.
"""

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from data.errors import DataError
from data.shards import (
    INDEX,
    checksum,
    damaged_shards,
    shard_members,
    shard_name,
    write_index,
    write_shard,
)
from data.sources import FolderSource

PLAN = "plan.json"


def make(source_path: Path, path: Path, *, images_per_shard: int, seed: int) -> None:
    """Write what is missing of the shards, and then the index.

    Raises:
        DataError: if the tree is not usable, or `path` holds shards of another plan.
    """
    source = FolderSource(source_path)
    plan = {
        "source": str(source_path.resolve()),
        "images": len(source.labels),
        "images_per_shard": images_per_shard,
        "seed": seed,
    }
    found = json.loads((path / PLAN).read_text()) if (path / PLAN).exists() else plan
    if found != plan or (not (path / PLAN).exists() and path.exists() and any(path.iterdir())):
        raise DataError(
            f"{path} is not empty and not a part of this: {plan}; choose another folder"
        )
    path.mkdir(parents=True, exist_ok=True)
    (path / PLAN).write_text(json.dumps(plan))
    members = shard_members(source, images_per_shard, seed)
    checksums = []
    for number, indices in enumerate(_progress(members)):
        shard = path / shard_name(number)
        if not shard.exists():
            write_shard(source, indices, shard)
        checksums.append(checksum(shard))
    write_index(source, path, checksums)


def verify(path: Path) -> list[str]:
    """Names of the shards that are not as they were written."""
    if not (path / INDEX).exists():
        raise DataError(f"no {INDEX} in {path}: it holds no complete shards")
    return [name for name, damaged in _progress(list(damaged_shards(path))) if damaged]


def _progress(items: list) -> tqdm:
    return tqdm(items, unit="shard", disable=not sys.stderr.isatty())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, nargs="?", help="folder of class folders")
    parser.add_argument("shards", type=Path, help="folder of the shards")
    parser.add_argument("--images-per-shard", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--verify", action="store_true", help="only compare the checksums")
    options = parser.parse_args(arguments)
    if options.verify == (options.source is not None) or options.images_per_shard < 1:
        parser.error("give a source and a folder for shards, or --verify and a folder of shards")
    try:
        if options.verify:
            damaged = verify(options.shards)
            print("\n".join(f"damaged: {name}" for name in damaged) or "all shards are sound")
            return 1 if damaged else 0
        make(
            options.source,
            options.shards,
            images_per_shard=options.images_per_shard,
            seed=options.seed,
        )
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
