"""What the worker processes of a pool share."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Make this process end when the one that started it ends, killed or not."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
