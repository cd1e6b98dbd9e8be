"""Training and evaluation mode of the modules of a model."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Give every module of a model its mode back at the end, also if some differ from the model's.

    Example:
        >>> from lipsformer._modes import modes_restored
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with modes_restored(model):
        ...     _ = model.eval()
        >>> [module.training for module in model]
        [True, False]
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
