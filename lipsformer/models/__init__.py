"""LipsFormer for images; importing this package registers the models with timm."""

from lipsformer.models.lipschitz_form import convert
from lipsformer.models.lipsformer_cswin import LipsFormerCSwin
from lipsformer.models.lipsformer_swin import LipsFormerSwin
from lipsformer.models.lipsformer_vit import LipsFormerViT

__all__ = ["LipsFormerCSwin", "LipsFormerSwin", "LipsFormerViT", "convert"]
