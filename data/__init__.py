"""The application's data side: sources, transforms, loaders."""

from data.batch import Normalize, TrainBatchTransform
from data.build import build_datasets, build_eval_dataset
from data.errors import DataError, UnreadableImageError
from data.loader import TrainBatches, Update, eval_loader

__all__ = [
    "DataError",
    "Normalize",
    "TrainBatchTransform",
    "TrainBatches",
    "UnreadableImageError",
    "Update",
    "build_datasets",
    "build_eval_dataset",
    "eval_loader",
]
