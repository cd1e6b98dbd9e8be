"""The weights with which a run begins, if its config names any."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipsformer._errors import ConfigError
from lipsformer.config import Config, DataConfig
from lipsformer.engine.build import build_model
from lipsformer.engine.run_files import CheckpointError
from lipsformer.engine.run_folder import find_weights
from lipsformer.engine.weights import load_weights, read_weights
from lipsformer.models import convert
from lipsformer.models.pretrained import find_difference, is_fixed
from lipsformer.models.timm_conversion import CONVERTED

logger = logging.getLogger(__name__)


def load_initial_weights(config: Config, model: nn.Module, classes: Sequence[str] = ()) -> None:
    """Load the weights that `model.checkpoint` names, if it names any; log which they are.

    The classifier keeps its random weights if the number of classes differs. A warning says if it
    was trained for as many classes with other names. With `model.convert` the weights may be those
    of the model before its conversion. Where timm's config.json describes the model of the weights,
    it must be the one of this config, apart from the arguments that timm adapts and the rates of
    dropout.

    Args:
        config: The config of the run.
        model: Gets the weights, in place.
        classes: Names of the classes of the data, in the order of the logits.

    Raises:
        ConfigError: If `model.checkpoint` names no weights, or if they do not fit the model or
            belong to another one.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> from lipsformer._configfile import read_config
        >>> config = read_config(Config, "configs/demo.yaml")
        >>> trained, model = build_model(config, range(10)), build_model(config, range(10))
        >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> save_file(trained.state_dict(), file)
        >>> options = replace(config.model, checkpoint=str(file))
        >>> load_initial_weights(replace(config, model=options), model)
        >>> bool((model.get_classifier().weight == trained.get_classifier().weight).all())
        True
    """
    if config.model.checkpoint is None:
        return
    try:
        weights = find_weights(config.model.checkpoint)
        known = weights.timm_config() or {}
        name = config.model.name
        held = known.get("architecture", name)  # without a description, the tensors decide
        converted = held == CONVERTED
        if converted:
            held = known["model_args"]["original"]
        if held.partition(".")[0] != name.partition(".")[0]:  # the names without their tags
            raise CheckpointError(f"{weights.file} holds a {held}; set model.name={held}")
        if converted and not config.model.convert:
            raise CheckpointError(f"{weights.file} holds a converted model; set model.convert=true")
        if config.model.convert and not converted and (known or not _has_all(weights.file, model)):
            _convert_weights(config, model, weights.file)
        else:
            if known:
                _require_same_model(config, model, weights.file, known.get("model_args", {}))
            load_weights(model, weights.file, new_head=True)
    except CheckpointError as error:
        raise ConfigError(f"model.checkpoint: {error}") from None
    logger.info("%s", weights)
    trained = weights.classes()
    if trained is not None and len(trained) == len(classes) and trained != list(classes):
        before, now = next((a, b) for a, b in zip(trained, classes, strict=True) if a != b)
        logger.warning(
            "classifier  kept, because that of %s has as many classes, but %r is %r there",
            *(weights.file, now, before),
        )
    _log_preprocessing(config.data, known.get("pretrained_cfg", {}))


def _log_preprocessing(data: DataConfig, trained: Mapping[str, Any]) -> None:
    """Say which settings of the images are not those with which the loaded weights were trained."""
    for name in ("mean", "std", "interpolation", "crop_pct"):
        before, now = trained.get(name), getattr(data, name)
        before = tuple(before) if isinstance(before, list) else before
        if before not in (None, now):
            message = "images      data.%s=%s, and %s when the weights were trained"
            logger.info(message, name, now, before)


def _require_same_model(
    config: Config, model: nn.Module, file: Path, trained: Mapping[str, Any]
) -> None:
    """Refuse weights of a model that differs in more than timm adapts and the rates of dropout.

    Shapes do not tell, for example, another number of heads. Therefore the model of the weights is
    built too.

    Raises:
        CheckpointError: If they differ; the message names the arguments of the trained model.
    """
    arguments = {k: v for k, v in trained.items() if is_fixed(k) and v is not None}
    converted = arguments.pop("convert_args", {})
    arguments.pop("original", None)
    own = {k: v for k, v in config.model.kwargs.items() if not is_fixed(k)}
    options = replace(config.model, kwargs={**arguments, **own}, convert_kwargs=converted or {})
    known = _outline(replace(config, model=options), range(model.num_classes))  # pyright: ignore
    if held := find_difference(known, model):
        settings = f"model.kwargs={arguments}"
        if config.model.convert:
            settings += f" and model.convert_kwargs={options.convert_kwargs}"
        raise CheckpointError(
            f"{file} holds the weights of another model, which has {held}; it was trained with "
            f"{settings}: set the same"
        )


def _outline(config: Config, classes: Sequence[Any]) -> nn.Module:
    """Build a model without memory, or on the CPU if it reads values when it is built."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return build_model(config, classes)
        except NotImplementedError:
            return build_model(config, classes)


def _has_all(file: Path, model: nn.Module) -> bool:
    """Return whether a file has all tensors of a model, by their names."""
    return model.state_dict().keys() <= read_weights(file).keys()


def _convert_weights(config: Config, model: nn.Module, file: Path) -> None:
    """Load the weights of the model before its conversion, and convert them."""
    arguments = config.model.convert_kwargs
    if arguments.get("spectral_init", True):
        raise ConfigError(
            f"model.checkpoint={config.model.checkpoint!r} has no effect with model.convert=true, "
            "which initializes the weights: set model.convert_kwargs.spectral_init=false"
        )
    plain = replace(config, model=replace(config.model, convert=False, convert_kwargs={}))
    original = build_model(plain, range(model.num_classes))  # pyright: ignore
    load_weights(original, file, new_head=True)
    model.load_state_dict(convert(original, **arguments).state_dict())
