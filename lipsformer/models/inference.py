"""A model for inference: the same function with fewer passes and fewer calls."""

import copy
from typing import Any, cast

import torch
from torch import nn

from lipsformer._hooks import has_own_forward
from lipsformer._renamed import renamed
from lipsformer.layers import CenterNorm, Linear, ScaledCosineAttention
from lipsformer.models.folded_layers import FrozenLinear
from lipsformer.models.folding import FOLDS, fold_obstacle, require_single_use
from lipsformer.models.recorded import RecordedForward


class NothingToFoldError(TypeError):
    """A model has none of the layers that can be folded."""


@torch.inference_mode(False)  # writes to a tensor of that mode would go unnoticed
@torch.no_grad()
def optimize_for_inference(model: nn.Module) -> nn.Module:
    r"""Return a copy of a model in which every affine map that allows it is folded.

    .. math:: W\,CN(x) + b = W'x + b', \quad
        W' = W \mathrm{diag}(\gamma) \tfrac{d}{d-1} (I - 11^T/d), \quad b' = b + W\beta

    :math:`CN(Wx + b)` is folded in the same way. Residual scales enter the last linear layer of
    their branch. Everything is computed in float64 and rounded once. On the CPU in float32, linear
    layers run from a copy of their weights in another layout, GELU included, which doubles the
    memory of the weights. The last CenterNorm is not folded, because `forward_features` returns
    its result, and neither are scales after a GELU.

    On the CPU without gradients, the second batch of images of the same shape records the calls of
    all operators, and later calls repeat that list without the modules (`RecordedForward`), which
    gives the same bits. It saves most where images are few or small. More than 4 images of 224 px
    for each thread, or 8 in bf16, and as many pixels of other sizes, are computed in parts.

    The copy gives the same logits and features. Its parameters have other names and no gradients;
    keep the model itself for training, checkpoints and Lipschitz bounds. Weights, modules and hooks
    that are written or replaced later are noticed, except weights that are written in ways that
    PyTorch does not count as writes: through `weight.data`, `weight.numpy()` or DLPack, by
    optimizers with `fused=True`, and by collectives of `torch.distributed`. Changes of other
    attributes, such as `value_scale`, are not noticed: make them in the model and fold it again.

    Example:
        >>> import timm, torch
        >>> import lipsformer
        >>> model = timm.create_model("lipsformer_nano").eval()
        >>> lipsformer.optimize_for_inference(model)(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 1000])

    Args:
        model: A LipsFormer (CSwin, Swin, ViT, contractive), also with `features_only`, or a
            model made by `convert`, in evaluation mode.

    Raises:
        ValueError: If the model is in training mode.
        NothingToFoldError: If the model has no layer of LipsFormer.
        TypeError: If the model is folded already, has a forward function of its own, or a module
            that would be folded is used twice, was replaced, has hooks or belongs to an adapter
            such as LoRA, so that the folded model would compute something else. Also if a hook
            computes a weight, as in pruned models.
    """
    _require_foldable(model)
    folded = copy.deepcopy(model)
    for name, module in list(folded.named_modules()):
        fold = FOLDS.get(type(module))
        if fold is None:
            continue
        try:
            if has_own_forward(module):
                raise TypeError(f"{type(module).__name__} has a forward function of its own")
            fold(module)
        except TypeError as error:
            raise TypeError(f"{name} cannot be folded: {error}") from None
    has_head = hasattr(folded, "get_classifier")  # a model of features_only has none
    classifier = cast(Any, folded).get_classifier() if has_head else None
    for parent in list(folded.modules()):
        for name, child in parent.named_children():
            linear = type(child) in (Linear, nn.Linear) and fold_obstacle(child) is None
            if linear and child is not classifier:
                setattr(parent, name, FrozenLinear(cast(nn.Linear, child)))
    folded.forward = RecordedForward(folded).forward
    return folded.requires_grad_(False).eval()


def _require_foldable(model: nn.Module) -> None:
    """Raise an error that `optimize_for_inference` documents if a model cannot be folded."""
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    if any(isinstance(module, FrozenLinear) for module in model.modules()):
        raise TypeError(
            f"this {type(model).__name__} is folded already: use it as it is, or pass the model "
            "from which it was made"
        )
    if has_own_forward(model):
        raise TypeError(
            f"this {type(model).__name__} has a forward function of its own, which the folded "
            "model would lose (torch.compile and Accelerate set one): pass the model without it"
        )
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                raise TypeError(
                    f"{name}.{key} is computed by a hook, as by torch.nn.utils.prune: make it a "
                    "parameter again, for example by prune.remove or remove_weight_norm"
                )
    if not any(
        isinstance(module, (CenterNorm, ScaledCosineAttention)) for module in model.modules()
    ):
        raise NothingToFoldError(
            f"{type(model).__name__} has nothing to fold: pass a LipsFormer or a model of convert()"
        )
    require_single_use(model, "cannot be folded for both places")


__getattr__ = renamed(__name__)
