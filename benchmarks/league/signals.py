"""The two signals of a coming failure: attention entropy, and the spectrum of Wq^T Wk."""

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lipsformer._modes import modes_restored
from lipsformer.analysis.attention_maps import attention_scores
from lipsformer.layers import ScaledCosineAttention
from lipsformer.models.lipsformer_swin import WindowAttention

LARGEST = 2  # of the 8 singular values of a head


@torch.no_grad()
def attention_entropy(model: nn.Module, images: Tensor) -> list[float]:
    r"""Return the entropy of the attention of every block, as a share of the largest one.

    .. math:: -\frac{1}{\log N} \sum_j A_{ij} \log A_{ij}

    averaged over images, windows, heads and queries i. It is 1 where attention is uniform and 0
    where every query looks at one token.

    Args:
        model: A body of the league; it is put into evaluation mode and back.
        images: Normalized images, [B, 3, H, W].

    Reference:
        Zhai et al. 2023, arXiv:2303.06296.
    """
    found: list[float] = []

    def measure(core: Any, args: tuple[Tensor, ...]) -> None:
        if isinstance(core, ScaledCosineAttention):
            scores = attention_scores(core, *args)
        else:
            scores = core.scores(*args)
        attn = scores.softmax(-1)
        entropy = torch.special.entr(attn).sum(-1).mean() / math.log(attn.shape[-1])
        found.append(entropy.item())

    with modes_restored(model), ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, WindowAttention):
                hooks.enter_context(module.attention.register_forward_pre_hook(measure))
        model.eval()(images)
    return found


@torch.no_grad()
def spectral_concentration(model: nn.Module) -> list[float]:
    r"""Return the spectral energy concentration of Wq^T Wk of every block.

    .. math:: SEC = \sum_{i \le s} \sigma_i^2(W_q^T W_k) \Big/ \sum_i \sigma_i^2(W_q^T W_k)

    per head, averaged over the heads, with s = 2 of the 8 singular values of a head. Gains and
    norms between the weights and the scores do not enter.

    Args:
        model: A body of the league.

    Reference:
        Qi et al. 2025, "Taming Transformer without using learning rate warmup", arXiv:2505.21910.
    """
    found = []
    for module in model.modules():
        if isinstance(module, WindowAttention):
            heads = module.qkv.weight.unflatten(0, (3, module.num_heads, -1))
            product = heads[0].mT @ heads[1]
            if not product.isfinite().all():
                return []
            energy = torch.linalg.svdvals(product.double()).square()
            shares = energy[:, :LARGEST].sum(1) / energy.sum(1).clamp_min(1e-300)
            found.append(shares.mean().item())
    return found
