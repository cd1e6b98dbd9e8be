"""The instrument that keeps the matrices of a model orthogonal during training."""

from collections.abc import Mapping

import torch
from torch import nn

from lipsformer._sharding import assign, full_tensor
from lipsformer.analysis.instruments.base import InstrumentBase
from lipsformer.analysis.sigma import operators
from lipsformer.layers.contractive import orthogonal_parts, orthogonalize


class Orthogonal(InstrumentBase):
    r"""Keep every hidden matrix orthogonal, with rows or columns of length 1.

    Every update is followed by one step of Newton and Schulz's iteration towards the nearest
    orthogonal matrix (`orthogonalize`). The singular values are then at most 1 for any update that
    left them below 2. Queries, keys and values are three matrices. The classifier is left as it is,
    because a certificate does not depend on its scale.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.instruments import Orthogonal
        >>> layer = torch.nn.Linear(2, 2)
        >>> _ = torch.nn.init.constant_(layer.weight, 0.0)
        >>> with torch.no_grad():
        ...     _ = layer.weight.fill_diagonal_(0.9)
        >>> Orthogonal(layer).before_eval()
        {}
        >>> torch.linalg.svdvals(layer.weight.detach())
        tensor([1., 1.])
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the matrices.

        Args:
            model: The model without the wrappers of DDP or the compiler.
        """
        found = getattr(model, "get_classifier", lambda: None)()
        classifiers = found if isinstance(found, tuple) else (found,)  # distilled DeiT has two
        last = {id(getattr(classifier, "weight", None)) for classifier in classifiers}
        self.operators = [
            op for op in operators(model) if op.is_matrix and id(op.weight) not in last
        ]

    def after_step(self, step: int) -> None:
        """Make one step towards the nearest orthogonal matrices.

        Args:
            step: Number of optimizer steps completed before this one.
        """
        self._move(exact=False)

    def before_eval(self) -> Mapping[str, Mapping[str, float]]:
        """Take the nearest orthogonal matrices, except for singular values that are 0."""
        self._move(exact=True)
        return {}

    def _move(self, *, exact: bool) -> None:
        for op in self.operators:
            parts = orthogonal_parts(op.name, full_tensor(op.weight))
            assign(op.weight, torch.cat([orthogonalize(part, exact) for part in parts]))
