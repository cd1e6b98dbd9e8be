"""The bounds of `lipsformer_contractive_*`, for `python -m scripts.check_certificate`."""

import math
from typing import Any

import numpy as np

from scripts._check_maps import UP, Map, gamma, layer, sigma
from scripts._check_swin import ARGUMENTS, Model, Parts, Walk


class Contractive(Model):
    """The bounds of a contractive LipsFormer, whose layers keep the constant 1.

    It has the names of a LipsFormer-Swin, with other blocks and without norms.
    """

    prefix, logit_scale = "lipsformer_contractive_", 0.25
    arguments = f"{ARGUMENTS} dims attn_share attn_least head_dim eps"

    def __init__(self, weights: dict[str, np.ndarray], config: dict[str, Any]):
        super().__init__(weights, config)
        self.eps = float(self.args.get("eps", 16.0))
        # The windows, one size for each stage, follow from the tables of biases.
        self.args = {key: value for key, value in self.args.items() if key != "window_size"}

    def block(self) -> Parts:
        """Return the parts of a block; `FoldShift` has the constant 1 (Theorem 30)."""
        inner = (("act1", self.identity), ("attn", self.mixing), ("fc2", self.linear))
        return (("fc1", self.linear), *inner, ("act2", self.identity))

    def center_norm(self, path: str, x: Map, walk: Walk) -> Map:
        """Return the input: there are no norms."""
        return self.identity(path, x, walk)

    def pool(self, path: str, x: Map, walk: Walk) -> Map:
        """Bound the joining of all tokens into one: the constant is 1 (Theorem 30)."""
        return super().pool(path, x._replace(size=(1, 1)), walk)

    def mixing(self, path: str, x: Map, walk: Walk) -> Map:
        """Bound [x_1, (1 - a) x_2 + (a / L) f(x_2)] with attention f (Theorem 31).

        The constant is at most max(1, 1 - a + a L_f / L) with
        L = nu eps^(-1/2) (tau (1 + min(m, n/2))^(1/2) + m^(1/2)). At 0 the output has at most the
        length (a / L) (|W^O| min(nu eps^(-1/2) |b^V|, nu H^(1/2)) + |b^O|).
        """
        if path not in self.paths:
            return self.identity(path, x, walk)
        a = min(max(float(self.of(f"{path}.mix")), self.args.get("attn_least", 0.0)), 1.0)
        given = x._replace(norm=UP * (x.norm + x.error), error=0.0)
        # The certificate states the constant of the attention without the factor a / L.
        self.apply((("branch", self.windows),), path, given, walk._replace(scale=1.0))
        known = self.attention(f"{path}.branch", x.size)
        mass, tau = float(known.mass.max()), float(known.tau.max())
        slope = known.nu * self.eps**-0.5
        scores = tau * math.sqrt(1.0 + min(mass, known.tokens / 2.0))
        divisor = (scores + math.sqrt(mass)) * slope
        factor = a / (divisor * (1.0 - 1e-9))
        value_bias = np.split(self.of(f"{path}.branch.qkv.bias"), 3)[2]
        length = min(UP * slope * float(np.linalg.norm(value_bias)), known.longest)
        shift = sigma(self.of(f"{path}.branch.proj.weight")) * length
        shift += self.bias(f"{path}.branch.proj")
        part = self.windows(f"{path}.branch", given, walk._replace(scale=factor))
        value, rounding = UP * (1.0 - a + part.value), gamma(3) * x.rms
        rounding += (gamma(6) + known.core) * part.rms
        mixed = layer(max(1.0, value), x, factor * shift, rounding)
        return mixed._replace(error=UP * (mixed.error + part.error))
