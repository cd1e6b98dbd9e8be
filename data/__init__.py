"""The application's data side: sources, transforms, loaders."""

from data.batch import Normalize, TrainBatchTransform
from data.build import (
    build_batch_transform,
    build_datasets,
    build_eval_dataset,
    build_eval_sets,
)
from data.errors import DataError, DataWarning, UnreadableImageError
from data.loader import TrainBatches, Update, collate, eval_loader

__all__ = [
    "DataError",
    "DataWarning",
    "Normalize",
    "TrainBatchTransform",
    "TrainBatches",
    "UnreadableImageError",
    "Update",
    "build_batch_transform",
    "build_datasets",
    "build_eval_dataset",
    "build_eval_sets",
    "collate",
    "eval_loader",
]
