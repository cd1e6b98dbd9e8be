"""What a run is trained with: versions, machine, ranks and memory."""

import platform
import resource
import sys
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch
from accelerate import Accelerator

from lipsformer._machine import commit, cpu_name


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """Return what may explain why two runs differ: versions, commit, command, machine, ranks."""
    packages = ("torch", "timm", "accelerate", "torchvision", "safetensors", "omegaconf", "numpy")
    device = accelerator.device
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "git_commit": commit(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "world_size": accelerator.num_processes,
        "distributed": str(accelerator.distributed_type.value),
        "precision": accelerator.mixed_precision,
    }


def memory_gib(device: torch.device) -> float:
    """Return the peak memory so far: allocated on a CUDA device, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
