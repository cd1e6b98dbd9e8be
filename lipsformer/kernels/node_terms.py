"""What additive graph attention reads of every node, on the CPU in one pass over the map.

Shapes: N nodes, H heads, C channels per head.
"""

from typing import Any

import torch
from torch import Tensor

from lipsformer.kernels.bindings import run
from lipsformer.kernels.dispatch import is_batch


def node_terms(
    x: Tensor, source_weight: Tensor, target_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `x` for further use, its products with two weights per head and its squared norms.

    The backward pass adds the gradients of all four at once. It can be differentiated again.

    Args:
        x: [N, H, C], contiguous.
        source_weight: [1, H, C].
        target_weight: [1, H, C].

    Returns:
        [N, H, C] and three times [N, H].
    """
    return _NodeTerms.apply(x, source_weight, target_weight)


class _NodeTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        terms = x.new_empty(3, *x.shape[:2]).unbind()
        run("node_terms_float32", x, *weights, *terms, *x.shape)
        return x.view_as(x), *terms

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        if torch.is_grad_enabled() or any(is_batch(grad) for grad in grads):
            source_weight, target_weight = weights
            of_source, of_target, of_square = (grad.unsqueeze(-1) for grad in grads[1:])
            by_terms = of_source * source_weight + of_target * target_weight + 2 * of_square * x
            of_weights = ((grad * x).sum(-3, keepdim=True) for grad in (of_source, of_target))
            return grads[0] + by_terms, *of_weights
        found = [torch.empty_like(tensor) for tensor in (x, *weights)]
        grads = tuple(grad.contiguous() for grad in grads)
        run("node_terms_gradients_float32", x, *weights, *grads, *found, *x.shape)
        return tuple(found)
