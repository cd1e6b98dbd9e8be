"""Command lines, run from the repository root as `python -m scripts.<name>`."""

from lipsformer import _renamed as _renamed
