"""Folders that appear complete or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `out`, which gets that name at the end; an error removes it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        hidden.chmod(0o755)
        yield hidden
        hidden.rename(out)
    except BaseException:
        shutil.rmtree(hidden)
        raise
