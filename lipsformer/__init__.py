"""Lipschitz-continuous transformers. Importing the package registers its models with timm."""

from lipsformer.models.inference import optimize_for_inference as optimize_for_inference
from lipsformer.models.timm_conversion import convert as convert

__version__ = "0.1.0"
