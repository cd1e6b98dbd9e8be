"""The folder of all data sets."""

import os
from pathlib import Path


def data_root(root: str | None) -> Path:
    """Return the folder of all data sets.

    Args:
        root: The folder that the config names. If it is None or empty, the environment variable
            LIPSFORMER_DATA decides, and if that is not set or empty, the folder is `datasets`.
    """
    return Path(root or os.environ.get("LIPSFORMER_DATA") or "datasets")
