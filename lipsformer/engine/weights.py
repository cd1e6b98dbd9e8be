"""Weights in files and in models: reading them, checking that they fit, finding their model."""

import argparse
import logging
import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lipsformer._errors import ConfigError, first_line
from lipsformer.engine.run_files import TIMM_CONFIG, CheckpointError
from lipsformer.engine.run_folder import Weights, find_weights
from lipsformer.models.official_weights import unwrap
from lipsformer.models.pretrained import UNTRAINED

logger = logging.getLogger(__name__)

_EXPECTED = "expected .safetensors, or tensors that torch.save has written"


def load_model(source: str | Path | Weights, which: str = "best") -> nn.Module:
    """Build a model and load its weights.

    Args:
        source: A path as `find_weights` takes it, with a config.json in its folder; or weights that
            `find_weights` returned; or the name of a timm model, which keeps its random weights
            unless the name has a tag.
        which: "best" or "last", for a run.

    Raises:
        CheckpointError: If there are no weights, or they do not fit.
        ConfigError: If it is not known which model the weights belong to, or timm cannot build it.

    Example:
        >>> import lipsformer
        >>> load_model("lipsformer_nano").num_classes
        1000
    """
    if isinstance(source, str) and timm.is_model(source):
        return create_model(source, pretrained=has_tag(source))
    if not isinstance(source, Weights):
        if not os.path.exists(source):
            raise ConfigError(f"{str(source)!r} is neither a timm model nor a file or folder")
        source = find_weights(source, which)
    if source.timm_config() is None:
        raise ConfigError(
            f"{source.folder} has no {TIMM_CONFIG}, which says to which model the weights belong"
        )
    # timm builds the model that config.json describes; load_weights fills it from the right file
    model = timm.create_model(f"local-dir:{source.folder}", pretrained=False)
    load_weights(model, source.file)
    return model


def create_model(name: str, **options: Any) -> nn.Module:
    """Build the model with a name of timm, or from a place `local-dir:...` or `hf-hub:...`.

    Args:
        name: The name.
        **options: Arguments of `timm.create_model`.

    Raises:
        ConfigError: If there is no such model, or its weights are missing or damaged.

    Example:
        >>> import lipsformer
        >>> create_model("lipsformer_nano", num_classes=10).get_classifier().out_features
        10
    """
    try:
        return timm.create_model(name, **options)
    except Exception as error:  # timm raises whatever files and networks make it raise
        raise ConfigError(f"the model {name!r} cannot be built: {first_line(error)}") from error


def has_tag(name: str) -> bool:
    """Return whether the name of a timm model names its weights too, as in `name.tag`.

    Args:
        name: Any text; one that timm does not know names no weights.

    Example:
        >>> has_tag("vit_tiny_patch16_224.augreg_in21k"), has_tag("vit_tiny_patch16_224")
        (True, False)
    """
    return timm.is_model(name) and name.partition(".")[2] not in ("", UNTRAINED)


def load_weights(model: nn.Module, file: Path, *, new_head: bool = False) -> None:
    """Replace the weights of a model.

    The file passes through the `checkpoint_filter_fn` of the model, as in timm's own loading, so
    that it may use names of earlier versions or of released checkpoints.

    Args:
        model: The model.
        file: The weights, in one of the forms that `read_weights` takes.
        new_head: Keep the initial weights of a classifier whose shape differs, for fine-tuning, and
            log that.

    Raises:
        CheckpointError: If anything else is missing, unknown or of another shape.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> save_file({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.zeros(1)}, file)
        >>> model = nn.Linear(2, 1)
        >>> load_weights(model, file)
        >>> model(torch.tensor([3.0, 4.0])).item()  # 1 * 3 + 2 * 4
        11.0
    """
    weights = read_weights(file)
    try:
        weights = _filter_of(model)(weights, model)
    except Exception as error:  # a filter raises whatever foreign weights make it raise
        raise CheckpointError(f"{file} does not fit the model: {first_line(error)}") from None
    own = model.state_dict()
    heads = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    heads = (heads,) if isinstance(heads, str) else heads
    prefixes = tuple(f"{head}." for head in heads)
    fresh = [
        name
        for name, tensor in own.items()
        if new_head
        and name.startswith(prefixes)
        and name in weights
        and weights[name].shape != tensor.shape
    ]
    taken = {name: tensor for name, tensor in weights.items() if name not in fresh}
    check_fit({name: t for name, t in own.items() if name not in fresh}, taken, str(file))
    model.load_state_dict(taken, strict=False)
    if fresh:
        logger.info("classifier  random, because that of %s has another number of classes", file)


def check_fit(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor], origin: str) -> None:
    """Check that two sets of tensors have the same names and shapes.

    Args:
        targets: The tensors to fill.
        sources: The tensors that were read.
        origin: Where they were read, for the message.

    Raises:
        CheckpointError: If they differ.

    Example:
        >>> check_fit({"weight": torch.zeros(2)}, {"weight": torch.ones(2)}, "model.safetensors")
        >>> check_fit({"weight": torch.zeros(2)}, {"weight": torch.ones(3)}, "model.safetensors")
        Traceback (most recent call last):
        lipsformer.engine.run_files.CheckpointError: model.safetensors does not fit the model: ...
    """
    missing = [name for name in targets if name not in sources]
    unknown = [name for name in sources if name not in targets]
    wrong = [
        f"{name} {tuple(sources[name].shape)} for {tuple(target.shape)}"
        for name, target in targets.items()
        if name in sources and sources[name].shape != target.shape
    ]
    if missing or unknown or wrong:
        raise CheckpointError(
            f"{origin} does not fit the model: {len(missing)} tensors are missing "
            f"{missing[:3]}, {len(unknown)} are unknown {unknown[:3]}, "
            f"{len(wrong)} have another shape {wrong[:3]}; use the model and the arguments with "
            "which these tensors were saved"
        )


def _filter_of(
    model: nn.Module,
) -> Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]]:
    """Return the filter that timm applies to weights of this architecture."""
    architecture = getattr(model, "pretrained_cfg", {}).get("architecture", "")
    if not timm.is_model(architecture):
        return lambda weights, _: weights
    module = sys.modules[timm.model_entrypoint(architecture).__module__]
    return getattr(module, "checkpoint_filter_fn", lambda weights, _: weights)


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or tensors that `torch.save` wrote, as in timm's train script.

    Prefixes that DDP and compilation add to names are removed.

    Args:
        file: The file. If its name ends in .safetensors, it is read as such, and otherwise with
            `torch.load`. Its tensors may be in an entry `model` or `state_dict`.

    Raises:
        CheckpointError: If the file does not exist or holds something else.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "checkpoint.pth"
        >>> torch.save({"state_dict": {"module.head.bias": torch.zeros(2)}, "epoch": 3}, file)
        >>> read_weights(file)
        {'head.bias': tensor([0., 0.])}
    """
    try:
        if file.suffix == ".safetensors":
            weights = load_file(file)
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):  # of timm's arguments
                weights = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: there is no such file") from None
    except pickle.UnpicklingError as error:
        refused = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        reason = f"it holds a {refused[1]}, and only tensors are read" if refused else _EXPECTED
        raise CheckpointError(f"{file} is not a file of weights: {reason}") from None
    except Exception as error:  # both readers raise whatever their parsers raise
        raise CheckpointError(f"{file} is not a file of weights: {first_line(error)}") from None
    try:
        return {strip_wrappers(name): tensor for name, tensor in unwrap(weights).items()}
    except ValueError as error:
        raise CheckpointError(f"{file} is not a file of weights: {error}") from None


def strip_wrappers(name: str) -> str:
    """Remove the prefixes of DDP (`module.`) and of compilation (`_orig_mod.`) from a name.

    Args:
        name: Name of a tensor.

    Example:
        >>> strip_wrappers("module._orig_mod.head.bias")
        'head.bias'
    """
    while name.startswith(("module.", "_orig_mod.")):
        name = name.partition(".")[2]
    return name
