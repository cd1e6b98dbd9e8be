"""Where a classifier errs: confusion matrix, most confused pairs, worst mistakes."""

import torch
from torch import Tensor


def confusion_matrix(labels: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Count images by their class and by the class that was predicted.

    Args:
        labels: [N], int64 in [0, num_classes).
        predicted: [N], likewise.
        num_classes: Number of classes K.

    Returns:
        [K, K], int64, on the CPU: rows are classes, columns predictions.
    """
    # bincount has no deterministic form on a GPU
    cells = (labels * num_classes + predicted).cpu()
    return torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes)


def most_confused_pairs(matrix: Tensor, limit: int) -> list[tuple[int, int, int]]:
    """Return the confusions with most images as (class, predicted class, images).

    Args:
        matrix: [K, K] of ``confusion_matrix``.
        limit: Largest number of pairs, > 0.

    Returns:
        Most images first, equal ones in the order of the matrix; pairs without images are left out.
    """
    errors = matrix.clone().fill_diagonal_(0).flatten()
    order = errors.argsort(descending=True, stable=True)[:limit]
    classes = matrix.shape[0]
    return [
        (cell // classes, cell % classes, images)
        for cell, images in zip(order.tolist(), errors[order].tolist(), strict=True)
        if images > 0
    ]


def worst_mistakes(logits: Tensor, labels: Tensor, limit: int) -> Tensor:
    """Return the images of highest cross entropy, wrong ones before right ones.

    Args:
        logits: [N, K].
        labels: [N].
        limit: Largest number of images.

    Returns:
        Indices, [min(limit, N)].
    """
    loss = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    by_loss = loss.argsort(descending=True, stable=True)
    right = logits.argmax(-1).eq(labels)[by_loss]
    return by_loss[right.to(torch.int8).argsort(stable=True)][:limit]
