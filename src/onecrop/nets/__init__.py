"""Networks: backbones that end in pooled features, and the heads that sit on them."""

from onecrop.nets.backbones import BACKBONES, Pixels, build_backbone, load_backbone, read_backbone, save_backbone
from onecrop.nets.from_timm import build_timm
from onecrop.nets.heads import mlp, two_layers

__all__ = [
    "BACKBONES",
    "Pixels",
    "build_backbone",
    "build_timm",
    "load_backbone",
    "mlp",
    "read_backbone",
    "save_backbone",
    "two_layers",
]
