"""Where a classifier errs, against loops over the images."""

import math

import torch

from lipsformer.analysis.errors import confusion_matrix, most_confused_pairs, worst_mistakes


def test_matrix_and_pairs_equal_counts_in_a_loop():
    generator = torch.Generator().manual_seed(0)
    classes, images = 7, 523
    labels = torch.randint(classes - 1, (images,), generator=generator)  # the last has no images
    predicted = torch.where(
        torch.rand(images, generator=generator) < 0.5,
        labels,
        torch.randint(1, classes, (images,), generator=generator),  # the first is never guessed
    )
    counts: dict[tuple[int, int], int] = {}
    for label, guess in zip(labels.tolist(), predicted.tolist(), strict=True):
        counts[label, guess] = counts.get((label, guess), 0) + 1

    matrix = confusion_matrix(labels, predicted, classes)
    assert matrix.shape == (classes, classes)
    assert {tuple(c): matrix[tuple(c)].item() for c in matrix.nonzero().tolist()} == counts

    errors = [(*cell, n) for cell, n in sorted(counts.items()) if cell[0] != cell[1]]
    expected = sorted(errors, key=lambda error: -error[2])  # stable: ties in the matrix's order
    assert most_confused_pairs(matrix, 5) == expected[:5]
    assert most_confused_pairs(matrix, 1000) == expected


def test_without_errors_no_pair_is_confused():
    labels = torch.tensor([2, 0, 1, 1])
    assert most_confused_pairs(confusion_matrix(labels, labels, 3), 4) == []


def test_wrong_images_come_first_and_each_part_by_its_loss():
    logits = torch.randn(53, 5, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(53) % 5
    rows = []
    for index, (row, label) in enumerate(zip(logits.tolist(), labels.tolist(), strict=True)):
        loss = math.log(sum(math.exp(z) for z in row)) - row[label]
        rows.append((row.index(max(row)) == label, -loss, index))
    expected = [index for *_, index in sorted(rows)]
    assert sum(not right for right, *_ in rows) not in (0, 53)
    assert worst_mistakes(logits, labels, 53).tolist() == expected
    assert worst_mistakes(logits, labels, 11).tolist() == expected[:11]
