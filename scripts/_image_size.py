"""The option `--img-size` of commands on models."""

from typing import Any

import torch

from lipsformer._errors import ConfigError, first_line
from lipsformer.engine.preflight import try_images


def resize_input(model: Any, name: str, channels: int, img_size: int) -> None:
    """Make a model take images of another size. It is then in evaluation mode.

    Args:
        model: The model.
        name: What the user calls it, for messages.
        channels: Number of channels of an image.
        img_size: Side of the images in pixels.

    Raises:
        ConfigError: If the model does not take such images.
    """
    refusal = f"--img-size {img_size} is not possible for {name}"
    if img_size < 1:
        raise ConfigError(f"{refusal}: it must be at least 1")
    if hasattr(model, "set_input_size"):
        try:
            model.set_input_size(img_size=img_size)
        except Exception as error:  # timm's models raise whatever their operators raise
            raise ConfigError(f"{refusal}: {first_line(error)}") from None
    device = next(model.parameters()).device
    try_images(model.eval(), torch.zeros(1, channels, img_size, img_size, device=device), refusal)
