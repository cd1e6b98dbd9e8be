"""Small ImageFolder trees of random images."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_tree(root: Path, counts: dict[str, int], *, size: tuple[int, int] = (53, 41)) -> Path:
    """Write root/<class>/<number>.png, `counts` images per class, all different."""
    rng = np.random.default_rng(0)
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:03d}.png")
    return root
