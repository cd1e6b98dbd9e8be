"""Attention maps: how much attention every token of a feature map receives."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lipsformer._modes import modes_restored
from lipsformer._sharding import resharded
from lipsformer.analysis.bounds import Layout, registration_of
from lipsformer.layers import (
    LipschitzNormAttention,
    ScaledCosineAttention,
    cosine_normalize,
)
from lipsformer.layers.cosine_attention import additive_bias
from lipsformer.layers.lipschitz_norm import dense_quadratic_scale


def attention_maps(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    r"""Return the attention that each token receives, per attention module and head.

    .. math:: r_k = \sum_q A_{qk}

    The sum runs over the queries q of the token's window, padding included. The mean over a window
    is 1, which is also the value of every token under uniform attention.

    Args:
        model: A LipsFormer, or a timm ViT or Swin after `lipsformer.convert`. It runs in evaluation
            mode and is set back to its mode.
        images: Normalized images, [B, 3, H, W].

    Returns:
        Maps [B, heads, H', W'] in float32, by module name, in the order of depth. For stripes the
        vertical heads come first. Class tokens count as queries, but their own maps are left out.

    Raises:
        TypeError: If the model has no attention whose class is registered with a layout.

    Example:
        >>> import timm, torch
        >>> from lipsformer.analysis.attention_maps import attention_maps
        >>> model = timm.create_model("lipsformer_swin_nano")
        >>> maps = attention_maps(model, torch.randn(2, 3, 32, 32))["stages.0.blocks.0.attn"]
        >>> tuple(maps.shape), f"{maps.mean():.3f}"
        ((2, 2, 16, 16), '1.000')
    """
    maps: dict[str, list[Tensor]] = {}
    with modes_restored(model), torch.no_grad(), ExitStack() as hooks:
        for name, module in model.named_modules():
            registered = registration_of(type(module))
            if registered is not None and registered.layout is not None:
                layout = partial(registered.layout, model)
                for handle in _record_maps(name, module, layout, maps):
                    hooks.enter_context(handle)
        model.eval()(images)
    if not any(maps.values()):
        raise TypeError(
            f"{type(model).__name__} has no attention whose map is known: register its class with "
            "lipsformer.analysis.bounds.bound_rule(cls, layout=...)"
        )
    return {name.removesuffix(".branch"): torch.cat(m, dim=1) for name, m in maps.items()}


def attention_scores(
    core: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the scores of an attention, before the softmax.

    Args:
        core: A `ScaledCosineAttention` or `LipschitzNormAttention`.
        q: Queries, [B, H, N, d].
        k: Keys, [B, H, N, d].
        v: Values, [B, H, N, d]. Only the scores of `LipschitzNormAttention` depend on them.
        bias: Bias that is added to the scores, broadcastable to [B, H, N, N]; if it is boolean,
            True marks the keys that take part, and a query without a key has the same score for
            all keys. None for none.

    Returns:
        The scores, [B, H, N, N]. Rows are queries.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.attention_maps import attention_scores
        >>> from lipsformer.layers import ScaledCosineAttention
        >>> core = ScaledCosineAttention(num_heads=1, logit_scale=8.0)
        >>> x = torch.tensor([[100.0, 0.0], [0.0, 100.0]])[None, None]  # two orthogonal tokens
        >>> attention_scores(core, x, x, x)[0, 0].round(decimals=3)  # 8 times their cosines
        tensor([[8., 0.],
                [0., 8.]])
    """
    if isinstance(core, ScaledCosineAttention):
        q = cosine_normalize(q, core.eps, core.tau())
        k = cosine_normalize(k, core.eps)
    else:
        q = q * dense_quadratic_scale(q, k, v)
    scores = q @ k.transpose(-2, -1)
    bias, _ = additive_bias(bias, q)
    return scores if bias is None else scores + bias


@torch.no_grad()
def probe_attention(model: nn.Module, probe: Tensor) -> dict[str, Tensor]:
    """Return the mean entropy and the largest score of every scaled cosine attention.

    Args:
        model: The model. It runs in evaluation mode and is set back to its mode.
        probe: A few inputs, [B, ...].

    Returns:
        Scalar tensors `attn_entropy/<name>`, in nats, and `max_score/<name>`.

    Example:
        >>> import timm, torch
        >>> from lipsformer.analysis.attention_maps import probe_attention
        >>> model = timm.create_model("lipsformer_swin_nano", depths=(1,), num_heads=(2,))
        >>> record = probe_attention(model, torch.zeros(1, 3, 32, 32))  # windows of 16 equal tokens
        >>> f"{record['attn_entropy/stages.0.blocks.0.attn.branch.attention']:.2f}"  # log(16)
        '2.77'
    """
    record: dict[str, Tensor] = {}

    def measure(name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def hook(core: Any, args: tuple[Tensor, ...]) -> None:
            scores = attention_scores(core, *args).float()
            record[f"attn_entropy/{name}"] = torch.special.entr(scores.softmax(-1)).sum(-1).mean()
            record[f"max_score/{name}"] = scores.amax()

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, ScaledCosineAttention):
                hooks.enter_context(module.register_forward_pre_hook(measure(name)))
        # Without `force_eager`, a compiled model would compile another graph for the hooks.
        eager = torch.compiler.set_stance("force_eager")
        with modes_restored(model), resharded(model), eager:
            model.eval()(probe)
    return record


def _record_maps(
    name: str,
    module: nn.Module,
    layout: Callable[[Any, int, Tensor], Layout],
    maps: dict[str, list[Tensor]],
) -> Iterator[RemovableHandle]:
    """Hook a module so that its forward pass appends the map of each core to `maps[name]`."""
    x: list[Tensor] = []

    def keep_input(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        x[:] = args[:1]
        maps[name] = []

    def keep_map(core: nn.Module, args: tuple[Tensor, ...]) -> None:
        window, size, num_prefix_tokens, shift, merge = layout(module, len(maps[name]), x[0])
        attn = attention_scores(core, *args).softmax(-1)
        received = attn.sum(-2)[..., num_prefix_tokens:]
        merged = merge(received.unsqueeze(-1), window, size)
        maps[name].append(merged.roll(shift, (1, 2)).permute(0, 3, 1, 2).float())

    yield module.register_forward_pre_hook(keep_input)
    for core in module.modules():
        if isinstance(core, (ScaledCosineAttention, LipschitzNormAttention)):
            yield core.register_forward_pre_hook(keep_map)
