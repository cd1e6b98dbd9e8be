"""The model and the instruments of a config."""

import difflib
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models._hub import save_config_for_hf  # the public save_for_hf also writes weights
from torch import Tensor, nn

from lipsformer._configfile import ConfigError
from lipsformer._errors import first_line
from lipsformer.analysis.bounds import Domain, UnknownModuleError, image_domain, lipschitz_bound
from lipsformer.analysis.instruments import (
    BoundCheck,
    InstrumentBase,
    Monitor,
    Orthogonal,
    SpectralCap,
    UpdateLimit,
)
from lipsformer.config import Config, DataConfig, LipschitzConfig
from lipsformer.engine.run_files import TIMM_CONFIG, CheckpointError
from lipsformer.engine.run_folder import find_weights
from lipsformer.engine.train_state import TrainState
from lipsformer.engine.weights import load_weights, read_weights
from lipsformer.models import convert
from lipsformer.models.pretrained import find_difference, is_fixed
from lipsformer.models.timm_conversion import CONVERTED

logger = logging.getLogger(__name__)


def build_model(config: Config, classes: Sequence[Any]) -> nn.Module:
    """Build the model of a config with its random initial weights.

    Raises:
        ConfigError: If timm does not know the model, or the model does not know an argument.
    """
    name, data = config.model.name, config.data
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"near it: {', '.join(near)}" if near else "timm.list_models() lists all"
        raise ConfigError(f"model.name={name!r} is not known to timm; {hint}")
    source: dict[str, Any] = {"model_name": name}
    if config.model.convert:
        source = {
            "model_name": CONVERTED,
            "original": name,
            "convert_args": config.model.convert_kwargs,
        }
    try:
        model = timm.create_model(
            **source,
            num_classes=len(classes),
            pretrained_cfg_overlay={
                "num_classes": len(classes),
                "input_size": (3, data.img_size, data.img_size),
                "interpolation": data.interpolation,
                "crop_pct": data.crop_pct,
                "mean": data.mean,
                "std": data.std,
            },
            **config.model.kwargs,
        )
        if config.train.grad_checkpointing:
            model.set_grad_checkpointing(True)  # pyright: ignore[reportCallIssue]
            _require_no_running_statistics(name, model)
    except (ConfigError, NotImplementedError):  # the meta device lacks an operator
        raise
    except Exception as error:  # wrong arguments raise whatever timm and torch raise
        raise ConfigError(
            f"{describe_model(config)} cannot be built: {first_line(error)}"
        ) from error
    return model


def _require_no_running_statistics(name: str, model: nn.Module) -> None:
    """Raise a `ConfigError` if a layer would count the batches that checkpointing repeats."""
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            raise ConfigError(
                f"train.grad_checkpointing=true is not possible with model.name={name!r}: its "
                f"{type(module).__name__} would count every batch twice in its running statistics"
            )


def describe_model(config: Config) -> str:
    """Return the settings that decide the model, as a user wrote them."""
    options = config.model
    text = f"model.name={options.name!r}"
    for key, value in (
        ("kwargs", options.kwargs),
        ("convert", options.convert),
        ("convert_kwargs", options.convert_kwargs),
    ):
        text += f" with model.{key}={value}" if value else ""
    return text


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
        ConfigError: If there are none, they do not fit, or they belong to another model.
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


def timm_config(model: nn.Module, classes: Sequence[str]) -> str:
    """Return the JSON from which `timm.create_model('local-dir:...')` rebuilds the model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / TIMM_CONFIG
        save_config_for_hf(model, str(path), model_config={"label_names": list(classes)})
        return path.read_text()


def bound_domain(config: Config, model: nn.Module) -> Domain | None:
    """Return the images for which the run records the proved bound; None if it records none.

    A run records the bound if any instrument is on and every layer of the model has a rule.

    Raises:
        ConfigError: If the bound has a limit but the model has no bound.
    """
    options, size = config.lipschitz, config.data.img_size
    settings = (options.monitor_every, options.update_limit, options.bound_limit, *_caps(options))
    if all(setting is None for setting in settings) and not options.orthogonal:
        return None
    domain = image_domain((size, size), config.data.mean, config.data.std)
    try:
        lipschitz_bound(model, domain)
    except UnknownModuleError as error:
        if (limit := options.bound_limit) is not None:
            raise ConfigError(f"lipschitz.bound_limit={limit} cannot be checked: {error}") from None
        logger.warning("the Lipschitz bound is not recorded: %s", error)
        return None
    return domain


def make_instruments(
    options: LipschitzConfig,
    state: TrainState,
    *,
    probe: Tensor | None,
    domain: Domain | None,
    write: Callable[[int, Mapping[str, float]], None],
) -> list[InstrumentBase]:
    """Build the instruments in the order in which they run; caps hold from the beginning.

    The order is update limit, spectral cap, orthogonal matrices, monitor, check of the bound.

    Args:
        options: Which instruments are on.
        state: The prepared model and its average.
        probe: A few inputs of the model, on its device, at which the monitor reads attention; None
            leaves the attention out.
        domain: The images for which the bound is recorded; None for no bound.
        write: Receives the records of the monitor, with the number of completed steps.
    """
    module = state.module
    instruments: list[InstrumentBase] = []
    if options.update_limit is not None:
        instruments.append(UpdateLimit(module, options.update_limit))
    if any(limit is not None for limit in _caps(options)):
        cap = SpectralCap(
            module,
            options.sigma_cap,
            mode=options.cap_mode,
            strength=options.cap_strength,
            residual_scale=options.residual_scale_cap,
            gain=options.gain_cap,
        )
        # Caps the initial weights. The EMA needs none: its first step replaces its initial weights.
        cap.before_eval()
        instruments.append(cap)
    if options.orthogonal:
        instruments.append(Orthogonal(module))
        instruments[-1].before_eval()  # for initial weights that are not orthogonal
    if (every := options.monitor_every) is not None:
        instruments.append(Monitor(module, write, every=every, probe=probe, domain=domain))
    if domain is not None:
        instruments.append(BoundCheck(state.weights(), domain, options.bound_limit))
    return instruments


def _caps(options: LipschitzConfig) -> tuple[float | None, ...]:
    return options.sigma_cap, options.residual_scale_cap, options.gain_cap
