"""Where ``pretrained=True`` finds weights: in folders that are named ``<model>.<tag>``."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import timm
from timm.models import PretrainedCfg, register_model
from torch import nn

Model = TypeVar("Model", bound=nn.Module)

CHECKOUT = Path(__file__).parents[2] / "weights"
# The keys of a `pretrained_cfg_overlay` that say where weights are, and the arguments that timm
# lets differ from those of the weights.
SOURCES = ("file", "url", "state_dict", "hf_hub_id")
ADAPTED = ("num_classes", "in_chans", "img_size", "window_size", "global_pool")


def register_with_weights(entry: Callable[..., Model]) -> Callable[..., Model]:
    """Register an entry function with timm, and let ``pretrained=True`` find its weights.

    The weights are those of the folder ``<name>.<tag>`` in timm's format, in the folder that the
    environment variable ``LIPSFORMER_WEIGHTS`` names, or in ``weights/`` of the checkout. The
    arguments that the model of the folder was built with are defaults. Weights that the caller
    names in timm's other ways, such as ``local-dir:`` and ``pretrained_cfg_overlay``, are left
    alone.

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
        if not pretrained or named:
            cfgs = {"pretrained_cfg": pretrained_cfg, "pretrained_cfg_overlay": overlay}
            return entry(pretrained, **cfgs, **kwargs)
        folder = find_folder(entry.__name__, tag)
        check_arguments(folder, entry.__name__, kwargs)
        source = {"model_name": f"local-dir:{folder}", "pretrained_cfg_overlay": overlay}
        return cast("Model", timm.create_model(**source, pretrained=True, **kwargs))

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
    wanted = f"{name}.{tag}" if tag else f"{name}."
    found = [
        path
        for path in (sorted(root.iterdir()) if root.is_dir() else [])
        if path.is_dir() and (path.name == wanted if tag else path.name.startswith(wanted))
    ]
    if not found:
        raise RuntimeError(
            f"there are no pretrained weights of {name}, because {root} has no folder "
            f"{wanted if tag else f'{name}.<tag>'}: name a folder that has one in the environment "
            "variable LIPSFORMER_WEIGHTS, such as weights/ of a clone of LipsFormer's repository, "
            "or use pretrained=False"
        )
    if len(found) > 1:
        raise RuntimeError(
            f"{root} has several pretrained weights of {name}: choose one by its name, "
            f"{' or '.join(path.name for path in found)}"
        )
    return found[0]


def check_arguments(folder: Path, name: str, kwargs: dict[str, Any]) -> None:
    """Refuse a folder with another model, and arguments that contradict those of its model.

    Args:
        folder: Folder of timm's format.
        name: Registered name of the model that is wanted.
        kwargs: Arguments of the caller.

    Raises:
        RuntimeError: If the model is another one, or an argument differs that timm does not adapt.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["architecture"] != name:
        raise RuntimeError(f"{folder} holds a {config['architecture']}, not a {name}: rename it")
    for key, known in config.get("model_args", {}).items():
        value = kwargs.get(key, known)
        value = list(value) if isinstance(value, tuple) else value
        if value != known and key not in ADAPTED and not key.endswith("_rate"):
            raise RuntimeError(
                f"{key}={value!r} contradicts the weights in {folder}, whose model has "
                f"{key}={known!r}: leave {key} out, or use pretrained=False"
            )
