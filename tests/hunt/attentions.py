"""Structures of attention in windows and stripes."""

from typing import Any

from hypothesis import strategies as st
from torch import nn

from lipsformer.layers import (
    LipschitzNormAttention,
    ScaledCosineAttention,
)
from lipsformer.models.lipsformer_contractive import ContractiveResidual
from lipsformer.models.lipsformer_cswin import StripeAttention
from lipsformer.models.lipsformer_swin import WindowAttention
from tests.hunt.cases import Subject, kind
from tests.hunt.layers import SIDE, tokens

SIZE = st.tuples(SIDE, st.integers(1, 3))
HEADS = st.sampled_from([1, 2, 3])
HEAD_DIM = st.sampled_from([1, 2])
FORMS = ("cosine", "raw", "lipschitznorm")
COSINE = st.fixed_dictionaries(
    {
        "tau": st.sampled_from([10.0, 0.1, 1.0, 100.0]),
        "learn": st.booleans(),
        "nu": st.sampled_from([1.0, 0.1, 7.0]),
        "eps": st.sampled_from([1e-2, 1e-6, 1.0]),
        "fused": st.booleans(),
    }
)


def attention(heads: int, form: str, cosine: dict[str, Any]) -> nn.Module:
    """Return an attention on queries, keys and values."""
    if form == "lipschitznorm":
        made: Any = LipschitzNormAttention(heads)
    else:
        made = ScaledCosineAttention(
            heads,
            logit_scale=cosine["tau"],
            learn_logit_scale=cosine["learn"],
            value_scale=None if form == "raw" else cosine["nu"],
            eps=cosine["eps"],
        )
    made.fused_attn = cosine["fused"]
    return made


def _register(form: str) -> None:
    @kind(
        f"WindowAttention, {form}",
        size=SIZE,
        heads=HEADS,
        head_dim=HEAD_DIM,
        window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        cosine=COSINE,
    )
    def windows(size: Any, heads: int, head_dim: int, window: Any, cosine: Any) -> Subject:
        dim = heads * head_dim
        module = WindowAttention(dim, heads, tuple(window), attention(heads, form, cosine))
        return tokens(module, size, dim, False)

    @kind(
        f"StripeAttention, {form}",
        size=SIZE,
        heads=st.sampled_from([1, 2]),
        head_dim=HEAD_DIM,
        split=st.sampled_from([None, 1, 2, 3]),
        cosine=COSINE,
        compat=st.booleans(),
    )
    def stripes(
        size: Any, heads: int, head_dim: int, split: int | None, cosine: Any, compat: bool
    ) -> Subject:
        partitions = 1 if split is None else 2
        attentions = nn.ModuleList(attention(heads, form, cosine) for _ in range(partitions))
        dim = partitions * heads * head_dim
        module = StripeAttention(dim, partitions * heads, split, attentions, compat)
        return tokens(module, size, dim, False)


for _form in FORMS:
    _register(_form)


@kind(
    "ContractiveResidual",
    size=SIZE,
    kept=st.sampled_from([0, 1, 3]),
    heads=HEADS,
    head_dim=HEAD_DIM,
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    cosine=COSINE,
)
def _contractive(
    size: Any, kept: int, heads: int, head_dim: int, window: Any, cosine: Any
) -> Subject:
    dim = heads * head_dim
    core = attention(heads, "cosine", {**cosine, "learn": False})
    branch = WindowAttention(dim, heads, tuple(window), core)
    return tokens(ContractiveResidual(branch, dim), size, kept + dim, False)
