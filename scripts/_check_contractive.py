"""The bounds of `lipsformer_contractive_*`, for `python -m scripts.check_certificate`."""

import math
from types import ModuleType
from typing import Any

import numpy as np


def contractive(checker: ModuleType) -> type:
    """Return the class that bounds the models, from the module of the checker.

    Norms are absent, folds and shifts have the constant 1, and attention keeps it.
    """
    up, gamma = checker.UP, checker.gamma

    class Contractive(checker.Model):
        prefix, logit_scale = "lipsformer_contractive_", 0.25
        arguments = f"{checker.ARGUMENTS} dims attn_share attn_least head_dim eps"

        def __init__(self, weights: dict[str, np.ndarray], config: dict[str, Any]):
            super().__init__(weights, config)
            self.eps = float(self.args.get("eps", 16.0))
            # The windows, one size for each stage, follow from the tables of biases.
            self.args = {key: value for key, value in self.args.items() if key != "window_size"}

        def block(self) -> Any:
            inner = (("act1", self.identity), ("attn", self.mixing), ("fc2", self.linear))
            return (("fc1", self.linear), *inner, ("act2", self.identity))

        def center_norm(self, path: str, x: Any, _: Any) -> Any:
            return self.identity(path, x, 1.0)

        def pool(self, path: str, x: Any, scale: Any) -> Any:
            return super().pool(path, x._replace(size=(1, 1)), scale)  # all tokens were joined

        def mixing(self, path: str, x: Any, _: Any) -> Any:
            if path not in self.paths:
                return self.identity(path, x, 1.0)
            a = min(max(float(self.of(f"{path}.mix")), self.args.get("attn_least", 0.0)), 1.0)
            given = x._replace(norm=up * (x.norm + x.error), error=0.0)
            self.apply((("branch", self.windows),), path, given, 1.0)
            mass, tokens, slope, tau, longest, core = self.core
            divisor = (tau * math.sqrt(1.0 + min(mass, tokens / 2.0)) + math.sqrt(mass)) * slope
            factor = a / (divisor * (1.0 - 1e-9))
            value = np.split(self.of(f"{path}.branch.qkv.bias"), 3)[2]
            length = min(up * slope * float(np.linalg.norm(value)), longest)
            matrix = self.of(f"{path}.branch.proj.weight")
            shift = checker.sigma(matrix) * length + self.bias(f"{path}.branch.proj")
            self.noting = False
            part = self.windows(f"{path}.branch", given, factor)
            self.noting = True
            value, rounding = up * (1.0 - a + part.value), gamma(3) * x.rms
            rounding += (gamma(6) + core) * part.rms
            mixed = checker.layer(max(1.0, value), x, factor * shift, rounding)
            return mixed._replace(error=up * (mixed.error + part.error))

    return Contractive
