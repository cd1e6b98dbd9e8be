"""Lipschitz-continuous transformers; importing the package registers its models with timm."""

from lipsformer.models.inference import optimize_for_inference as optimize_for_inference
from lipsformer.models.lipschitz_form import convert as convert

__version__ = "0.1.0"
