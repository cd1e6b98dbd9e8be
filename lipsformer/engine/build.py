"""The model and the instruments of a config."""

import difflib
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
from timm.models._hub import save_config_for_hf  # the public save_for_hf also writes weights
from torch import Tensor, nn

from lipsformer._errors import ConfigError, first_line
from lipsformer._renamed import renamed
from lipsformer.analysis.bounds import Domain, UnknownModuleError, image_domain, lipschitz_bound
from lipsformer.analysis.instruments import (
    BoundCheck,
    InstrumentBase,
    Monitor,
    Orthogonal,
    SpectralCap,
    UpdateLimit,
)
from lipsformer.config import Config, LipschitzConfig
from lipsformer.engine.run_files import TIMM_CONFIG
from lipsformer.engine.train_state import TrainState
from lipsformer.models.timm_conversion import CONVERTED

logger = logging.getLogger(__name__)


def build_model(config: Config, classes: Sequence[Any]) -> nn.Module:
    """Build the model of a config with its random initial weights.

    `model.checkpoint` is not read: `load_initial_weights` does that.

    Args:
        config: The config of the run.
        classes: The classes; only their number is used.

    Raises:
        ConfigError: If timm does not know the model, or the model does not know an argument.

    Example:
        >>> from lipsformer._configfile import read_config
        >>> config = read_config(Config, "configs/demo.yaml")
        >>> build_model(config, classes=("cat", "dog")).get_classifier().out_features
        2
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
    """Return the settings that decide the model, as a user wrote them.

    Example:
        >>> from lipsformer._configfile import read_config
        >>> describe_model(read_config(Config, "configs/demo.yaml"))
        "model.name='lipsformer_nano' with model.kwargs={'drop_path_rate': 0.1}"
    """
    options = config.model
    text = f"model.name={options.name!r}"
    for key, value in (
        ("kwargs", options.kwargs),
        ("convert", options.convert),
        ("convert_kwargs", options.convert_kwargs),
    ):
        text += f" with model.{key}={value}" if value else ""
    return text


def timm_config(model: nn.Module, classes: Sequence[str]) -> str:
    """Return the JSON from which `timm.create_model('local-dir:...')` rebuilds the model.

    Args:
        model: A model that timm built.
        classes: Names of the classes in the order of the logits, which are written too.

    Example:
        >>> import json
        >>> import lipsformer
        >>> model = timm.create_model("lipsformer_nano", num_classes=2)
        >>> description = json.loads(timm_config(model, ["cat", "dog"]))
        >>> description["architecture"], description["label_names"]
        ('lipsformer_nano', ['cat', 'dog'])
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / TIMM_CONFIG
        save_config_for_hf(model, str(path), model_config={"label_names": list(classes)})
        return path.read_text()


def bound_domain(config: Config, model: nn.Module) -> Domain | None:
    """Return the images for which the run records the proved bound; None if it records none.

    A run records the bound if any instrument is on and every layer of the model has a rule.

    Args:
        config: The config of the run.
        model: The model of the config.

    Raises:
        ConfigError: If the bound has a limit but the model has no bound.
    """
    options, size = config.lipschitz, config.data.img_size
    if options == LipschitzConfig():  # no instrument is on
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
    caps = (options.sigma_cap, options.residual_scale_cap, options.gain_cap)
    if any(limit is not None for limit in caps):
        cap = SpectralCap(
            module,
            options.sigma_cap,
            mode=options.cap_mode,
            strength=options.cap_strength,
            residual_scale=options.residual_scale_cap,
            gain=options.gain_cap,
            average=state.weights().get("ema"),
        )
        cap.before_eval()  # for initial weights above the caps
        instruments.append(cap)
    if options.orthogonal:
        instruments.append(Orthogonal(module))
        instruments[-1].before_eval()  # for initial weights that are not orthogonal
    if (every := options.monitor_every) is not None:
        instruments.append(Monitor(module, write, every=every, probe=probe, domain=domain))
    if domain is not None:
        instruments.append(BoundCheck(state.weights(), domain, options.bound_limit))
    return instruments


__getattr__ = renamed(__name__)
