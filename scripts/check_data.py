"""Read every image below a folder, in parallel, and report the files that cannot be used.

    python -m scripts.check_data datasets/imagenette-160 --list unreadable.txt
    python -m scripts.check_data datasets/imagenet-1k --parquet train --list unreadable.txt

The list holds one path per line, relative to the folder, or one split/number per line for parquet
files. Given as `data.skip_list`, it makes training and evaluation leave these images out. Exit
codes: 0 all images can be read; 1 some cannot; 2 there are no images, or an option is wrong.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from data.check import Finding, check_files, check_parquet
from data.errors import DataError
from data.skip_list import write_skip_list
from data.sources import image_files
from lipsformer._commands import documented_parser, user_errors
from lipsformer._errors import ConfigError
from lipsformer._files import require_writable
from lipsformer._machine import cores


def report(findings: list[Finding]) -> str:
    """Describe the findings, with one line for each unreadable file."""
    good = [finding for finding in findings if finding.error is None]
    bad = [finding for finding in findings if finding.error is not None]
    lines = [f"unreadable: {finding.file}: {finding.error}" for finding in bad]
    lines.append(f"{len(findings)} images, {len(bad)} unreadable")
    for kind, count in Counter(finding.kind for finding in good).most_common():
        lines.append(f"{count:9d} {kind}")
    for count, what in (
        (sum(f.rotated for f in good), "with an EXIF orientation, which is not applied"),
        (sum(f.animated for f in good), "animated, of which the first frame is used"),
        (sum(f.misnamed for f in good), "named as another format than their content"),
    ):
        if count:
            lines.append(f"{count:9d} {what}")
    if good:
        by_area = sorted(good, key=lambda finding: finding.size[0] * finding.size[1])
        for word, finding in (("smallest", by_area[0]), ("largest", by_area[-1])):
            lines.append(f"{word}: {finding.size[0]}x{finding.size[1]} {finding.file}")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = documented_parser(__doc__)
    parser.add_argument("folder", type=Path, help="folder of images, at any depth, or parquet")
    parser.add_argument("--parquet", metavar="SPLIT", help="check this split of parquet files")
    parser.add_argument("--workers", type=int, default=cores(), help="number of processes")
    parser.add_argument("--list", type=Path, help="write the paths of unreadable files to it")
    return parser


@user_errors(ConfigError, DataError)
def main(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    args = (parser or make_parser()).parse_intermixed_args(argv)
    if args.workers < 1:
        raise ConfigError(f"--workers {args.workers} must be at least 1")
    if args.list is not None:
        require_writable("--list", args.list)
    if args.parquet is not None:
        found = check_parquet(args.folder, args.parquet, args.workers)
    else:
        files = image_files(args.folder)
        if not files:
            raise DataError(f"no image files in {args.folder}")
        broken = [file for file in files if "\n" in file or "\r" in file]
        if args.list is not None and broken:
            raise DataError(
                f"--list {str(args.list)!r} cannot hold {broken[0]!r}, whose name has a line "
                "break: rename the file"
            )
        found = check_files(args.folder, files, args.workers)
    findings = list(tqdm(found, unit="image", disable=not sys.stderr.isatty()))
    unreadable = [finding.file for finding in findings if finding.error is not None]
    if args.list is not None:  # first, because a reader of the report may close the pipe
        write_skip_list(args.list, unreadable)
    print(report(findings).encode("utf-8", "backslashreplace").decode())
    return 1 if unreadable else 0


if __name__ == "__main__":
    sys.exit(main())
