"""What can be known of a model before anything is written."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer._errors import ConfigError, first_line
from lipsformer.analysis.instruments import SpectralCap
from lipsformer.analysis.sigma import gain_of, operators, residual_scale_of
from lipsformer.config import Config
from lipsformer.engine.build import build_model, describe_model


def check_model(config: Config, classes: Sequence[str], sizes: Sequence[int], batch: int) -> None:
    """Check that the model can be built, fits into the memory, and takes the images.

    The model is built on the meta device, where tensors have no memory, and runs in evaluation and
    in training. A model that cannot be built there is built on the CPU.

    Args:
        config: The config of the run.
        classes: Names of the classes.
        sizes: Sizes of the training images in pixels.
        batch: Number of images of the smallest training batch on one device.

    Raises:
        ConfigError: If anything fails; the message names the keys that decide it.
    """
    trials = [(False, 1, config.data.img_size), *((True, min(batch, 2), size) for size in sizes)]
    try:
        _run_once(config, classes, trials, "meta")
    except NotImplementedError:  # a model of timm that reads values when it is built
        _run_once(config, classes, trials, "cpu")


def _run_once(
    config: Config, classes: Sequence[str], trials: list[tuple[bool, int, int]], device: str
) -> None:
    with warnings.catch_warnings(), torch.device(device), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        model = build_model(config, classes)
        _require_memory(config, model)
        _require_targets(config, model)
        described = describe_model(config)
        for training, count, size in trials:
            key = "data.img_size" if size == config.data.img_size else "augment.img_sizes"
            refusal = f"{described} does not take images of {key}={size} in batches of {count}"
            if training and count == 1:
                refusal += ", the smallest that train.global_batch_size and train.drop_last make"
            images = torch.zeros(count, 3, size, size)
            outputs = try_images(model.train(training), images, refusal)
            expected = (count, len(classes))
            if not isinstance(outputs, Tensor) or outputs.shape != expected:
                found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs)
                raise ConfigError(
                    f"{described} gives no logits: expected a tensor of shape {expected}, found "
                    f"{found}"
                )


def try_images(model: nn.Module, images: Tensor, refusal: str) -> Any:
    """Return what a model makes of images ([B, C, H, W]).

    Args:
        model: The model, in the mode that is to be tried.
        images: The images.
        refusal: What the error says before its reason.

    Raises:
        ConfigError: If the model does not take the images.
        NotImplementedError: If the meta device lacks an operator.
    """
    try:
        with torch.no_grad():
            return model(images)
    except Exception as error:  # a model raises whatever its operators raise
        if isinstance(error, NotImplementedError) and images.is_meta:
            raise
        raise ConfigError(f"{refusal}: {first_line(error)}") from None


def _require_targets(config: Config, model: nn.Module) -> None:
    """Refuse an instrument of weights that the model does not have or that nothing can follow."""
    options = config.lipschitz
    try:
        if options.sigma_cap is not None:
            SpectralCap(model, options.sigma_cap)
        if options.monitor_every or options.update_limit or options.orthogonal:
            operators(model)
    except ValueError as error:
        raise ConfigError(f"the section lipschitz does not fit the model: {error}") from None
    for name, find, target in (
        ("residual_scale_cap", residual_scale_of, "WeightedResidual or LayerScale"),
        ("gain_cap", gain_of, "CenterNorm"),
    ):
        limit = getattr(config.lipschitz, name)
        if limit is not None and all(find(module) is None for module in model.modules()):
            raise ConfigError(
                f"lipschitz.{name}={limit} has no effect, because {describe_model(config)} has no "
                f"{target}: remove it"
            )


def _require_memory(config: Config, model: nn.Module) -> None:
    needed = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise ConfigError(
            f"{describe_model(config)}: its weights alone take {needed / 2**30:,.0f} GiB, and this "
            f"machine has {present / 2**30:,.0f} GiB of memory"
        )
