"""Errors of a classifier: confusion matrix, most confused pairs, worst mistakes."""

import torch
from torch import Tensor


def confusion_matrix(labels: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Count the images by class and predicted class.

    Args:
        labels: Classes, [N], int64 in [0, num_classes).
        predicted: Predicted classes, [N], int64 in [0, num_classes).
        num_classes: Number of classes K.

    Returns:
        The counts, [K, K], int64, on the CPU. Rows are classes and columns are predictions.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.errors import confusion_matrix
        >>> confusion_matrix(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), num_classes=2)
        tensor([[1, 1],
                [0, 1]])
    """
    # On a GPU, bincount is not deterministic.
    cells = (labels * num_classes + predicted).cpu()
    return torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes)


def most_confused_pairs(matrix: Tensor, limit: int) -> list[tuple[int, int, int]]:
    """Return the most frequent confusions as (class, predicted class, number of images).

    Args:
        matrix: Result of `confusion_matrix`, [K, K].
        limit: Largest number of pairs, > 0.

    Returns:
        The pairs with at least one image, most images first. Ties keep the order of the matrix.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.errors import most_confused_pairs
        >>> most_confused_pairs(torch.tensor([[7, 2, 0], [1, 9, 0], [0, 3, 8]]), limit=2)
        [(2, 1, 3), (0, 1, 2)]
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
    """Return the images of highest cross entropy, wrong predictions before right ones.

    Args:
        logits: [N, K].
        labels: Classes, [N], int64 in [0, K).
        limit: Largest number of images, at least 0.

    Returns:
        Indices of the images, [min(limit, N)].

    Example:
        >>> import torch
        >>> from lipsformer.analysis.errors import worst_mistakes
        >>> logits = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 5.0]])  # the first one is right
        >>> worst_mistakes(logits, torch.tensor([0, 0, 0]), limit=2)
        tensor([2, 1])
    """
    loss = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    by_loss = loss.argsort(descending=True, stable=True)
    right = logits.argmax(-1).eq(labels)[by_loss]
    return by_loss[right.to(torch.int8).argsort(stable=True)][:limit]
