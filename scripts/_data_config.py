"""The settings of the images that a model without a run takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from lipsformer._configfile import make_config
from lipsformer.config import DataConfig


def data_config(known: Mapping[str, Any], overrides: Sequence[str], *, origin: str) -> DataConfig:
    """Return the preprocessing of a model, with `overrides` that say which images.

    Args:
        known: timm's `pretrained_cfg` of the model.
        overrides: `key=value` settings of the data.
        origin: What the user calls the source of these settings, for messages.
    """
    settings = {
        "img_size": known["input_size"][-1],
        **{key: known[key] for key in ("mean", "std", "crop_pct", "interpolation")},
    }
    return make_config(DataConfig, [settings], overrides, origin=origin)
