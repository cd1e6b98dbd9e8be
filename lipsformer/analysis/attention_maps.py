"""Where a model looks: how much attention every token of a feature map receives."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lipsformer.layers import (
    LipschitzNormAttention,
    ScaledCosineAttention,
    cosine_normalize,
    merge_heads,
)
from lipsformer.layers.lipschitz_norm import dense_quadratic_scale
from lipsformer.models.lipsformer import fit_window


class Layout(NamedTuple):
    """How tokens lie: in windows of (h, w) on a map of (H, W), after a number of class tokens.

    Windows may begin ``shift`` rows and columns inside the map, which is then cyclic.
    """

    window: tuple[int, int]
    size: tuple[int, int]
    num_prefix_tokens: int = 0
    shift: tuple[int, int] = (0, 0)


def attention_maps(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    r"""Return the attention that each token receives, per attention module and head.

    .. math:: r_k = \sum_q A_{qk}

    over the queries q of the token's window, padding included. Its mean over a window is 1, which
    is also what every token receives where attention is uniform.

    Args:
        model: A LipsFormer, or a timm ViT or Swin in its Lipschitz form; runs in evaluation mode
            and is put back.
        images: Normalised images, [B, 3, H, W].

    Returns:
        Module name -> [B, heads, H', W'], float32, in order of depth. Heads of the two directions
        of stripes follow each other, vertical ones first. Class tokens take part and are left out.

    Raises:
        TypeError: If the model has no attention whose layout is known here.
    """
    maps: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        layout = _LAYOUTS.get(f"{type(module).__module__}.{type(module).__qualname__}")
        if layout is not None:
            # a weighted residual holds the attention as its branch
            handles += _watch(name.removesuffix(".branch"), module, partial(layout, model), maps)
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(images)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    if not any(maps.values()):
        raise TypeError(f"{type(model).__name__} has no attention whose map could be drawn")
    return {name: torch.cat(parts, dim=1) for name, parts in maps.items()}


def attention_scores(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the scores of ``ScaledCosineAttention`` or ``LipschitzNormAttention``.

    Args:
        module: The attention.
        q: Queries, [B, H, N, d].
        k: Keys, [B, H, N, d].
        v: Values, [B, H, N, d].
        bias: Added to the scores.

    Returns:
        [B, H, N, N]; the softmax of its rows weighs the values.
    """
    if isinstance(module, ScaledCosineAttention):
        q = cosine_normalize(q, module.eps, module.tau())
        k = cosine_normalize(k, module.eps)
    else:
        q = q * dense_quadratic_scale(q, k, v)
    scores = q @ k.transpose(-2, -1)
    return scores if bias is None else scores + bias


def _watch(
    name: str,
    module: nn.Module,
    layout: Callable[[Any, int, Tensor], Layout],
    maps: dict[str, list[Tensor]],
) -> Iterator[RemovableHandle]:
    x: list[Tensor] = []

    def keep_input(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        x[:] = args[:1]
        maps[name] = []

    def keep_map(core: nn.Module, args: tuple[Tensor, ...]) -> None:
        window, size, prefix, shift = layout(module, len(maps[name]), x[0])
        attn = attention_scores(core, *args).softmax(-1)
        received = attn.sum(-2)[..., prefix:]
        merged = merge_heads(received.unsqueeze(-1), window, size)
        maps[name].append(merged.roll(shift, (1, 2)).permute(0, 3, 1, 2).float())

    yield module.register_forward_pre_hook(keep_input)
    for core in module.modules():
        if isinstance(core, (ScaledCosineAttention, LipschitzNormAttention)):
            yield core.register_forward_pre_hook(keep_map)


def _stripes(_: Any, module: Any, branch: int, x: Tensor) -> Layout:
    size = (x.shape[1], x.shape[2])
    return Layout(module.stripe(branch, *size), size)


def _windows(_: Any, module: Any, __: int, x: Tensor) -> Layout:
    size = (x.shape[1], x.shape[2])
    h, w = (fit_window(side, most) for side, most in zip(size, module.window_size, strict=True))
    return Layout((h, w), size)


def _sequence(model: Any, _: Any, __: int, ___: Tensor) -> Layout:
    grid = model.patch_embed.grid_size
    return Layout(grid, grid, model.num_prefix_tokens)


def _shifted_windows(_: Any, block: Any, __: int, x: Tensor) -> Layout:
    return Layout(block.window_size, (x.shape[1], x.shape[2]), shift=block.shift_size)


# Named, not imported: analysis stands below the models.
_LAYOUTS = {
    "lipsformer.models.lipsformer_cswin.StripeAttention": _stripes,
    "lipsformer.models.lipsformer_swin.WindowAttention": _windows,
    "lipsformer.models.timm_conversion.CosineAttention": _sequence,
    "timm.models.swin_transformer.SwinTransformerBlock": _shifted_windows,
}
