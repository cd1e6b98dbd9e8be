"""The instrument that compares proved bounds with a limit before every evaluation."""

import math
from collections.abc import Mapping

from torch import nn

from lipsformer._arguments import check_positive
from lipsformer.analysis.bounds import Domain, gathered_bound
from lipsformer.analysis.instruments.base import InstrumentBase


class BoundExceededError(RuntimeError):
    """The proved bound of a model exceeds its limit."""


class BoundCheck(InstrumentBase):
    """Compute the proved bounds of models before every evaluation, and compare them with a limit.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.bounds import Domain
        >>> from lipsformer.analysis.instruments import BoundCheck
        >>> check = BoundCheck({"raw": torch.nn.Identity()}, Domain(size=()), limit=2.0)
        >>> f"{check.before_eval()['raw']['bound_log10']:.6f}"
        '0.000000'
    """

    def __init__(
        self, models: Mapping[str, nn.Module], domain: Domain, limit: float | None = None
    ) -> None:
        """Set models, domain and limit.

        Args:
            models: The models without the wrappers of DDP or the compiler, by kind of weights.
            domain: Domain of the bound.
            limit: Largest allowed bound, > 0; None for no limit.

        Raises:
            ValueError: If `limit` is not positive and finite.
        """
        if limit is not None:
            check_positive("limit", limit)
        self.models, self.domain, self.limit = models, domain, limit

    def before_eval(self) -> Mapping[str, Mapping[str, float]]:
        """Return `bound_log10` by kind of weights. FSDP2 may have sharded the models.

        Raises:
            BoundExceededError: If a bound exceeds the limit.
        """
        return {kind: {"bound_log10": self._log10(model)} for kind, model in self.models.items()}

    def _log10(self, model: nn.Module) -> float:
        log10 = gathered_bound(model, self.domain).log10
        if self.limit is not None and not log10 <= math.log10(self.limit):
            raise BoundExceededError(
                f"the proved Lipschitz bound is 10^{log10:.3f}, above the limit {self.limit:g}: "
                "tighten the caps or raise the limit"
            )
        return log10
