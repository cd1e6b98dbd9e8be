"""LipsFormer for images; importing this package registers the models with timm."""

from lipsformer.models import converted as converted  # registers a name with timm
from lipsformer.models.lipsformer_contractive import LipsFormerContractive
from lipsformer.models.lipsformer_cswin import LipsFormerCSwin
from lipsformer.models.lipsformer_swin import LipsFormerSwin
from lipsformer.models.lipsformer_vit import LipsFormerViT
from lipsformer.models.timm_conversion import convert

__all__ = ["LipsFormerCSwin", "LipsFormerContractive", "LipsFormerSwin", "LipsFormerViT", "convert"]
