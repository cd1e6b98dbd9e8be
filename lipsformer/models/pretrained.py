"""Where `pretrained=True` finds weights: in folders that are named `<model>.<tag>`."""

import functools
import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import timm
from timm.models import PretrainedCfg, register_model
from torch import nn

from lipsformer._files import read_json

Model = TypeVar("Model", bound=nn.Module)

UNTRAINED = "untrained"  # the tag that timm's registry has for models without weights
CHECKOUT = Path(__file__).parents[2] / "weights"
# The keys of a `pretrained_cfg_overlay` that say where weights are, the arguments that timm lets
# differ from those of the weights, and those that leave the function of the network as it is.
SOURCES = ("file", "url", "state_dict", "hf_hub_id")
ADAPTED = ("num_classes", "in_chans", "img_size", "window_size", "global_pool")
NEUTRAL = (
    *("features_only", "out_indices", "feature_cls"),
    *("weight_init", "cache_dir", "device", "dtype", "dynamic_img_size", "strict_img_size"),
)


def register_with_weights(entry: Callable[..., Model]) -> Callable[..., Model]:
    """Register an entry function with timm, and let `pretrained=True` find its weights.

    The weights are those of the folder `<name>.<tag>` in timm's format, in the folder that the
    environment variable `LIPSFORMER_WEIGHTS` names, or in `weights/` of the checkout. The
    arguments that the model of the folder was built with are defaults, also where only the tag is
    named and the weights stay random. Weights that the caller names in timm's other ways, such as
    `local-dir:` and `pretrained_cfg_overlay`, are loaded as timm does, which lets arguments
    replace those of the folder without a check.

    Args:
        entry: The entry function; its name is that of the model.

    Raises:
        RuntimeError: By the registered function, if no folder or more than one fits, or an argument
            contradicts the weights.

    Example:
        >>> import lipsformer, timm
        >>> timm.create_model("lipsformer_swin_nano.cifar10", pretrained=True).num_classes
        10
    """

    @functools.wraps(entry)
    def create(
        pretrained: bool = False,
        pretrained_cfg: str | dict[str, Any] | PretrainedCfg | None = None,
        pretrained_cfg_overlay: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Model:
        overlay = pretrained_cfg_overlay or {}
        tag = pretrained_cfg if isinstance(pretrained_cfg, str) else None
        named = (pretrained_cfg and not tag) or any(map(overlay.get, SOURCES))
        wants_folder = pretrained or tag not in (None, UNTRAINED)
        if named or not wants_folder:
            cfgs = {"pretrained_cfg": pretrained_cfg, "pretrained_cfg_overlay": overlay}
            return entry(pretrained, **cfgs, **kwargs)
        folder = find_folder(entry.__name__, tag)
        check_arguments(folder, entry, kwargs)
        source = {"model_name": f"local-dir:{folder}", "pretrained_cfg_overlay": overlay}
        return cast("Model", timm.create_model(**source, pretrained=pretrained, **kwargs))

    return register_model(create)


def find_folder(name: str, tag: str | None) -> Path:
    """Return the folder of a model's weights.

    Args:
        name: Registered name of the model.
        tag: Tag of the weights; None if there is only one.

    Raises:
        RuntimeError: If there is no such folder, or more than one.
    """
    root = Path(os.environ.get("LIPSFORMER_WEIGHTS") or CHECKOUT)
    folders = root.glob(f"{name}.{glob.escape(tag) if tag else '*'}")
    found = sorted(path for path in folders if path.is_dir())
    if not found:
        raise RuntimeError(
            f"there are no pretrained weights of {name}, because {root} has no folder "
            f"{name}.{tag or '<tag>'}: name a folder that has one in the environment "
            "variable LIPSFORMER_WEIGHTS, such as weights/ of a clone of LipsFormer's repository, "
            "or use pretrained=False"
        )
    if len(found) > 1:
        raise RuntimeError(
            f"{root} has several pretrained weights of {name}: choose one by its name, "
            f"{' or '.join(path.name for path in found)}"
        )
    return found[0]


def check_arguments(folder: Path, entry: Callable[..., nn.Module], kwargs: dict[str, Any]) -> None:
    """Refuse a folder with another model, and arguments that contradict those of its model.

    An argument that the folder does not store had its default in training. Only the entry function
    knows the default, so a model with the argument is compared with a model without it.

    Args:
        folder: Folder of timm's format.
        entry: Entry function of the model that is wanted.
        kwargs: Arguments of the caller.

    Raises:
        RuntimeError: If the model is another one, or an argument differs that timm does not adapt.
        ConfigError: If the folder has no description of its model, or a damaged one.
    """
    config, name = read_json(folder / "config.json"), entry.__name__
    if (held := config.get("architecture")) != name:
        raise RuntimeError(f"{folder} holds a {held}, not a {name}: rename it")
    trained = config.get("model_args", {})
    fixed = {key: value for key, value in kwargs.items() if is_fixed(key)}
    for key, value in fixed.items():
        value = list(value) if isinstance(value, tuple) else value
        if value != trained.get(key, value):
            raise _contradiction(folder, {key: value}, f"{key}={trained[key]!r}")
    others = {key: value for key, value in fixed.items() if key not in trained}
    if others:
        known, wanted = entry(device="meta", **trained), entry(device="meta", **trained, **others)
        if held := find_difference(known, wanted):
            raise _contradiction(folder, others, held)


def is_fixed(argument: str) -> bool:
    """Return whether an argument of a model must be the one with which its weights were trained."""
    return argument not in ADAPTED + NEUTRAL and not argument.endswith("_rate")


def _contradiction(folder: Path, given: dict[str, Any], held: str) -> RuntimeError:
    values = ", ".join(f"{key}={value!r}" for key, value in given.items())
    verb = "contradicts" if len(given) == 1 else "contradict"
    return RuntimeError(
        f"{values} {verb} the weights in {folder}, whose model has {held}: leave "
        f"{', '.join(given)} out, or use pretrained=False"
    )


def find_difference(known: nn.Module, wanted: nn.Module) -> str | None:
    """Return the first place where two models differ besides their weights; None if nowhere.

    Example:
        >>> find_difference(nn.Linear(5, 3), nn.Linear(5, 2))
        'out_features=3 and not 2'
    """
    held, would_hold = describe(known), describe(wanted)
    for place in {**held, **would_hold}:
        value, other = held.get(place), would_hold.get(place)
        if value != other:
            return f"{place}={value!r} and not {other!r}"
    return None


def describe(model: nn.Module) -> dict[str, Any]:
    """Return what decides the function of a model besides its weights, by place in the model.

    These are the classes of the modules, their plain attributes, which include the initial values
    of parameters and buffers, and the shapes of the tensors.
    """
    places: dict[str, Any] = {}
    for path, module in model.named_modules():
        places[path] = type(module).__name__
        for name, value in vars(module).items():
            if isinstance(value, (bool, int, float, str)):
                places[f"{path}.{name}".lstrip(".")] = value
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {**places, **shapes}
