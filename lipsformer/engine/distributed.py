"""A process among its ranks: how it joins them, with which device and precision."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from timm.utils.model_ema import ModelEmaV3
from torch.distributed.tensor import DTensor

from lipsformer._errors import ConfigError
from lipsformer.config import Config
from lipsformer.engine.allocator import keep_freed_memory
from lipsformer.engine.run_files import TENSORBOARD

logger = logging.getLogger(__name__)


def start(config: Config) -> Accelerator:
    """Join the other processes, if any, and set device, precision, determinism and allocator.

    Raises:
        ConfigError: If the launcher asks for an engine, a form of parallelism or a tracker that
            cannot be used here, or processes of the launch are missing.
    """
    keep_freed_memory()
    # The launcher sets this variable to true. Accelerate 1.15 then sends the weights of rank 0 to
    # all others, which fails if a buffer is not sharded. Here every rank builds the same weights.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    for engine in ("DEEPSPEED", "MEGATRON_LM"):
        if _asked_for(engine):
            raise ConfigError(
                f"ACCELERATE_USE_{engine}=true is set, but only DDP and FSDP2 train here: "
                "launch without it"
            )
    if _asked_for("PARALLELISM_CONFIG"):
        _require_data_parallel()
    known, installed = set(LOGGER_TYPE_TO_CLASS), set(map(str, get_available_trackers()))
    for name in config.run.trackers:
        if name not in known:
            raise ConfigError(
                f"run.trackers: {name!r} is not known; choose from {', '.join(sorted(known))}"
            )
        if name not in installed:
            raise ConfigError(f"run.trackers: the package of {name!r} is not installed")
    if config.train.deterministic:
        # cuBLAS reads this when it starts; nothing has touched the device yet.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # With images of one size, cuDNN's trial of its algorithms pays off after a few updates.
    torch.backends.cudnn.benchmark = not (config.train.deterministic or config.augment.img_sizes)
    output_dir = Path(config.run.output_dir)
    accelerator = make_accelerator(
        config.train.precision,
        log_with=list(config.run.trackers) or None,
        project_config=ProjectConfiguration(
            project_dir=str(output_dir), logging_dir=str(output_dir / TENSORBOARD)
        ),
    )
    refuse_lost_processes(accelerator.num_processes)
    if _asked_for("FSDP") and not accelerator.is_fsdp2:
        raise ConfigError(
            f"FSDP was asked for, but Accelerate set up {accelerator.distributed_type.value}: it "
            "leaves FSDP out on CPUs, and its default is version 1; use --fsdp_version 2 on GPUs"
        )
    return accelerator


def refuse_lost_processes(num_processes: int) -> None:
    """Raise a `ConfigError` if the launcher was asked for more processes than it started.

    For `--cpu --num_processes 2` Accelerate 1.15 starts one process, without a WORLD_SIZE, but with
    the address at which two would meet.

    Args:
        num_processes: Number of processes that have joined.
    """
    launched = {"MASTER_ADDR", "ACCELERATE_DYNAMO_BACKEND"} <= os.environ.keys()
    if launched and "WORLD_SIZE" not in os.environ and num_processes == 1:
        raise ConfigError(
            "`accelerate launch --num_processes N` started one process instead of N, as it does on "
            "CPUs: use `torchrun --nproc_per_node N`, or --num_processes 1 to train on one"
        )


def _asked_for(engine: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{engine}", "").lower() == "true"


def _require_data_parallel() -> None:
    """Raise a `ConfigError` unless the mesh of a launcher is replicas x shards of all processes."""
    size = {
        name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rest = max(size["tp"], size["cp"], size["sp"])
    if rest > 1 or size["dp_shard"] < 2 or size["dp_replicate"] * size["dp_shard"] != world:
        shown = ", ".join(f"{name}_size={value}" for name, value in size.items())
        raise ConfigError(
            f"the parallelism config of the launcher ({shown}) is not possible: only HSDP trains "
            f"here, with dp_replicate_size x dp_shard_size = {world} processes and "
            "dp_shard_size at least 2"
        )


def make_accelerator(precision: str, **options: Any) -> Accelerator:
    """Build an accelerator of the given precision.

    Without a GPU, the CPU is requested explicitly. Otherwise Accelerate 1.15 does not connect the
    processes of torchrun, and each of them has a world size of one.

    Args:
        precision: "fp32", "bf16" or "fp16" of `train.precision`, or "fp64", for which the caller
            casts the model.
        **options: Further arguments of `Accelerator`.

    Raises:
        ConfigError: If the device does not support the precision.
    """
    try:
        # Accelerate would divide the loss by this number; here the config divides the batch.
        if os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") != "1":
            logger.warning(
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is ignored: "
                "set train.batch_size_per_device instead"
            )
        accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),
            mixed_precision="no" if precision in ("fp32", "fp64") else precision,
            # Gradients are views of DDP's buckets, which saves a copy of each. Buffers are not sent
            # before every forward pass: `TrainState.agree_on_buffers` sends them when they matter.
            kwargs_handlers=[
                DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
            ],
            **options,
        )
    except ValueError as error:
        raise ConfigError(f"train.precision={precision!r} is not possible here: {error}") from None
    if precision == "fp16" and accelerator.scaler is None:  # Accelerate would train in fp32
        raise ConfigError(
            f"train.precision='fp16' is not possible on {accelerator.device.type}: use bf16 or fp32"
        )
    on_cpu = accelerator.device.type == "cpu"
    if precision == "bf16" and on_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        logger.warning(
            "this processor has no instructions for bf16, which takes many times as long as fp32: "
            "set train.precision=fp32 for training, --precision fp32 for eval.py"
        )
    return accelerator


def shard_ema(ema: ModelEmaV3, accelerator: Accelerator) -> None:
    """Shard the average as FSDP2 shards the model; do nothing without FSDP2.

    Accelerate's `prepare` would require an optimizer for it.
    """
    if accelerator.is_fsdp2:
        ema.module = fsdp2_prepare_model(accelerator, ema.module)
        # Buffers are not sharded, and no operation on lists takes them together with shards.
        averaged = [t for t in ema.module.state_dict().values() if t.is_floating_point()]
        ema.foreach = all(isinstance(tensor, DTensor) for tensor in averaged)
