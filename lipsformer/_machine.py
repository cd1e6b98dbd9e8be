"""What is known about the code and the processor."""

import os
import platform
import subprocess
from pathlib import Path


def commit(checkout: Path = Path(__file__).parent) -> str | None:
    """Return the commit of a checkout, with "-dirty" if its tracked files differ.

    Args:
        checkout: A folder of the checkout, by default that of this code.

    Returns:
        None outside a clone and without git.
    """
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return result.stdout.strip() or None


def cpu_name() -> str:
    """Return the name of the processor, from Linux's /proc/cpuinfo where it exists."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
